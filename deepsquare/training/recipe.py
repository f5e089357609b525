"""What decides a training run, beside the data and the seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import nn

Check = tuple[str, bool, str]  # a field, whether its value is valid, and what is


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum; the rate rises linearly over the warm-up and falls by a cosine to zero."""

    epochs: int
    batch_size: int = 128
    lr: float = 0.1  # the highest one
    warmup: float = 1.0  # epochs
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4  # on every parameter, as torch.optim.SGD does it

    def __post_init__(self) -> None:
        _check_types(type(self), vars(self))
        for name, valid, expected in self._checks():
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")

    def _checks(self) -> Iterable[Check]:
        yield "epochs", self.epochs >= 1, "at least 1"
        yield "batch_size", self.batch_size >= 1, "at least 1"
        yield "lr", 0 < self.lr < math.inf, "above 0"
        yield "warmup", 0 <= self.warmup <= self.epochs, f"between 0 and the {self.epochs} epochs"
        yield "momentum", 0 <= self.momentum < 1, "0 ≤ momentum < 1"
        yield "nesterov", self.momentum > 0 or not self.nesterov, "False where momentum is 0"
        yield "weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"

    def lr_at(self, progress: float) -> float:
        """The rate after ``progress`` epochs, which may be a fraction."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        if self.epochs == self.warmup:
            return self.lr
        part = min((progress - self.warmup) / (self.epochs - self.warmup), 1.0)
        return self.lr * (1 + math.cos(math.pi * part)) / 2

    def optimizer(self, model: nn.Module, *, scaled: bool = False) -> torch.optim.SGD:
        """The optimiser of a model; the loop sets its rate at every step.

        With ``scaled`` gradients it is not fused: when its very first step is skipped for a gradient that is not
        finite, the fused one of torch 2.13 takes memory that was never written for its momentum.
        """
        options: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov, "fused": not scaled}
        return torch.optim.SGD(model.parameters(), self.lr, weight_decay=self.weight_decay, **options)


@dataclass(frozen=True)
class CifarRecipe(Recipe):
    """The same on small images."""

    pad: int = 4  # random crops from a border reflected by so many pixels
    flip: bool = True  # from left to right, every second image

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "pad", self.pad >= 0, "at least 0"


@dataclass(frozen=True)
class ImageNetRecipe(Recipe):
    """The paper's recipe for ImageNet (Section 5), for the model ``model`` equipped with ``spec``.

    NOTE not in paper: the ranges of area and aspect ratio of the random crops. They are torchvision's, which "the
    standard ResNet data augmentation" usually means; images are enlarged or reduced with antialiasing.
    """

    epochs: int = 120
    batch_size: int = 1024  # over all devices
    lr: float = 0.4
    warmup: float = 5.0
    model: str = "resnet18"
    spec: str = ""
    dropout: float | None = None  # before the last FC; the model's own if not given
    size: int = 224  # of the images trained on
    crop_area: tuple[float, float] = (0.08, 1.0)  # of the image
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # of width and height
    flip: bool = True  # from left to right, every second image
    eval_resize: int = 256  # the shorter side, before the centre is cut out
    eval_size: int = 224
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    ema: float | None = None  # decay of an average of the weights
    sync_bn: bool = False  # batch statistics over all processes instead of each one's own part
    start: str | None = None  # a checkpoint to continue from: fine-tuning

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "dropout", self.dropout is None or 0 <= self.dropout < 1, "0 ≤ dropout < 1"
        yield "size", self.size >= 1, "at least 1"
        yield "crop_area", 0 < self.crop_area[0] <= self.crop_area[1] <= 1, "0 < least ≤ most ≤ 1"
        yield "crop_ratio", 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf, "0 < least ≤ most"
        yield "eval_size", self.eval_size >= 1, "at least 1"
        yield "eval_resize", self.eval_resize >= self.eval_size, f"at least eval_size, {self.eval_size}"
        yield "ema", self.ema is None or 0 < self.ema < 1, "0 < ema < 1"


def _check_types(recipe: type[Recipe], values: Mapping[str, Any]) -> None:
    kinds = get_type_hints(recipe)
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            raise TypeError(f"{name} is {value!r}; expected {_said(kinds[name])}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type; a whole number may stand for a float, a truth value for neither."""
    parts = get_args(kind)
    if get_origin(kind) is UnionType:
        return any(_fits(value, part) for part in parts)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _said(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing"}
    parts = get_args(kind)
    if get_origin(kind) is UnionType:
        return " or ".join(map(_said, parts))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(parts)}"
    return f"{len(parts)} numbers" if parts else names[kind]


SomeRecipe = TypeVar("SomeRecipe", bound=Recipe)


def override(recipe: SomeRecipe, changes: Mapping[str, Any]) -> tuple[SomeRecipe, list[str]]:
    """The recipe with some fields changed, and notes on what follows: the rate goes with the batch."""
    known = {field.name for field in dataclasses.fields(recipe)}
    if unknown := changes.keys() - known:
        raise ValueError(
            f"a recipe has no field {', '.join(sorted(unknown))}; its fields are {', '.join(sorted(known))}"
        )
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    _check_types(type(recipe), changes)
    notes = []
    if (
        changes.get("batch_size", recipe.batch_size) != recipe.batch_size
        and "lr" not in changes
        and changes["batch_size"] >= 1
    ):
        lr = recipe.lr * changes["batch_size"] / recipe.batch_size
        changes = {**changes, "lr": lr}
        notes.append(
            f"the lr follows the batch size: {recipe.lr:g} for {recipe.batch_size} is {lr:g} for {changes['batch_size']}; give "
            "an lr to choose otherwise"
        )
    if changes.get("epochs", recipe.epochs) < recipe.warmup and "warmup" not in changes:
        notes.append(f"the warm-up of {recipe.warmup:g} epochs is cut to the {changes['epochs']} that there are")
        changes = {**changes, "warmup": float(changes["epochs"])}
    return dataclasses.replace(recipe, **changes), notes
