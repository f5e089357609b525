"""What decides a training run, beside the model, the data and the seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum; the rate rises linearly over the warm-up and falls by a cosine to zero."""

    epochs: int
    batch: int = 128
    rate: float = 0.1  # the highest one
    warmup: float = 1.0  # epochs
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4  # on every parameter, as torch.optim.SGD does it
    pad: int = 4  # random crops from a border reflected by so many pixels
    flip: bool = True  # from left to right, every second image

    def __post_init__(self) -> None:
        for name, kind in (("epochs", int), ("batch", int), ("pad", int), ("flip", bool), ("nesterov", bool)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected {kind.__name__}")
        for name, valid, expected in (
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch", self.batch >= 1, "at least 1"),
            ("rate", 0 < self.rate < math.inf, "above 0"),
            ("warmup", 0 <= self.warmup <= self.epochs, f"between 0 and the {self.epochs} epochs"),
            ("momentum", 0 <= self.momentum < 1, "0 ≤ momentum < 1"),
            ("nesterov", self.momentum > 0 or not self.nesterov, "False where momentum is 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"),
            ("pad", self.pad >= 0, "at least 0"),
        ):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")

    def rate_at(self, progress: float) -> float:
        """The rate after ``progress`` epochs, which may be a fraction."""
        if progress < self.warmup:
            return self.rate * progress / self.warmup
        if self.epochs == self.warmup:
            return self.rate
        part = min((progress - self.warmup) / (self.epochs - self.warmup), 1.0)
        return self.rate * (1 + math.cos(math.pi * part)) / 2

    def optimiser(self, model: nn.Module) -> torch.optim.SGD:
        """The optimiser of a model; the loop sets its rate at every step."""
        options: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov, "fused": True}
        return torch.optim.SGD(model.parameters(), self.rate, weight_decay=self.weight_decay, **options)
