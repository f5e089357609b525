"""Images by Pillow and torchvision: slow, and what the other pipelines are held to."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from deepsquare import _torchvision  # noqa: F401  # before torchvision
from deepsquare.data.transforms import CropParams

Pixels = NDArray[np.uint8]  # (height, width, 3)
CropFor = Callable[[int, int], CropParams]  # of width and height

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # no more of Pillow's many readers than are needed
PIXELS = 89_478_485  # from here on Pillow warns of a decompression bomb


class DecodeError(ValueError):
    """A image that cannot be decoded."""


def decode(data: bytes, crop_for: CropFor, out: Pixels, upright: bool = False) -> None:
    """Decode a image and write what is planned for its size into ``out``."""
    from torchvision.transforms.v2 import functional as F

    image = open_image(data, upright)
    box, (width, height), (left, top) = crop_for(*image.size)
    image = F.resized_crop(image, box.top, box.left, box.height, box.width, [height, width])
    if image.size != out.shape[1::-1]:
        image = F.crop(image, top, left, *out.shape[:2])
    out[...] = np.asarray(F.horizontal_flip(image) if box.flip else image)


def open_image(data: bytes, upright: bool = False) -> Image.Image:
    """The whole image as RGB; its EXIF rotation is followed if ``upright``, which ImageFolder does not."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise DecodeError(f"{image.width} × {image.height} pixels; expected at most {PIXELS:,}")
            if upright:
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):  # Pillow would clip it
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    # What Pillow's readers raise on damaged files.
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error) as error:
        raise DecodeError(str(error)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, OverflowError, MemoryError) as error:
        raise DecodeError(str(error)) from error
