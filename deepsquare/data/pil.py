"""Decoding by Pillow and torchvision: slow, and the reference for the other pipelines; and the size of a JPEG."""

import io
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from deepsquare.data.transforms import CropParams

Pixels = NDArray[np.uint8]  # (height, width, 3)
CropFor = Callable[[int, int], CropParams]  # of width and height

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # no more of Pillow's many readers than are needed
MAX_PIXELS = 89_478_485  # above this, Pillow warns of a decompression bomb
FRAME_MARKERS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, with Huffman coding
STANDALONE_MARKERS = (0x01, *range(0xD0, 0xD8))  # markers without a length


class DecodeError(ValueError):
    """An image that cannot be decoded."""


def decode(data: bytes, crop_for: CropFor, out: Pixels, upright: bool = False) -> None:
    """Decode an image and write its crop into ``out``; ``crop_for`` gets the image's width and height."""
    from torchvision.transforms.v2 import functional as F

    image = open_image(data, upright)
    crop = crop_for(*image.size)
    image = F.resized_crop(image, crop.top, crop.left, crop.height, crop.width, list(crop.resized[::-1]))
    if image.size != out.shape[1::-1]:
        left, top = crop.corner
        image = F.crop(image, top, left, *out.shape[:2])
    out[...] = np.asarray(F.horizontal_flip(image) if crop.flip else image)


def open_image(data: bytes, upright: bool = False) -> Image.Image:
    """The whole image as RGB; ``upright`` applies its EXIF rotation, which ImageFolder does not."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DecodeError(f"{image.width} × {image.height} pixels; expected at most {MAX_PIXELS:,}")
            if upright:
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):  # Pillow would clip it
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except UnidentifiedImageError as error:  # whose message is the address of a buffer
        raise DecodeError("not an image file") from error
    # What Pillow's readers raise on damaged files.
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error) as error:
        raise DecodeError(str(error)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, OverflowError, MemoryError) as error:
        raise DecodeError(str(error)) from error


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a common JPEG: whole, with 8 bits of gray or RGB; None for anything else."""
    if not data.startswith(b"\xff\xd8") or not data.endswith(b"\xff\xd9"):
        return None
    offset = 2
    while offset + 10 <= len(data) and data[offset] == 0xFF:
        marker, length = data[offset + 1], int.from_bytes(data[offset + 2 : offset + 4], "big")
        if marker in FRAME_MARKERS:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, offset + 4)
            common = bits == 8 and channels in (1, 3) and width and height
            return (width, height) if common else None
        if marker == 0xFF:  # padding
            offset += 1
        elif marker in STANDALONE_MARKERS:
            offset += 2
        else:
            offset += 2 + length
    return None
