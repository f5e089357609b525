"""Which part of a image is shown, and how large: drawn at random for training, its centre for evaluation.

A draw depends on the seed, the epoch and the index of the image, and on nothing else: not on the order of the
images, the worker that reads them or the pipeline. So an epoch that goes on after a stop shows what it would have
shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

TRIES = 10  # torchvision's


@dataclass(frozen=True)
class TrainTransform:
    """A random part, of ``scale`` of the area and of an aspect ratio within ``ratio``, mirrored half of the time."""

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        _check_size(self.size)
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"scale is {self.scale}; expected two parts of the area, 0 < low ≤ high ≤ 1")
        low, high = self.ratio
        if not 0 < low <= high < math.inf:
            raise ValueError(f"ratio is {self.ratio}; expected two ratios of width to height, 0 < low ≤ high")


@dataclass(frozen=True)
class EvalTransform:
    """The centre of the image when its shorter side is ``resize``."""

    size: int = 224
    resize: int = 256

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.resize < self.size:
            raise ValueError(f"resize is {self.resize}; expected at least size, {self.size}, which is cut out of it")


Transform = TrainTransform | EvalTransform


class Box(NamedTuple):
    """A part of a image in pixels, and whether it is mirrored."""

    left: int
    top: int
    width: int
    height: int
    flip: bool = False


class CropParams(NamedTuple):
    """What to do with a image: cut ``box`` out, resize it to (width, height), cut the square at (left, top) out."""

    box: Box
    resized: tuple[int, int]
    corner: tuple[int, int]


def random_crop(transform: TrainTransform, width: int, height: int, seed: int, epoch: int, index: int) -> Box:
    """A random part of a image, by the rule of torchvision's RandomResizedCrop.

    Area and (the logarithm of) aspect ratio are drawn evenly, up to ten times until the part fits; else it is the
    centre, as large as the range of ratios allows.
    """
    # The index is the highest word of the counter: no two images share a number.
    philox = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, index], np.uint64))
    numbers = np.random.Generator(philox).random(1 + 4 * TRIES).tolist()
    flip = transform.flip and numbers[0] < 0.5
    low, high = (math.log(ratio) for ratio in transform.ratio)
    for first in range(1, 1 + 4 * TRIES, 4):
        part, shape, across, down = numbers[first : first + 4]
        area = width * height * (transform.scale[0] + part * (transform.scale[1] - transform.scale[0]))
        ratio = math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(across * (width - w + 1)), int(down * (height - h + 1)), w, h, flip)
    w, h = width, height
    if width / height < transform.ratio[0]:
        h = max(1, round(width / transform.ratio[0]))
    elif width / height > transform.ratio[1]:
        w = max(1, round(height * transform.ratio[1]))
    return Box((width - w) // 2, (height - h) // 2, w, h, flip)


def center_crop(transform: EvalTransform, width: int, height: int) -> CropParams:
    """The whole image resized and its centre, as torchvision's Resize and CenterCrop round them."""
    short, long = min(width, height), max(width, height)
    longer = int(transform.resize * long / short)
    resized = (transform.resize, longer) if width <= height else (longer, transform.resize)
    left, top = (round((side - transform.size) / 2) for side in resized)
    return CropParams(Box(0, 0, width, height), resized, (left, top))


def crop_params(transform: Transform, width: int, height: int, *, seed: int, epoch: int, index: int) -> CropParams:
    """What a view shows of a image."""
    if isinstance(transform, EvalTransform):
        return center_crop(transform, width, height)
    return CropParams(
        random_crop(transform, width, height, seed, epoch, index), (transform.size, transform.size), (0, 0)
    )


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size is {size}; expected at least 1 pixel")
