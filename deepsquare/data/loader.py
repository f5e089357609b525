"""Batches of images, in the order asked for, by any of three pipelines."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from deepsquare._threads import one_thread
from deepsquare.data.pil import CropFor, DecodeError, Pixels, decode
from deepsquare.data.source import Source
from deepsquare.data.transforms import Transform, crop_params

GREY, NO_LABEL = 128, -1  # of a damaged image
GRACE = 120  # seconds that a worker goes on for after SIGTERM
NEEDS = {"torchvision": None, "fast": "simplejpeg", "dali": "nvidia.dali"}  # the extra has the pipeline's name
Decoder = Callable[[bytes, CropFor, Pixels], None]


class Batch(NamedTuple):
    """Images and their classes; damaged images are grey, of class −1, and named."""

    images: Tensor  # (N, 3, S, S) uint8, in channels_last
    labels: Tensor  # (N,) int64
    damaged: tuple[str, ...]


def batches(
    source: Source,
    batch_indices: Sequence[Sequence[int]],
    transform: Transform,
    *,
    seed: int = 0,
    epoch: int = 0,
    pipeline: str = "fast",
    workers: int = 0,
    device_id: int | None = None,
) -> Iterator[Batch]:
    """A batch for each group of indices, in their order.

    Args:
        source: the images.
        groups: the indices of each batch; for an epoch that goes on after a stop, the rest of them.
        view: which part of a image is shown; a random part depends on seed, epoch and the image's index alone.
        seed: of the random parts.
        epoch: of the random parts.
        pipeline: ``torchvision``, ``fast`` or ``dali``; all show the same.
        workers: processes that decode ahead, of ``dali`` threads; with 0 it is done here, when a batch is asked for.
        device_id: the GPU that ``dali`` decodes on; without it, the CPU.
    """
    check_pipeline(pipeline)
    if workers < 0 or seed < 0 or epoch < 0:
        raise ValueError(f"workers is {workers}, seed {seed} and epoch {epoch}; expected none below 0")
    if device_id is not None and pipeline != "dali":
        raise ValueError(f"device_id is {device_id}, but pipeline {pipeline!r} decodes on the CPU; choose 'dali'")
    if pipeline == "dali":
        from deepsquare.data.dali import dali_batches

        return dali_batches(source, batch_indices, transform, seed, epoch, max(1, workers), device_id)
    return _loaded(BatchDataset(source, batch_indices, transform, seed, epoch, pipeline), workers)


def check_pipeline(name: str) -> None:
    """That there is such a pipeline, and what it needs."""
    if name not in NEEDS:
        raise ValueError(f"there is no pipeline {name!r}; choose from {', '.join(NEEDS)}")
    if not available(name):
        raise ValueError(
            f"pipeline {name!r} needs {NEEDS[name]}: pip install 'deepsquare[{name}]'; or choose 'torchvision', which "
            "needs nothing more"
        )


def available(name: str) -> bool:
    """Whether what the pipeline needs is installed."""
    module = NEEDS[name]
    try:
        return module is None or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


class BatchDataset(Dataset[Batch]):
    """The batches by number, each decoded when it is asked for."""

    def __init__(
        self,
        source: Source,
        batch_indices: Sequence[Sequence[int]],
        transform: Transform,
        seed: int,
        epoch: int,
        pipeline: str,
    ) -> None:
        self.source, self.batch_indices, self.transform = source, batch_indices, transform
        self.seed, self.epoch, self.decode = seed, epoch, _decoder(pipeline)

    def __len__(self) -> int:
        return len(self.batch_indices)

    def __getitem__(self, number: int) -> Batch:
        return self.batch(checked(self.batch_indices[number], len(self.source)))

    def batch(self, indices: Sequence[int]) -> Batch:
        """The images of a group."""
        side = self.transform.size
        images = torch.empty((len(indices), side, side, 3), dtype=torch.uint8)
        pixels = images.numpy()
        labels = self.source.labels[torch.tensor(indices, dtype=torch.int64)]
        damaged = []
        for place, index in enumerate(indices):
            crop_for = partial(crop_params, self.transform, seed=self.seed, epoch=self.epoch, index=index)
            try:
                self.decode(self.source.read(index), crop_for, pixels[place])
            except DecodeError:
                pixels[place] = GREY
                labels[place] = NO_LABEL
                damaged.append(self.source.name(index))
        return Batch(images.permute(0, 3, 1, 2), labels, tuple(damaged))


def checked(indices: Sequence[int], count: int) -> list[int]:
    """The indices as plain numbers, when they are of images that there are."""
    indices = [int(index) for index in indices]
    if wrong := [index for index in indices if not 0 <= index < count]:
        raise IndexError(f"there is no image {wrong[0]}; expected an index from 0 to {count - 1}")
    return indices


def _decoder(pipeline: str) -> Decoder:
    if pipeline == "torchvision":
        return decode
    from deepsquare.data import turbojpeg

    return turbojpeg.decode


def _go_on(worker: int) -> None:
    """Ctrl-C, and a SIGTERM to all processes of a job, are for the one that asked: it finishes and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))  # which ends it, if nobody did before


def _loaded(batch_indices: BatchDataset, workers: int) -> Iterator[Batch]:
    """Its batches, decoded ahead by worker processes, which end when the caller stops asking."""
    if workers == 0:
        for number in range(len(batch_indices)):
            with one_thread():  # a image is too little work to share
                batch = batch_indices[number]
            yield batch
        return
    loader = DataLoader(
        batch_indices,
        batch_size=None,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_go_on,
        generator=torch.Generator(),  # it draws a seed for the workers, and would draw it from the trainer's numbers
    )
    iterator: Any = iter(loader)
    try:
        for images, labels, damaged in iterator:
            yield Batch(images, labels, tuple(damaged))  # of which the loader makes a list
    finally:
        iterator._shutdown_workers()  # else they live as long as an error's traceback does
