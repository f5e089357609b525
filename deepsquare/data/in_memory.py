"""Batches of small images that lie in memory: augmented by one gather, without a loop over images."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LabeledImages:
    """Images as (N, 3, H, W) uint8 with their classes as (N,) int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            given = f"{tuple(images.shape)} {images.dtype}"
            raise ValueError(f"images are {given}; expected (N, 3, H, W) torch.uint8")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            given = f"{tuple(labels.shape)} {labels.dtype}"
            raise ValueError(f"labels are {given}; expected ({len(images)},) torch.int64, one per image")

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, held_out: int, seed: int = 0) -> tuple[LabeledImages, LabeledImages]:
        """Two disjoint parts, the second of ``held_out`` images drawn at random."""
        if not 0 < held_out < len(self):
            raise ValueError(f"held_out is {held_out}; expected between 1 and {len(self) - 1}")
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self)))
        first, second = order[held_out:], order[:held_out]
        return self.take(first), self.take(second)

    def take(self, index: Tensor) -> LabeledImages:
        """The images at ``index``."""
        return LabeledImages(self.images[index], self.labels[index])


@dataclass(frozen=True)
class Normalization:
    """(x / 255 − mean) / std per channel."""

    mean: tuple[float, float, float] = (0.4914, 0.4822, 0.4465)  # of CIFAR-10's training images
    std: tuple[float, float, float] = (0.2470, 0.2435, 0.2616)

    def __call__(self, pixels: Tensor) -> Tensor:
        """(…, 3) uint8 → (…, 3) float32."""
        scale = 1 / (255 * torch.tensor(self.std))
        shift = torch.tensor(self.mean) / torch.tensor(self.std)
        return pixels.to(torch.float32).mul_(scale).sub_(shift)


class InMemoryBatches:
    """Shuffled, cropped and flipped batches of images in memory, each epoch a function of the seed and its number.

    A pixel is held as one 32-bit word (red, green, blue, nothing), so that shuffling, the crop from the
    reflected border and the flip of a whole batch are one gather of words; a batch comes out in channels_last.
    The last, smaller batch of an epoch is left out.
    """

    def __init__(self, data: LabeledImages, batch_size: int, *, pad: int = 4, flip: bool = True, seed: int = 0) -> None:
        height, width = data.images.shape[2:]
        if not 1 <= batch_size <= len(data):
            raise ValueError(f"batch_size is {batch_size}; expected between 1 and the {len(data)} images given")
        if not 0 <= pad < min(height, width):
            raise ValueError(f"pad is {pad}; a reflected border needs 0 ≤ pad < {min(height, width)}")
        self.batch_size, self.pad, self.flip, self.seed = batch_size, pad, flip, seed
        self.labels, self.size = data.labels, (height, width)
        words = torch.zeros(len(data), height, width, 4, dtype=torch.uint8)
        words[..., :3] = data.images.permute(0, 2, 3, 1)
        self.words = words.view(torch.int32).flatten()
        self.normalize = Normalization()

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.labels) // self.batch_size

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
        """The batches of an epoch from batch ``start`` on; the same ones whenever they are asked for."""
        rng = np.random.default_rng([self.seed, number])
        used = len(self) * self.batch_size
        order = torch.from_numpy(rng.permutation(len(self.labels))[:used])
        shifts = torch.from_numpy(rng.integers(0, 2 * self.pad + 1, (2, used)))
        flips = torch.from_numpy(rng.integers(0, 2, used) if self.flip else np.zeros(used, dtype=np.int64))
        for first in range(start * self.batch_size, used, self.batch_size):
            part = slice(first, first + self.batch_size)
            index = order[part]
            yield self._gather(index, shifts[:, part], flips[part]), self.labels[index]

    def _gather(self, index: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
        height, width = self.size
        rows = _reflect(torch.arange(height) + shifts[0, :, None] - self.pad, height)  # (B, H)
        across = torch.arange(width)
        across = torch.where(flips[:, None] == 1, width - 1 - across, across)
        columns = _reflect(across + shifts[1, :, None] - self.pad, width)  # (B, W)
        places = (index[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]  # (B, H, W)
        pixels = self.words.take(places).unsqueeze(-1).view(torch.uint8)[..., :3]
        return self.normalize(pixels).permute(0, 3, 1, 2)  # (B, 3, H, W) in channels_last


def eval_batches(data: LabeledImages, batch_size: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image once, in order and as it is: for evaluation."""
    normalize = Normalization()
    for images, labels in zip(torch.split(data.images, batch_size), torch.split(data.labels, batch_size), strict=True):
        yield normalize(images.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2), labels


def _reflect(position: Tensor, size: int) -> Tensor:
    """Positions beyond the border mirrored at its outermost pixel, as torch's padding mode 'reflect' does."""
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)
