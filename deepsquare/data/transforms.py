"""Crops: random ones for training, the center for evaluation.

A random crop depends on the seed, the epoch and the index of the image only: not on the order of the images, the worker
that reads them or the pipeline. An epoch that is resumed therefore yields the same images as one that was not stopped.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepsquare.preprocessing import Preprocessing

TRIES = 10  # torchvision's
MAX_PIXELS = 89_478_485  # of an image, before and after resizing; above this, Pillow warns of a decompression bomb


@dataclass(frozen=True)
class TrainTransform:
    """torchvision's RandomResizedCrop to ``size`` × ``size``, and a random horizontal flip (p = 0.5)."""

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)  # range of the crop's share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # range of the crop's width / height
    flip: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}; expected at least 1 pixel")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale is {self.scale}; expected two shares of the area, 0 < low ≤ high ≤ 1")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(f"ratio is {self.ratio}; expected two ratios of width to height, 0 < low ≤ high")


Transform = TrainTransform | Preprocessing


class CropParams(NamedTuple):
    """Crop the box, resize it to ``resized``, crop the square at ``corner``, flip; all pairs are (x, y)."""

    left: int
    top: int
    width: int
    height: int
    resized: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    flip: bool = False


def random_crop(transform: TrainTransform, width: int, height: int, seed: int, epoch: int, index: int) -> CropParams:
    """A random crop of an image of ``width`` × ``height``, by the rule of torchvision's RandomResizedCrop.

    Area and log aspect ratio are uniform, sampled up to ten times until the crop fits; otherwise it is the center, as
    large as the range of ratios allows.
    """
    # The index is the highest word of the counter: no two images share a number.
    philox = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, index], np.uint64))
    numbers = np.random.Generator(philox).random(1 + 4 * TRIES).tolist()
    resized, flip = (transform.size, transform.size), transform.flip and numbers[0] < 0.5
    low, high = (math.log(ratio) for ratio in transform.ratio)
    for first in range(1, 1 + 4 * TRIES, 4):
        u_area, u_ratio, u_left, u_top = numbers[first : first + 4]
        area = width * height * (transform.scale[0] + u_area * (transform.scale[1] - transform.scale[0]))
        ratio = math.exp(low + u_ratio * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(u_left * (width - w + 1)), int(u_top * (height - h + 1))
            return CropParams(left, top, w, h, resized, flip=flip)
    w, h = width, height
    if width / height < transform.ratio[0]:
        h = max(1, round(width / transform.ratio[0]))
    elif width / height > transform.ratio[1]:
        w = max(1, round(height * transform.ratio[1]))
    return CropParams((width - w) // 2, (height - h) // 2, w, h, resized, flip=flip)


def center_crop(preprocessing: Preprocessing, width: int, height: int) -> CropParams:
    """The whole image resized, then its center, rounded as torchvision's Resize and CenterCrop do.

    NOTE not in paper: an image so narrow that the resized one would have more than ``MAX_PIXELS`` (with 256 pixels, one
    of more than 1365 : 1) is shortened to that at both ends first, which its center crop does not show.
    """
    resize, shorter, longer = preprocessing.resize, min(width, height), max(width, height)
    excess = longer - MAX_PIXELS * shorter // resize**2
    cut = max(0, min(excess + 1, longer - shorter) // 2)  # the same at both ends: the center stays
    longer -= 2 * cut
    side = int(resize * longer / shorter)
    left, top, resized = (0, cut, (resize, side)) if width <= height else (cut, 0, (side, resize))
    x, y = (round((side - preprocessing.size) / 2) for side in resized)
    return CropParams(left, top, width - 2 * left, height - 2 * top, resized, (x, y))
