"""``deepsquare predict``: the likeliest classes of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

TOP_K = 5


def predict_command(
    model: tyro.conf.Positional[Path],
    images: tyro.conf.Positional[tuple[Path, ...]],
    *,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Classify images: the five likeliest classes of each.

    Args:
        model: A checkpoint, the folder of a training run, or an exported .onnx or .pte file.
        images: Image files.
        as_json: Print JSON.
    """
    from deepsquare.cli._checkpoint import load_model, model_file
    from deepsquare.export import load_exported
    from deepsquare.export.exporter import compute_logits
    from deepsquare.export.images import load_images
    from deepsquare.export.runtimes import is_exported

    if not images:
        raise ValueError("no image is named; give one or more files")
    if is_exported(model):
        exported = load_exported(model)
        preprocessing = exported.metadata.preprocessing
        logits = exported(load_images(images, preprocessing, upright=True))
    else:
        network, preprocessing = load_model(model_file(model))
        logits = compute_logits(network.eval().float(), load_images(images, preprocessing, upright=True))
    if failed := [str(file) for file, isnan in zip(images, logits.isnan().any(1), strict=True) if isnan]:
        raise ValueError(f"{model} has no prediction for {', '.join(failed)}: its logits are NaN; train it further")
    num_classes = logits.shape[1]
    names = preprocessing.class_names or tuple(f"class {index}" for index in range(num_classes))
    if len(names) != num_classes:
        raise ValueError(f"{model} has {len(names)} class names and {num_classes} outputs; save it again with both")
    top = logits.float().softmax(1).topk(min(TOP_K, num_classes))
    results = []
    for file, indices, values in zip(images, top.indices.tolist(), top.values.tolist(), strict=True):
        pairs = zip(indices, values, strict=True)
        predictions = [{"class": names[index], "probability": round(value, 6)} for index, value in pairs]
        results.append({"image": str(file), "predictions": predictions})
        if not as_json:
            lines = [f"  {value:6.1%}  {names[index]}" for index, value in zip(indices, values, strict=True)]
            print(file, *lines, sep="\n")
    if as_json:
        print(json.dumps(results))
