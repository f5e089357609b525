"""The interface of a source of images, however they are stored, and reading their files."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Those of torchvision's ImageFolder.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


MAX_BYTES = 300_000_000  # of an image's file; uncompressed RGB of the largest size allowed has 268 MB


class DecodeError(ValueError):
    """An image that cannot be decoded."""


class Source(ABC):
    """Encoded images with labels, read by index; it holds no open file, so processes can share it."""

    classes: tuple[str, ...]
    labels: Tensor  # (N,) int64
    _names: NDArray[np.bytes_]  # of files; an array, as worker processes would copy a list of a million strings

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The bytes of the image's file; DecodeError if it is larger than an image can be."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The image's path, for messages."""


def read_file(path: str | os.PathLike[str], offset: int = 0, size: int | None = None) -> bytes:
    """The bytes of an image's file, or of ``size`` bytes in it; a sparse file of a few bytes can claim to have 2⁶³."""
    with open(path, "rb", buffering=0) as file:
        if size is None:
            size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise DecodeError(f"{size:,} bytes; expected at most {MAX_BYTES:,}")
        file.seek(offset)
        return file.read(size)


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few, as in ``a, b, c and 4 more``; ``nothing`` if there are none."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
