"""Picture files as the input of a deployed model."""

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

from deepsquare.checkpoint import Pictures
from deepsquare.data.pil import FORMATS, DamagedError, draw
from deepsquare.data.source import is_picture
from deepsquare.data.transforms import EvalView, centre_box

COMPARED, CALIBRATING = 64, 512  # pictures that an export is proved on, and that int8 takes its ranges from


def read_pictures_of(files: Sequence[Path], pictures: Pictures, upright: bool = False) -> Tensor:
    """(N, 3, S, S) float32: the centre of each picture, normalised as the model was trained.

    ``upright`` follows the rotation that a camera has noted; training and evaluation do not.
    """
    shown = np.empty((len(files), pictures.size, pictures.size, 3), np.uint8)
    planned = partial(centre_box, EvalView(pictures.size, pictures.resize))
    for file, out in zip(files, shown, strict=True):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is a folder; give pictures" if file.is_dir() else f"no picture {file}")
        try:
            with warnings.catch_warnings():  # of many pixels, which are an error
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                draw(file.read_bytes(), planned, out, upright)
        except DamagedError as error:
            kinds = ", ".join(FORMATS)
            raise ValueError(f"{file} cannot be read as a picture ({error}); expected one of {kinds}") from error
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (pictures.mean, pictures.std))
    return (torch.from_numpy(shown).permute(0, 3, 1, 2).float().div_(255) - mean).div_(std).contiguous()


def sample(folder: Path, count: int) -> list[Path]:
    """Pictures from a folder at any depth, evenly spread over their names."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder; expected one with pictures in it")
    found = sorted(Path(at) / name for at, _, names in os.walk(folder) for name in names if is_picture(name))
    if not found:
        raise ValueError(f"{folder} has no pictures in it, at any depth")
    return [found[place * len(found) // count] for place in range(count)] if len(found) > count else found


def apart(images: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures to calibrate with, and every ninth to compare on; a single one does both."""
    places = torch.arange(len(images))
    compared = places % (1 + CALIBRATING // COMPARED) == 0
    return images[~compared] if len(images) > 1 else images, images[compared]
