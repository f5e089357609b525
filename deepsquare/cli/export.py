"""The commands that deploy: ``deepsquare export | predict``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import tyro
from torch import nn

from deepsquare.checkpoint import Pictures, load, read_header, read_pictures
from deepsquare.cli.train import model_file
from deepsquare.export import export, open_program
from deepsquare.export.exporter import logits_of
from deepsquare.export.images import CALIBRATING, COMPARED, apart, read_pictures_of, sample
from deepsquare.export.runtime import ENDINGS, Runtime

SHOWN = 5  # answers for a picture


def export_command(
    checkpoint: tyro.conf.Positional[Path],
    *,
    to: Runtime,
    output: Path | None = None,
    pictures: Path | None = None,
    int8: bool = False,
    any_size: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Write a checkpoint as a file that runs without PyTorch, and prove that it says the same there.

    The model is folded first. How pictures become its input, and the names of its classes, go into the file.

    Args:
        checkpoint: A safetensors file, or the folder of a training run.
        to: onnx for onnxruntime, executorch for phones and boards, by XNNPACK.
        output: The file; beside the checkpoint when not given.
        pictures: Folder with pictures, at any depth, to compare on and to calibrate int8 with; random input when not
            given.
        int8: Quantise weights and activations to eight bits; squares stay in float32.
        any_size: Of onnx, let the sides of the input vary too.
        as_json: Print JSON.
    """
    file = model_file(checkpoint)
    model, shown = _opened(file)
    place = output or file.with_name(f"{file.stem}{'-int8' if int8 else ''}{ENDINGS[to]}")
    if place.suffix != ENDINGS[to]:
        raise ValueError(f"the output is {place}; expected the ending {ENDINGS[to]} for {to}")
    if int8 and pictures is None:
        raise ValueError("int8 needs pictures to take its ranges from; give a folder, such as train: --pictures DIR")
    images, calibration = None, None
    if pictures is not None:
        images = read_pictures_of(sample(pictures, CALIBRATING + COMPARED if int8 else COMPARED), shown)
        if int8:
            calibration, images = apart(images)
            print(f"Taking ranges from {len(calibration)} pictures; this takes minutes.", file=sys.stderr, flush=True)
    made = export(model, place, shown, images=images, calibration=calibration, any_size=any_size)
    if as_json:
        print(json.dumps({**vars(made), "path": str(made.path)}))
        return
    kind = ("random input" if images is None else "picture") + ("s" if made.pictures > 1 else "")
    print(f"{made.path.resolve()}: {made.size / 1e6:.1f} MB for {to}, {made.precision}")
    print(
        f"On {made.pictures} {kind} it differs from the model by {made.difference:.1e} of the largest logit (PyTorch's "
        f"own float32: {made.rounding:.1e}); the first answer is the same for {made.agreement:.1%}."
    )
    if to == "executorch":
        outside = ", ".join(f"{count} × {name}" for name, count in made.outside.items())
        print(f"XNNPACK runs everything but {outside}." if outside else "XNNPACK runs everything.")
        if made.squares_outside:
            print(f"Of these, {made.squares_outside} are products, such as squares: they run slowly.")


def predict_command(
    model: tyro.conf.Positional[Path],
    images: tyro.conf.Positional[tuple[Path, ...]],
    *,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Name what pictures show: the five likeliest classes of each.

    Args:
        model: A checkpoint, the folder of a training run, or an exported .onnx or .pte file.
        images: Picture files.
        as_json: Print JSON.
    """
    if not images:
        raise ValueError("no picture is named; give one or more files")
    if model.suffix.lower() in ENDINGS.values():
        program = open_program(model)
        shown = program.description.pictures
        logits = program(read_pictures_of(images, shown, upright=True))
    else:
        network, shown = _opened(model_file(model))
        logits = logits_of(network.eval().float(), read_pictures_of(images, shown, upright=True))
    if lost := [str(file) for file, own in zip(images, logits, strict=True) if own.isnan().any()]:
        raise ValueError(f"{model} has no answer for {', '.join(lost)}: its logits are not numbers; train it further")
    chances = logits.float().softmax(1)
    names = shown.classes or tuple(f"class {number}" for number in range(chances.shape[1]))
    if len(names) != chances.shape[1]:
        raise ValueError(
            f"{model} names {len(names)} classes and tells {chances.shape[1]} apart; save it again with both"
        )
    best = chances.topk(min(SHOWN, len(names)))
    answers = [
        [(names[place], round(chance, 6)) for chance, place in zip(values, places, strict=True)]
        for values, places in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    if as_json:
        told = [
            {"picture": str(file), "answers": [{"class": name, "chance": chance} for name, chance in own]}
            for file, own in zip(images, answers, strict=True)
        ]
        print(json.dumps(told))
        return
    for file, own in zip(images, answers, strict=True):
        print(file)
        for name, chance in own:
            print(f"  {chance:6.1%}  {name}")


def _opened(file: Path) -> tuple[nn.Module, Pictures]:
    """The model of a checkpoint, and what it is shown: as it says, or as ImageNet's networks usually are."""
    model, shown = load(file), read_pictures(file)
    if shown is None:
        shape, usual = read_header(file)["input_shape"], Pictures(())
        shown = usual if shape is None or shape[-1] == usual.size else Pictures((), shape[-1], shape[-1])
        warnings.warn(
            f"{file} does not say how pictures become its input (deepsquare.save has pictures=… for that); taken as "
            f"the centre, {shown.size} × {shown.size} of a shorter side of {shown.resize}, normalised as for ImageNet",
            stacklevel=2,
        )
    return model, shown
