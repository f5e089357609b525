"""The commands that deploy: ``deepsquare export | predict``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import tyro
from torch import nn

from deepsquare.checkpoint import Preprocessing, load, read_header, read_preprocessing
from deepsquare.cli.train import model_file
from deepsquare.export import export, load_exported
from deepsquare.export.exporter import compute_logits
from deepsquare.export.images import CALIBRATION_IMAGES, PARITY_IMAGES, load_images, sample_files, split_calibration
from deepsquare.export.runtime import SUFFIXES, Runtime

SHOWN = 5  # answers for a image


def export_command(
    checkpoint: tyro.conf.Positional[Path],
    *,
    to: Runtime,
    output: Path | None = None,
    images: Path | None = None,
    int8: bool = False,
    any_size: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Write a checkpoint as a file that runs without PyTorch, and prove that it says the same there.

    The model is folded first. How images become its input, and the names of its classes, go into the file.

    Args:
        checkpoint: A safetensors file, or the folder of a training run.
        to: onnx for onnxruntime, executorch for phones and boards, by XNNPACK.
        output: The file; beside the checkpoint when not given.
        images: Folder with images, at any depth, to compare on and to calibrate int8 with; random input when not
            given.
        int8: Quantise weights and activations to eight bits; squares stay in float32.
        any_size: Of onnx, let the sides of the input vary too.
        as_json: Print JSON.
    """
    file = model_file(checkpoint)
    model, shown = _opened(file)
    place = output or file.with_name(f"{file.stem}{'-int8' if int8 else ''}{SUFFIXES[to]}")
    if place.suffix != SUFFIXES[to]:
        raise ValueError(f"the output is {place}; expected the ending {SUFFIXES[to]} for {to}")
    if int8 and images is None:
        raise ValueError("int8 needs images to take its ranges from; give a folder, such as train: --images DIR")
    compared, calibration = None, None
    if images is not None:
        count = CALIBRATION_IMAGES + PARITY_IMAGES if int8 else PARITY_IMAGES
        compared = load_images(sample_files(images, count), shown)
        if int8:
            calibration, compared = split_calibration(compared)
            print(f"Taking ranges from {len(calibration)} images; this takes minutes.", file=sys.stderr, flush=True)
    made = export(model, place, shown, images=compared, calibration=calibration, any_size=any_size)
    if as_json:
        print(json.dumps({**vars(made), "path": str(made.path)}))
        return
    kind = ("random input" if images is None else "image") + ("s" if made.num_images > 1 else "")
    print(f"{made.path.resolve()}: {made.size / 1e6:.1f} MB for {to}, {made.precision}")
    print(
        f"On {made.num_images} {kind} it differs from the model by {made.max_rel_error:.1e} of the largest logit (PyTorch's "
        f"own float32: {made.fp32_error:.1e}); the first answer is the same for {made.top1_agreement:.1%}."
    )
    if to == "executorch":
        undelegated_ops = ", ".join(f"{count} × {name}" for name, count in made.undelegated_ops.items())
        print(f"XNNPACK runs everything but {undelegated_ops}." if undelegated_ops else "XNNPACK runs everything.")
        if made.undelegated_muls:
            print(f"Of these, {made.undelegated_muls} are products, such as squares: they run slowly.")


def predict_command(
    model: tyro.conf.Positional[Path],
    images: tyro.conf.Positional[tuple[Path, ...]],
    *,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Name what images show: the five likeliest classes of each.

    Args:
        model: A checkpoint, the folder of a training run, or an exported .onnx or .pte file.
        images: Image files.
        as_json: Print JSON.
    """
    if not images:
        raise ValueError("no image is named; give one or more files")
    if model.suffix.lower() in SUFFIXES.values():
        program = load_exported(model)
        shown = program.metadata.preprocessing
        logits = program(load_images(images, shown, upright=True))
    else:
        network, shown = _opened(model_file(model))
        logits = compute_logits(network.eval().float(), load_images(images, shown, upright=True))
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
            {"image": str(file), "answers": [{"class": name, "chance": chance} for name, chance in own]}
            for file, own in zip(images, answers, strict=True)
        ]
        print(json.dumps(told))
        return
    for file, own in zip(images, answers, strict=True):
        print(file)
        for name, chance in own:
            print(f"  {chance:6.1%}  {name}")


def _opened(file: Path) -> tuple[nn.Module, Preprocessing]:
    """The model of a checkpoint, and what it is shown: as it says, or as ImageNet's networks usually are."""
    model, shown = load(file), read_preprocessing(file)
    if shown is None:
        shape, usual = read_header(file)["input_shape"], Preprocessing(())
        shown = usual if shape is None or shape[-1] == usual.size else Preprocessing((), shape[-1], shape[-1])
        warnings.warn(
            f"{file} does not say how images become its input (deepsquare.save has images=… for that); taken as "
            f"the centre, {shown.size} × {shown.size} of a shorter side of {shown.resize}, normalised as for ImageNet",
            stacklevel=2,
        )
    return model, shown
