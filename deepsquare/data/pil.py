"""Decoding by Pillow and torchvision: slow, and the reference for the other pipelines."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from deepsquare.data.limits import MAX_READS, CountedFile, check_cost, check_decoder, check_parts
from deepsquare.data.source import DecodeError
from deepsquare.data.transforms import CropParams

Pixels = NDArray[np.uint8]  # (height, width, 3)
CropFor = Callable[[int, int], CropParams]  # of width and height

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # no more of Pillow's many readers than are needed
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
        image, turn = _load(data, upright)  # the file is closed before the image is turned: WebP holds two copies
        return image if turn is None else image.transpose(turn)
    except UnidentifiedImageError as error:  # whose message is the address of a buffer
        raise DecodeError("not an image file") from error
    except Exception as error:  # on a damaged file, Pillow's readers raise any kind
        raise DecodeError(str(error) or repr(error)) from error


def _load(data: bytes, upright: bool) -> tuple[Image.Image, Image.Transpose | None]:
    """The whole image as RGB as it is stored, and how it is turned upright."""
    check_parts(data)
    file = CountedFile(data)
    with Image.open(file, formats=FORMATS) as image:
        check_cost(data, image.width, image.height)
        if tags := getattr(image, "tag_v2", None):  # of a TIFF, whose tiles may be larger than the image
            check_cost(data, tags.get(ExifTags.Base.TileWidth) or 1, tags.get(ExifTags.Base.TileLength) or 1)
        check_decoder(image, data)
        file.left = MAX_READS
        image.load()
        turn = TRANSPOSES.get(_orientation(image)) if upright else None
        if image.mode.startswith("I;16"):  # Pillow would clip it
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB"), turn
        return image.convert("RGB"), turn


def _orientation(image: Image.Image) -> int:
    """The orientation in the EXIF data; 1, upright, where there is none or it is damaged."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # as above; the image itself may be whole
        return 1
