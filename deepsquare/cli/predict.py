"""``deepsquare predict``: what images show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from deepsquare.cli._checkpoint import model_file, open_model
from deepsquare.export import load_exported
from deepsquare.export.exporter import compute_logits
from deepsquare.export.images import load_images
from deepsquare.export.runtime import SUFFIXES

SHOWN = 5  # answers for a image


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
        network, shown = open_model(model_file(model))
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
