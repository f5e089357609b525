"""Image files as the input of a deployed model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deepsquare.checkpoint import Preprocessing
from deepsquare.data.pil import FORMATS, DecodeError, decode
from deepsquare.data.source import is_image
from deepsquare.data.transforms import EvalTransform, center_crop

PARITY_IMAGES, CALIBRATION_IMAGES = 64, 512  # images that an export is proved on, and that int8 takes its ranges from


def load_images(files: Sequence[Path], preprocessing: Preprocessing, upright: bool = False) -> Tensor:
    """(N, 3, S, S) float32: the centre of each image, normalised as the model was trained.

    ``upright`` follows the rotation that a camera has noted; training and evaluation do not.
    """
    shown = np.empty((len(files), preprocessing.size, preprocessing.size, 3), np.uint8)
    crop_for = partial(center_crop, EvalTransform(preprocessing.size, preprocessing.resize))
    for file, out in zip(files, shown, strict=True):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is a folder; give images" if file.is_dir() else f"no image {file}")
        try:
            with warnings.catch_warnings():  # of many pixels, which are an error
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                decode(file.read_bytes(), crop_for, out, upright)
        except DecodeError as error:
            kinds = ", ".join(FORMATS)
            raise ValueError(f"{file} cannot be read as a image ({error}); expected one of {kinds}") from error
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (preprocessing.mean, preprocessing.std))
    return (torch.from_numpy(shown).permute(0, 3, 1, 2).float().div_(255) - mean).div_(std).contiguous()


def sample_files(folder: Path, count: int) -> list[Path]:
    """Images from a folder at any depth, evenly spread over their names."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder; expected one with images in it")
    found = sorted(Path(at) / name for at, _, names in os.walk(folder) for name in names if is_image(name))
    if not found:
        raise ValueError(f"{folder} has no images in it, at any depth")
    return [found[place * len(found) // count] for place in range(count)] if len(found) > count else found


def split_calibration(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images to calibrate with, and every ninth to compare on; a single one does both."""
    places = torch.arange(len(images))
    compared = places % (1 + CALIBRATION_IMAGES // PARITY_IMAGES) == 0
    return images[~compared] if len(images) > 1 else images, images[compared]
