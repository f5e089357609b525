"""``deepsquare predict``: the likeliest classes of images."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import tyro
from torch import Tensor

from deepsquare._memory import explain_memory
from deepsquare._terminal import show
from deepsquare.cli._common import AsJson, explain_loading, load_model, model_file
from deepsquare.export import load_exported
from deepsquare.export.exporter import BATCH_SIZE, compute_logits
from deepsquare.export.images import image_files, load_images
from deepsquare.export.runtimes import is_exported

TOP_K = 5


def predict_command(
    model: tyro.conf.Positional[Path], paths: tyro.conf.Positional[tuple[Path, ...]], *, as_json: AsJson = False
) -> None:
    """Classify images: the five likeliest classes of each.

    Args:
        model: A checkpoint, the folder of a training run, or an exported .onnx or .pte file.
        paths: Image files, and folders with images at any depth.
    """
    if not paths:
        raise ValueError("no image is named; give one or more files or folders")
    images = [image for path in paths for image in (image_files(path) if path.is_dir() else [path])]
    compute: Callable[[Tensor], Tensor]
    if is_exported(model):
        with explain_loading(model):
            compute = exported = load_exported(model)
        preprocessing = exported.metadata.preprocessing
    else:
        network, preprocessing = load_model(model_file(model))
        compute = partial(compute_logits, network.eval().float())
    batches = (images[first : first + BATCH_SIZE] for first in range(0, len(images), BATCH_SIZE))
    with explain_memory(f"the prediction of {min(len(images), BATCH_SIZE)} images at once", "give fewer images"):
        logits = torch.cat([compute(load_images(batch, preprocessing, upright=True)) for batch in batches])
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
            show(file, *(f"  {value:6.1%}  {name}" for name, value in likeliest))
    if as_json:
        print(json.dumps(results))
