"""The interface of a source of images, however they are stored."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Those of torchvision's ImageFolder.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Source(ABC):
    """Encoded images with labels, read by index; it holds no open file, so processes can share it."""

    classes: tuple[str, ...]
    labels: Tensor  # (N,) int64
    _names: NDArray[np.bytes_]  # of files; an array, as worker processes would copy a list of a million strings

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The bytes of the image's file."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The image's path, for messages."""


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few, as in ``a, b, c and 4 more``; ``nothing`` if there are none."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
