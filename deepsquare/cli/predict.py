"""``deepsquare predict``: the likeliest classes of images."""

import json
from pathlib import Path

import tyro

from deepsquare.cli._common import AsJson, load_model, model_file
from deepsquare.export import load_exported
from deepsquare.export.exporter import compute_logits
from deepsquare.export.images import load_images
from deepsquare.export.runtimes import is_exported

TOP_K = 5


def predict_command(
    model: tyro.conf.Positional[Path], images: tyro.conf.Positional[tuple[Path, ...]], *, as_json: AsJson = False
) -> None:
    """Classify images: the five likeliest classes of each.

    Args:
        model: A checkpoint, the folder of a training run, or an exported .onnx or .pte file.
        images: Image files.
    """
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
        likeliest = [(names[index], value) for index, value in zip(indices, values, strict=True)]
        predictions = [{"class": name, "probability": round(value, 6)} for name, value in likeliest]
        results.append({"image": str(file), "predictions": predictions})
        if not as_json:
            print(file, *(f"  {value:6.1%}  {name}" for name, value in likeliest), sep="\n")
    if as_json:
        print(json.dumps(results))
