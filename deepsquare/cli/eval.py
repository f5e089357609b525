"""``deepsquare eval``: the accuracy of a checkpoint."""

from __future__ import annotations

import json
import math
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor

from deepsquare.checkpoint import Preprocessing, load, read_preprocessing
from deepsquare.cli._checkpoint import model_file
from deepsquare.data.splits import open_source
from deepsquare.data.transforms import EvalTransform
from deepsquare.training import evaluate, init_distributed
from deepsquare.training.image_folder import ImageEvaluation, Loading, Normalize


def evaluation_command(
    checkpoint: tyro.conf.Positional[Path],
    *,
    data: Path,
    split: str = "val",
    size: int | None = None,
    resize: int | None = None,
    batch_size: int = 128,
    device: str | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    loading: tyro.conf.OmitArgPrefixes[Loading] = Loading(),  # noqa: B008
) -> None:
    """Measure a checkpoint on images: every one exactly once, also when torchrun's processes share them.

    Args:
        checkpoint: A safetensors file, or the folder of a training run.
        data: Folder with the split.
        split: Which folder in it.
        size: Side of the centre that is cut out; as the checkpoint says when not given, or 224.
        resize: The shorter side before that; as the checkpoint says when not given, or 256.
        batch_size: Images at a time, for each process.
        device: cpu or cuda; a GPU where there is one when not given.
        as_json: Print JSON.
    """
    checkpoint = model_file(checkpoint)
    images = read_preprocessing(checkpoint) or Preprocessing(())
    transform = EvalTransform(size or images.size, resize or max(images.resize, size or 0))
    source, model = open_source(data, split), load(checkpoint).float()
    if images.classes and images.classes != tuple(source.classes):
        other = next(pair for pair in zip_longest(images.classes, source.classes) if pair[0] != pair[1])
        raise ValueError(
            f"the classes of {checkpoint} are not those of {data / split}: it has {other[0]} where the data have "
            f"{other[1]}; expected the data that it was trained for"
        )
    with init_distributed(device) as distributed:
        model.to(distributed.device)
        prepare = Normalize(distributed.device, mean=images.mean, std=images.std)

        def logits(images: Tensor) -> Tensor:
            said: Tensor = model(prepare(images))
            if said.shape[1] != len(source.classes):
                raise ValueError(
                    f"{checkpoint} knows {said.shape[1]} classes, {data / split} has {len(source.classes)}; expected "
                    "the data that it was trained for"
                )
            return said

        given = ImageEvaluation(source, transform, distributed, loading, batch_size)
        shown = evaluate(model, given(), distributed=distributed, logits=logits)
        if not distributed.is_main_process:
            return
        if as_json:
            loss = shown.loss if math.isfinite(shown.loss) else None  # JSON has no other word
            found = {**shown._asdict(), "loss": loss, "size": transform.size, "resize": transform.resize}
            del found["correct"]
            print(json.dumps({"images": len(source), **found}))
        else:
            accuracies = f"top-1 {shown.accuracy:.2%}, top-5 {shown.top5:.2%}"
            print(f"{len(source):,} images at {transform.size} px: {accuracies}, loss {shown.loss:.4f}")
