"""Recipes: the hyperparameters that decide the result of a training run, together with the data and the seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
import torch
from torch import nn

Check = tuple[str, bool, str]  # a field, whether its value is valid, and what is expected


def convert_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from a file to the types of a dataclass's fields; TypeError names the first that does not fit.

    An int may stand for a float and a list for a tuple, but a bool for neither, and a string for nothing else.
    """
    hints, types = get_type_hints(kind), {field.name: field.type for field in dataclasses.fields(kind)}
    converted = {}
    for name, value in values.items():
        try:
            converted[name] = msgspec.convert(value, hints[name], strict=True)
        except msgspec.ValidationError as error:
            raise TypeError(f"{name} is {value!r}; expected {types[name]}") from error
    return converted


class Validated:
    """Base class of dataclasses that check the types of their fields, and the values by ``_checks``."""

    def __post_init__(self) -> None:
        convert_fields(type(self), vars(self))
        for name, valid, expected in self._checks():
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")

    def _checks(self) -> Iterable[Check]:
        return ()


@dataclass(frozen=True)
class Recipe(Validated):
    """SGD with momentum; the learning rate rises linearly during the warm-up and then decays by a cosine to zero.

    Attributes:
        epochs: Number of epochs.
        batch_size: Images per step, over all processes.
        lr: The highest learning rate.
        warmup: Epochs of warm-up.
        momentum: Momentum of SGD.
        nesterov: Use Nesterov momentum.
        weight_decay: Weight decay of every parameter, as in torch.optim.SGD.
    """

    epochs: int
    batch_size: int = 128
    lr: float = 0.1
    warmup: float = 1.0
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4

    def _checks(self) -> Iterable[Check]:
        yield "epochs", self.epochs >= 1, "at least 1"
        yield "batch_size", self.batch_size >= 1, "at least 1"
        yield "lr", 0 < self.lr < math.inf, "above 0"
        yield "warmup", 0 <= self.warmup <= self.epochs, f"between 0 and the {self.epochs} epochs"
        yield "momentum", 0 <= self.momentum < 1, "0 ≤ momentum < 1"
        yield "nesterov", self.momentum > 0 or not self.nesterov, "False where momentum is 0"
        yield "weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"

    def lr_at(self, progress: float) -> float:
        """The learning rate after ``progress`` epochs, which may be a fraction."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        if self.epochs == self.warmup:
            return self.lr
        decayed = min((progress - self.warmup) / (self.epochs - self.warmup), 1.0)
        return self.lr * (1 + math.cos(math.pi * decayed)) / 2

    def optimizer(self, model: nn.Module, *, scaled: bool = False) -> torch.optim.SGD:
        """The optimizer of a model; the training loop sets its learning rate at every step.

        With ``scaled`` gradients it is not fused: if the very first step is skipped because a gradient is not finite,
        the fused optimizer of torch 2.13 reads uninitialized memory as its momentum.
        """
        options: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov, "fused": not scaled}
        return torch.optim.SGD(model.parameters(), self.lr, weight_decay=self.weight_decay, **options)


@dataclass(frozen=True)
class CifarRecipe(Recipe):
    """A recipe for small images.

    Attributes:
        pad: Width of the reflected border from which random crops are taken.
        flip: Flip images horizontally with probability 0.5.
    """

    pad: int = 4
    flip: bool = True

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "pad", self.pad >= 0, "at least 0"


@dataclass(frozen=True)
class ImageNetRecipe(Recipe):
    """The paper's recipe for ImageNet (Section 5).

    NOTE not in paper: the ranges of area and aspect ratio of the random crops. They are torchvision's, the usual
    meaning of "the standard ResNet data augmentation"; images are resized with antialiasing.

    Attributes:
        model: Name of the base network.
        spec: Spec that the network is equipped with; empty for the base network.
        dropout: Dropout ratio before the last FC; the model's default if None.
        size: Side of the training images.
        crop_area: Range of a random crop's share of the image's area.
        crop_ratio: Range of a random crop's width / height.
        flip: Flip images horizontally with probability 0.5.
        eval_resize: Shorter side of an evaluated image, before the center crop.
        eval_size: Side of the center crop.
        start: Checkpoint to fine-tune, of the base network or an equipped one; None for random weights.
    """

    epochs: int = 120
    batch_size: int = 1024
    lr: float = 0.4
    warmup: float = 5.0
    model: str = "resnet18"
    spec: str = ""
    dropout: float | None = None
    size: int = 224
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    eval_resize: int = 256
    eval_size: int = 224
    start: str | None = None

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "dropout", self.dropout is None or 0 <= self.dropout < 1, "0 ≤ dropout < 1"
        yield "size", self.size >= 1, "at least 1"
        yield "crop_area", 0 < self.crop_area[0] <= self.crop_area[1] <= 1, "0 < low ≤ high ≤ 1"
        yield "crop_ratio", 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf, "0 < low ≤ high"
        yield "eval_size", self.eval_size >= 1, "at least 1"
        yield "eval_resize", self.eval_resize >= self.eval_size, f"at least eval_size, {self.eval_size}"


def override(recipe: ImageNetRecipe, changes: Mapping[str, Any]) -> tuple[ImageNetRecipe, list[str]]:
    """The recipe with some fields changed, and notes on others that follow: the lr scales with the batch size."""
    known = {field.name for field in dataclasses.fields(recipe)}
    if unknown := changes.keys() - known:
        names = ", ".join(sorted(known))
        raise ValueError(f"a recipe has no field {', '.join(sorted(unknown))}; its fields are {names}")
    changes, notes = convert_fields(type(recipe), changes), []
    batch_size, epochs = (changes.get(name, getattr(recipe, name)) for name in ("batch_size", "epochs"))
    if batch_size != recipe.batch_size and batch_size >= 1 and "lr" not in changes:
        changes["lr"] = recipe.lr * batch_size / recipe.batch_size
        notes.append(
            f"the lr follows the batch size: {recipe.lr:g} for {recipe.batch_size} is {changes['lr']:g} for "
            f"{batch_size}; set lr to choose another"
        )
    if epochs < recipe.warmup and "warmup" not in changes:
        changes["warmup"] = float(epochs)
        notes.append(f"the warm-up of {recipe.warmup:g} epochs is shortened to the {epochs} epochs of the run")
    return dataclasses.replace(recipe, **changes), notes
