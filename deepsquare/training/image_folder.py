"""Batches of a source of images for training and evaluation; each process gets its part of every batch."""

import logging
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepsquare._threads import cores
from deepsquare.data.loader import batches
from deepsquare.data.source import Source
from deepsquare.data.transforms import TrainTransform, Transform
from deepsquare.preprocessing import Preprocessing
from deepsquare.training.distributed import SINGLE_PROCESS, DistributedContext
from deepsquare.training.recipe import DEFAULT_LOADER, ImageNetRecipe, LoaderConfig

logger = logging.getLogger("deepsquare")


@dataclass(frozen=True)
class ImageBatches:
    """Shuffled batches of a source, shared by all processes; an epoch depends on the seed and its number only.

    Batch b of an epoch has the same images and crops for any number of processes; the last, smaller batch is dropped.
    """

    source: Source
    recipe: ImageNetRecipe
    seed: int = 0
    distributed: DistributedContext = SINGLE_PROCESS
    loading: LoaderConfig = DEFAULT_LOADER

    def __post_init__(self) -> None:
        size, processes, images = self.recipe.batch_size, self.distributed.world_size, len(self.source)
        if size % processes:
            raise ValueError(f"batch_size is {size}; expected a multiple of the {processes} processes that share it")
        if size > images:
            raise ValueError(f"batch_size is {size}, but there are {images} images; expected at most as many")

    def __len__(self) -> int:
        return len(self.source) // self.recipe.batch_size

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
        """This process's part of each batch of an epoch, from batch ``start`` on."""
        processes, rank, recipe = self.distributed.world_size, self.distributed.rank, self.recipe
        order = np.random.default_rng([self.seed, number]).permutation(len(self.source))
        indices = order[: len(self) * recipe.batch_size].reshape(len(self), processes, -1)[start:, rank].tolist()
        transform = TrainTransform(recipe.size, recipe.crop_area, recipe.crop_ratio, recipe.flip)
        return _load(self, indices, transform, len(self.source) // processes, self.seed, number)


@dataclass(frozen=True)
class ImageEvaluation:
    """The center crop of every image of a source, each exactly once over all processes."""

    source: Source
    preprocessing: Preprocessing
    distributed: DistributedContext = SINGLE_PROCESS
    loading: LoaderConfig = DEFAULT_LOADER
    batch_size: int = 128

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; expected at least 1")

    def __call__(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        shard = self.distributed.shard(len(self.source))
        indices = [shard[first : first + self.batch_size] for first in range(0, len(shard), self.batch_size)]
        return _load(self, indices, self.preprocessing, len(shard))


def _load(
    data: ImageBatches | ImageEvaluation,
    indices: Sequence[Sequence[int]],
    transform: Transform,
    images: int,
    seed: int = 0,
    epoch: int = 0,
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield images and labels; log the names of damaged images, and raise ValueError if there are too many."""
    loading, device, damaged = data.loading, data.distributed.device, list[str]()
    workers = loading.workers
    if workers is None:
        workers = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if device.type == "cuda" else 0
    options = {"seed": seed, "epoch": epoch, "workers": workers}
    device_id = device.index if device.type == "cuda" and loading.pipeline == "dali" else None
    for batch in batches(data.source, indices, transform, pipeline=loading.pipeline, device_id=device_id, **options):
        for name in batch.damaged:
            logger.warning("%s cannot be decoded and is left out", name)
        damaged += batch.damaged
        if len(damaged) > max(loading.damaged * images, 1 if loading.damaged else 0):
            raise ValueError(
                f"{len(damaged)} of {images} images cannot be decoded, such as {', '.join(damaged[-3:])}; allowed is "
                f"a share of {loading.damaged:g}. Fetch the data again, or allow more with --damaged"
            )
        yield batch.images, batch.labels
