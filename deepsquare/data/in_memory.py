"""Batches of small images in memory, augmented by one gather per batch instead of a loop over images."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepsquare.preprocessing import CIFAR10_MEAN, CIFAR10_STD, Preprocessing

CIFAR10_PREPROCESSING = Preprocessing(size=32, resize=32, mean=CIFAR10_MEAN, std=CIFAR10_STD)


@dataclass(frozen=True)
class LabeledImages:
    """Images as (N, 3, H, W) uint8 with their classes as (N,) int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            actual = f"{tuple(images.shape)} {images.dtype}"
            raise ValueError(f"images are {actual}; expected (N, 3, H, W) torch.uint8")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            actual = f"{tuple(labels.shape)} {labels.dtype}"
            raise ValueError(f"labels are {actual}; expected ({len(images)},) torch.int64, one per image")

    @classmethod
    def from_words(cls, words: Tensor, labels: Tensor) -> LabeledImages:
        """Images from pixels of four bytes, (N, H, W, 4) uint8, whose first three are red, green and blue; no copy."""
        return cls(words[..., :3].permute(0, 3, 1, 2), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, held_out: int, seed: int = 0) -> tuple[LabeledImages, LabeledImages]:
        """Two disjoint parts; the second has ``held_out`` randomly chosen images."""
        if not 0 < held_out < len(self):
            raise ValueError(f"held_out is {held_out}; expected between 1 and {len(self) - 1}")
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self)))
        kept, rest = order[held_out:], order[:held_out]
        return LabeledImages(self.images[kept], self.labels[kept]), LabeledImages(self.images[rest], self.labels[rest])


class InMemoryBatches:
    """Shuffled, cropped and flipped batches; an epoch depends on the seed and its number only.

    A pixel is stored as one 32-bit word (red, green, blue, padding), so that shuffling, the crop from the reflected
    border and the flip of a whole batch are one gather of words. Batches are in channels_last; the last, smaller batch
    of an epoch is dropped.
    """

    def __init__(
        self,
        data: LabeledImages,
        batch_size: int,
        *,
        pad: int = 4,
        flip: bool = True,
        seed: int = 0,
        preprocessing: Preprocessing = CIFAR10_PREPROCESSING,
    ) -> None:
        height, width = data.images.shape[2:]
        if not 1 <= batch_size <= len(data):
            raise ValueError(f"batch_size is {batch_size}; expected between 1 and the {len(data)} images")
        if not 0 <= pad < min(height, width):
            raise ValueError(f"pad is {pad}; a reflected border needs 0 ≤ pad < {min(height, width)}")
        self.batch_size, self.pad, self.flip, self.seed = batch_size, pad, flip, seed
        self.labels, self.size, self.preprocessing = data.labels, (height, width), preprocessing
        self.words = _words(data.images)

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
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
        columns = torch.arange(width)
        columns = torch.where(flips[:, None] == 1, width - 1 - columns, columns)
        columns = _reflect(columns + shifts[1, :, None] - self.pad, width)  # (B, W)
        positions = (index[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]  # (B, H, W)
        pixels = self.words.take(positions).unsqueeze(-1).view(torch.uint8)[..., :3]
        return _normalize(pixels, self.preprocessing)


def eval_batches(
    data: LabeledImages, batch_size: int = 1000, preprocessing: Preprocessing = CIFAR10_PREPROCESSING
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image once, in order and without augmentation."""
    for images, labels in zip(torch.split(data.images, batch_size), torch.split(data.labels, batch_size), strict=True):
        yield _normalize(images.permute(0, 2, 3, 1).contiguous(), preprocessing), labels


def _words(images: Tensor) -> Tensor:
    """The pixels of (N, 3, H, W) images as 32-bit words, (N · H · W); no copy of images by LabeledImages.from_words."""
    count, _, height, width = images.shape
    shape, strides = (count, height, width, 4), (4 * height * width, 4 * width, 4, 1)
    channels_last = images.permute(0, 2, 3, 1)
    stored = images.untyped_storage().nbytes() - images.storage_offset()
    if channels_last.stride() == strides and images.storage_offset() % 4 == 0 and stored >= 4 * count * height * width:
        words = images.as_strided(shape, strides)
    else:
        words = torch.zeros(shape, dtype=torch.uint8)
        words[..., :3] = channels_last
    return words.view(torch.int32).flatten()


def _normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """(B, H, W, 3) uint8 → (B, 3, H, W) float32 in channels_last."""
    return preprocessing.normalize(pixels, channel_dim=-1).permute(0, 3, 1, 2)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Positions beyond the border, reflected as by torch's padding mode 'reflect'."""
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)
