"""Decoding by Pillow and torchvision: slow, and the reference for the other pipelines; and the size of a JPEG."""

import io
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from deepsquare.data.source import DecodeError
from deepsquare.data.transforms import MAX_PIXELS, CropParams

Pixels = NDArray[np.uint8]  # (height, width, 3)
CropFor = Callable[[int, int], CropParams]  # of width and height

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # no more of Pillow's many readers than are needed
MAX_SCANNED = 50 * MAX_PIXELS  # pixels × scans of a progressive JPEG; libjpeg decodes about 2 billion per second
SEQUENTIAL, PROGRESSIVE = (0xC0, 0xC1), 0xC2  # markers of JPEG frames with Huffman coding
SCAN, MARKERS = b"\xff\xda", 1000  # at most so many markers before the frame are looked at
STANDALONE_MARKERS = (0x01, *range(0xD0, 0xD8))  # markers without a length
TRANSPOSES = {  # that turn an image upright, by its EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


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
            check_cost(data, image.width, image.height)
            tags = getattr(image, "tag_v2", {})  # of a TIFF, whose tiles may be larger than the image
            check_cost(data, tags.get(ExifTags.Base.TileWidth) or 1, tags.get(ExifTags.Base.TileLength) or 1)
            image.load()
            turn = TRANSPOSES.get(_orientation(image)) if upright else None
            if image.mode.startswith("I;16"):  # Pillow would clip it
                rgb = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            else:
                rgb = image.convert("RGB")
            return rgb if turn is None else rgb.transpose(turn)
    except UnidentifiedImageError as error:  # whose message is the address of a buffer
        raise DecodeError("not an image file") from error
    except Exception as error:  # on a damaged file, Pillow's readers raise any kind
        raise DecodeError(str(error) or repr(error)) from error


def check_cost(data: bytes, width: int, height: int) -> None:
    """Raise DecodeError if an image of this size takes too much memory or time, however small its file is."""
    pixels = width * height
    if not 0 < pixels <= MAX_PIXELS:
        raise DecodeError(f"{width} × {height} pixels; expected at least 1 and at most {MAX_PIXELS:,}")
    # A scan of a few bytes can refine all pixels; in sequential JPEGs, each scan has data for every block.
    if data.startswith(b"\xff\xd8") and _frame_marker(data)[0] not in SEQUENTIAL:
        scans = data.count(SCAN)
        if scans * pixels > MAX_SCANNED:
            raise DecodeError(
                f"{scans:,} scans of {width} × {height} pixels; expected at most {MAX_SCANNED // pixels:,}"
            )


def _orientation(image: Image.Image) -> int:
    """The orientation in the EXIF data; 1, upright, where there is none or it is damaged."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # as above; the image itself may be whole
        return 1


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a common JPEG: whole, with 8 bits of gray or RGB; None for anything else."""
    if not data.startswith(b"\xff\xd8") or not data.endswith(b"\xff\xd9"):
        return None
    marker, offset = _frame_marker(data)
    if marker not in (*SEQUENTIAL, PROGRESSIVE):
        return None
    bits, height, width, channels = struct.unpack_from(">BHHB", data, offset + 4)
    return (width, height) if bits == 8 and channels in (1, 3) and width and height else None


def _frame_marker(data: bytes) -> tuple[int, int]:
    """The marker of a JPEG's frame, which says how it is coded, and its offset; 0 if it is of no common kind."""
    offset = 2
    for _ in range(MARKERS):
        if offset + 10 > len(data) or data[offset] != 0xFF:
            break
        marker, length = data[offset + 1], int.from_bytes(data[offset + 2 : offset + 4], "big")
        if marker in (*SEQUENTIAL, PROGRESSIVE):
            return marker, offset
        if marker == 0xFF:  # padding
            offset += 1
        elif marker in STANDALONE_MARKERS:
            offset += 2
        else:
            offset += 2 + length
    return 0, offset
