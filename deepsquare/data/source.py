"""What a source of images is, whatever way they lie on the disk."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)  # torchvision's ImageFolder's


class Source(ABC):
    """Encoded images with their classes, read by index; it holds no open file, so processes may share it."""

    classes: tuple[str, ...]
    labels: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The image's file, as it is."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the image is, to name it in a message."""


class FileNames:
    """File names in one block of bytes: worker processes share it, where a list of a million strings is copied."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._block = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self._block[self._ends[index] : self._ends[index + 1]])


def is_image(name: str) -> bool:
    """Whether the ending of a file's name is one of a image's."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few, as in ``a, b, c and 4 more``; ``nothing`` if there are none."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
