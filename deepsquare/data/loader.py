"""Batches of images for given indices, by one of three pipelines."""

import importlib.util
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from deepsquare._memory import explain_memory
from deepsquare._threads import one_thread
from deepsquare.data import pil
from deepsquare.data.source import DecodeError, Source
from deepsquare.data.transforms import Transform, center_crop, random_crop
from deepsquare.preprocessing import Preprocessing

GREY, NO_LABEL = 128, -1  # pixels and label of a damaged image
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
TERM_GRACE = 120  # seconds that a worker continues after SIGTERM
REQUIRED_MODULE = {"torchvision": None, "fast": "simplejpeg", "dali": "nvidia.dali"}  # from the extra of the same name


class Batch(NamedTuple):
    """Images and labels; a damaged image is grey, has label −1 and is named in ``damaged``."""

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
    """Yield a batch for each sequence of indices, in order.

    Args:
        source: the images.
        batch_indices: the indices of each batch; to resume an epoch, those of the remaining batches.
        transform: random crops for training, or the preprocessing whose center crop is evaluated.
        seed, epoch: decide the random crops, together with the index of an image.
        pipeline: ``torchvision``, ``fast`` or ``dali``; all yield the same images.
        workers: processes that decode ahead (threads for ``dali``); with 0 the calling process decodes.
        device_id: the GPU that ``dali`` decodes on; the CPU if not given.
    """
    if pipeline not in REQUIRED_MODULE:
        raise ValueError(f"there is no pipeline {pipeline!r}; choose from {', '.join(REQUIRED_MODULE)}")
    if not available(pipeline):
        install = f"pip install 'deepsquare[{pipeline}]'; or choose 'torchvision', which needs no extra"
        raise ValueError(f"pipeline {pipeline!r} needs {REQUIRED_MODULE[pipeline]}: {install}")
    if workers < 0 or seed < 0 or epoch < 0:
        raise ValueError(f"workers is {workers}, seed {seed} and epoch {epoch}; expected none below 0")
    if device_id is not None and pipeline != "dali":
        raise ValueError(f"device_id is {device_id}, but pipeline {pipeline!r} decodes on the CPU; choose 'dali'")
    dataset = BatchDataset(source, batch_indices, transform, seed, epoch)
    if pipeline == "dali":
        from deepsquare.data.dali import dali_batches

        return dali_batches(dataset, max(1, workers), device_id)
    if pipeline == "fast":
        from deepsquare.data import turbojpeg

        dataset.decode = turbojpeg.decode
    return _load(dataset, workers)


def available(name: str) -> bool:
    """Whether the package that the pipeline needs is installed."""
    module = REQUIRED_MODULE[name]
    try:
        return module is None or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


@dataclass(eq=False)
class BatchDataset(Dataset[Batch]):
    """Map-style dataset whose items are whole batches, decoded on access."""

    source: Source
    batch_indices: Sequence[Sequence[int]]
    transform: Transform
    seed: int
    epoch: int
    decode: Callable[[bytes, pil.CropFor, pil.Pixels], None] = pil.decode

    def __len__(self) -> int:
        return len(self.batch_indices)

    def __getitem__(self, number: int) -> Batch:
        with one_thread():  # one image is too little work to share
            batch = self.batch(self.indices(number))
        if get_worker_info() is not None:  # later, in a thread of the worker, an error would never reach the caller
            for tensor in (batch.images, batch.labels):
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        return batch

    def indices(self, number: int) -> list[int]:
        """The indices of a batch; IndexError if one is out of range."""
        indices, count = [int(index) for index in self.batch_indices[number]], len(self.source)
        if wrong := [index for index in indices if not 0 <= index < count]:
            raise IndexError(f"there is no image {wrong[0]}; expected an index from 0 to {count - 1}")
        return indices

    def crop_for(self, index: int) -> pil.CropFor:
        """The crop of an image as a function of its width and height."""
        if isinstance(self.transform, Preprocessing):
            return partial(center_crop, self.transform)
        return partial(random_crop, self.transform, seed=self.seed, epoch=self.epoch, index=index)

    def batch(self, indices: Sequence[int]) -> Batch:
        side = self.transform.size
        images = torch.empty((len(indices), side, side, 3), dtype=torch.uint8)
        pixels = images.numpy()
        labels = self.source.labels[torch.tensor(indices, dtype=torch.int64)]
        damaged = []
        for position, index in enumerate(indices):
            try:
                self.decode(self.source.read(index), self.crop_for(index), pixels[position])
            except DecodeError:
                pixels[position] = GREY
                labels[position] = NO_LABEL
                damaged.append(self.source.name(index))
        return Batch(images.permute(0, 3, 1, 2), labels, tuple(damaged))


def _ignore_stop_signals(worker: int) -> None:
    """Leave Ctrl-C, and a SIGTERM sent to all processes of a job, to the parent: it finishes and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE))  # ends the worker if the parent did not
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """Workers that start inherit the block: a signal before they ignore it would end them, and so the run."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _load(dataset: BatchDataset, workers: int) -> Iterator[Batch]:
    """The batches of a dataset; worker processes end when the generator is closed."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        pin_memory=workers > 0 and torch.cuda.is_available(),
        worker_init_fn=_ignore_stop_signals,
        generator=torch.Generator(),  # the loader seeds its workers from it instead of from the global generator
    )
    with _blocked_stop_signals() if workers else nullcontext():
        iterator: Any = iter(loader)
    try:
        while True:
            with explain_memory("a batch of images", "choose a smaller batch, smaller images or fewer workers"):
                if (batch := next(iterator, None)) is None:
                    return
            images, labels, damaged = batch
            yield Batch(images, labels, tuple(damaged))  # the loader converts tuples to lists
    finally:
        if workers:
            iterator._shutdown_workers()  # an error's traceback would keep them alive
