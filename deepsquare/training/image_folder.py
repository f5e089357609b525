"""Images as batches to train and to evaluate on: each process of a team gets its part of every batch."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepsquare._threads import cores
from deepsquare.checkpoint import MEAN, STD
from deepsquare.data.loader import Batch, batches
from deepsquare.data.splits import Source
from deepsquare.data.transforms import EvalTransform, TrainTransform
from deepsquare.training.distributed import SINGLE_PROCESS, DistributedContext
from deepsquare.training.recipe import ImageNetRecipe

logger = logging.getLogger("deepsquare")


@dataclass(frozen=True)
class Loading:
    """How images are read; which, and what of them, is the recipe's.

    Attributes:
        pipeline: ``fast``, ``torchvision`` or ``dali``.
        workers: processes that read for each process that trains, 0 to read in that one; if not given, its share of
            the cores for a GPU, and 0 for a CPU, whose cores train.
        damaged: the share of images that may be unreadable before it is an error.
    """

    pipeline: str = "fast"
    workers: int | None = None
    damaged: float = 0.001

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers is {self.workers}; expected 0 or more")
        if not 0 <= self.damaged <= 1:
            raise ValueError(f"damaged is {self.damaged:g}; expected a share of the images, 0 to 1")

    def options(self, distributed: DistributedContext) -> dict[str, Any]:
        """For :func:`deepsquare.data.loader.batches`."""
        on_gpu, workers = distributed.device.type == "cuda", self.workers
        if workers is None:
            workers = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if on_gpu else 0
        device = distributed.device.index if on_gpu and self.pipeline == "dali" else None
        return {"pipeline": self.pipeline, "workers": workers, "device_id": device}


FAST = Loading()


@dataclass(frozen=True)
class Normalize:
    """(N, 3, H, W) uint8 → floats on the device, of mean 0 and deviation 1, in channels_last."""

    device: torch.device
    channels_last: bool = True
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def __call__(self, images: Tensor) -> Tensor:
        """Moved as bytes, a quarter of the floats."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        moved = images.to(self.device, non_blocking=True).contiguous(memory_format=layout).float()
        mean, std = (255 * torch.tensor(value, device=self.device).view(3, 1, 1) for value in (self.mean, self.std))
        return moved.sub_(mean).div_(std)


class ImageBatches:
    """Shuffled batches of a source, each epoch a function of the seed and its number, shared by a team.

    Batch b of an epoch holds the same images, cut alike, whatever the number of processes; the last, smaller one is
    left out.
    """

    def __init__(
        self,
        source: Source,
        recipe: ImageNetRecipe,
        *,
        seed: int = 0,
        distributed: DistributedContext = SINGLE_PROCESS,
        loading: Loading = FAST,
    ) -> None:
        if recipe.batch_size % distributed.world_size:
            raise ValueError(
                f"a batch of {recipe.batch_size} cannot be shared by {distributed.world_size} processes alike; choose a batch that is a "
                f"multiple of {distributed.world_size}, or another number of processes"
            )
        if recipe.batch_size > len(source):
            raise ValueError(
                f"the batch is {recipe.batch_size}, but there are {len(source)} images; expected as many at least"
            )
        self.source, self.recipe, self.seed, self.distributed, self.loading = source, recipe, seed, distributed, loading
        self.transform = TrainTransform(recipe.size, recipe.crop_area, recipe.crop_ratio, recipe.flip)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.source) // self.recipe.batch_size

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
        """This process's part of each batch of an epoch, from batch ``start`` on."""
        recipe, distributed = self.recipe, self.distributed
        order = np.random.default_rng([self.seed, number]).permutation(len(self.source))
        parts = order[: len(self) * recipe.batch_size].reshape(len(self), distributed.world_size, -1)[
            start:, distributed.rank
        ]
        return self._read(parts.tolist(), number)

    def _read(self, parts: Sequence[Sequence[int]], number: int) -> Generator[tuple[Tensor, Tensor], None, None]:
        given = batches(
            self.source, parts, self.transform, seed=self.seed, epoch=number, **self.loading.options(self.distributed)
        )
        return _watched(given, len(self.source) // self.distributed.world_size, self.loading.damaged)


@dataclass(frozen=True)
class ImageEvaluation:
    """Every image of a source exactly once over a team, its centre alone."""

    source: Source
    transform: EvalTransform
    distributed: DistributedContext = SINGLE_PROCESS
    loading: Loading = FAST
    batch_size: int = 128

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; expected at least 1 image at a time")

    def __call__(self) -> Iterable[tuple[Tensor, Tensor]]:
        """This process's part."""
        own = self.distributed.shard(len(self.source))
        parts = [own[first : first + self.batch_size] for first in range(0, len(own), self.batch_size)]
        given = batches(self.source, parts, self.transform, **self.loading.options(self.distributed))
        return _watched(given, len(own), self.loading.damaged)


def _watched(given: Iterator[Batch], images: int, allowed: float) -> Generator[tuple[Tensor, Tensor], None, None]:
    """The batches; damaged images are named, and too many of them an error."""
    damaged: list[str] = []
    for batch in given:
        for name in batch.damaged:
            logger.warning("%s cannot be read and is left out", name)
        damaged += batch.damaged
        if len(damaged) > max(allowed * images, 1 if allowed else 0):
            raise ValueError(
                f"{len(damaged)} of {images} images cannot be read, such as {', '.join(damaged[-3:])}; allowed is "
                f"a share of {allowed:g}. Fetch the data again, or allow more with --damaged"
            )
        yield batch.images, batch.labels
