"""``deepsquare eval``: the accuracy of a checkpoint."""

import dataclasses
import json
import math
from itertools import zip_longest
from pathlib import Path

import tyro
from torch import Tensor

from deepsquare.checkpoint import load, read_header
from deepsquare.cli._common import AsJson, explain_loading, model_file
from deepsquare.data import open_source
from deepsquare.preprocessing import Preprocessing
from deepsquare.training import LoaderConfig, evaluate, init_distributed
from deepsquare.training.image_folder import ImageEvaluation
from deepsquare.training.trainer import to_input


def eval_command(
    checkpoint: tyro.conf.Positional[Path],
    *,
    data: Path,
    split: str = "val",
    size: int | None = None,
    resize: int | None = None,
    batch_size: int = 128,
    device: str | None = None,
    as_json: AsJson = False,
    loading: tyro.conf.OmitArgPrefixes[LoaderConfig] = LoaderConfig(),  # noqa: B008
) -> None:
    """Evaluate a checkpoint on a folder of images, each exactly once, in one process or many started by torchrun.

    Args:
        checkpoint: A safetensors file, or the folder of a training run.
        data: Folder with the split.
        split: Name of the split's folder.
        size: Side of the center crop; by default as stored in the checkpoint, or 224.
        resize: Shorter side before the crop; by default in the checkpoint's ratio to the crop, or 256 for 224.
        batch_size: Images per batch and process.
        device: cpu or cuda; by default a GPU if there is one.
    """
    checkpoint = model_file(checkpoint)
    stored = read_header(checkpoint).preprocessing or Preprocessing()
    size = size or stored.size
    resize = resize or round(size * stored.resize / stored.size)
    preprocessing = dataclasses.replace(stored, size=size, resize=resize)
    source = open_source(data, split)
    with explain_loading(checkpoint):
        model = load(checkpoint).float()
    expected = "expected the data set that it was trained on"
    if stored.class_names and stored.class_names != source.classes:
        pairs = zip_longest(stored.class_names, source.classes)
        theirs, ours = next(pair for pair in pairs if pair[0] != pair[1])
        difference = f"{theirs} in the checkpoint is {ours} in the data"
        raise ValueError(f"the classes of {checkpoint} and {data / split} differ: {difference}; {expected}")
    with init_distributed(device) as distributed:
        model.to(distributed.device)

        def logits(images: Tensor) -> Tensor:
            outputs: Tensor = model(to_input(images, preprocessing, distributed.device))
            if outputs.shape[1] != len(source.classes):
                counts = f"{outputs.shape[1]} classes, {data / split} has {len(source.classes)}"
                raise ValueError(f"{checkpoint} has {counts}; {expected}")
            return outputs

        batches = ImageEvaluation(source, preprocessing, distributed, loading, batch_size)()
        metrics = evaluate(model, batches, distributed=distributed, logits=logits)
        if not distributed.is_main_process:
            return
        if as_json:
            values = {**metrics._asdict(), "loss": metrics.loss if math.isfinite(metrics.loss) else None}
            del values["correct"]
            print(json.dumps({"images": len(source), **values, "size": size, "resize": resize}))
        else:
            accuracies = f"top-1 {metrics.accuracy:.2%}, top-5 {metrics.top5:.2%}"
            print(f"{len(source):,} images at {size} px: {accuracies}, loss {metrics.loss:.4f}")
