"""Image files as the input of an exported model."""

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deepsquare.data.pil import FORMATS, decode
from deepsquare.data.source import DecodeError, is_image, read_file
from deepsquare.data.transforms import center_crop
from deepsquare.preprocessing import Preprocessing

PARITY_IMAGES, CALIBRATION_IMAGES = 64, 512  # numbers of images


def load_images(files: Sequence[Path], preprocessing: Preprocessing, upright: bool = False) -> Tensor:
    """(N, 3, S, S) float32: the center crop of each image, normalized.

    ``upright`` applies the rotation in the EXIF data, as users expect; training and evaluation do not.
    """
    pixels = np.empty((len(files), preprocessing.size, preprocessing.size, 3), np.uint8)
    for file, out in zip(files, pixels, strict=True):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is a folder; give images" if file.is_dir() else f"no image {file}")
        try:
            with warnings.catch_warnings():  # decode refuses images of too many pixels itself
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                decode(read_file(file), partial(center_crop, preprocessing), out, upright)
        except DecodeError as error:
            kinds = ", ".join(FORMATS)
            raise ValueError(f"{file} cannot be read as an image ({error}); expected one of {kinds}") from error
    return preprocessing.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2)).contiguous()


def image_files(folder: Path) -> list[Path]:
    """The images in a folder at any depth, sorted: files with the suffix of an image that are not hidden."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder; expected one with images in it")
    walked = ((Path(parent), name) for parent, _, names in os.walk(folder) for name in names)
    files = sorted(parent / name for parent, name in walked if is_image(name) and not name.startswith("."))
    if not files:
        raise ValueError(f"{folder} has no images in it, at any depth")
    return files


def sample_files(folder: Path, count: int) -> list[Path]:
    """Up to ``count`` images from a folder at any depth, evenly spread over the sorted paths."""
    files = image_files(folder)
    return [files[index * len(files) // count] for index in range(count)] if len(files) > count else files


def split_calibration(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images for calibration, and every ninth for the parity check; a single image is used for both."""
    for_parity = torch.arange(len(images)) % (1 + CALIBRATION_IMAGES // PARITY_IMAGES) == 0
    return images[~for_parity] if len(images) > 1 else images, images[for_parity]
