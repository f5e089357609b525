"""From an image to a model's input: one object that checkpoints, exported files, data and training share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

MAX_SIDE = 8192  # of an image in pixels: sizes also come from files


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a model's input, and the names of the classes that the model tells apart.

    Attributes:
        class_names: in the order of the outputs; empty where they are not known.
        size: side of the center crop.
        resize: the shorter side of the image before the crop.
        mean, std: of each channel, by which values from 0 to 1 are normalized.
        interpolation: of the resizing, with antialiasing.
    """

    class_names: tuple[str, ...] = ()
    size: int = 224
    resize: int = 256
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Literal["bilinear"] = "bilinear"

    def __post_init__(self) -> None:
        if not (isinstance(self.class_names, tuple) and all(isinstance(name, str) for name in self.class_names)):
            raise ValueError(f"class_names is {self.class_names!r}; expected a tuple of names")
        if not 0 < self.size <= self.resize <= MAX_SIDE:
            raise ValueError(f"size is {self.size} and resize {self.resize}; expected 1 ≤ size ≤ resize ≤ {MAX_SIDE}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} is {values}; expected three numbers, for red, green and blue")
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; expected numbers above 0")

    def normalize(self, images: Tensor, channel_dim: int = 1) -> Tensor:
        """Values from 0 to 255 of any type to float32: (x / 255 − mean) / std per channel; the memory format stays."""
        if channel_dim == -1 and images.ndim > 1:
            return self._normalize_rows(images)
        shape = [1] * images.ndim
        shape[channel_dim] = 3
        mean, std = (torch.tensor(values, device=images.device).view(shape) for values in (self.mean, self.std))
        return images.to(torch.float32, copy=True).mul_(1 / (255 * std)).sub_(mean / std)

    def _normalize_rows(self, images: Tensor) -> Tensor:
        """(…, W, 3): the same values, several times as fast as a broadcast over the three channels of each pixel."""
        width = images.shape[-2]
        mean, std = (torch.tensor(values, device=images.device) for values in (self.mean, self.std))
        values = images.contiguous().to(torch.float32, copy=True)
        values.flatten(-2).mul_((1 / (255 * std)).repeat(width)).sub_((mean / std).repeat(width))
        return values


def preprocessing_of(model: nn.Module, size: int, resize: int, class_names: tuple[str, ...] = ()) -> Preprocessing:
    """That of a model's weights.

    NOTE not in paper: images are normalized as timm says for its model, else by ImageNet's mean and std.
    """
    config: Mapping[str, Any] = getattr(model, "pretrained_cfg", {})
    mean, std = config.get("mean", IMAGENET_MEAN), config.get("std", IMAGENET_STD)
    return Preprocessing(class_names, size, resize, tuple(mean), tuple(std))
