"""What the peers share: how their layers start, and statistics in float32 at least, also within autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def fp32_context(x: Tensor) -> Iterator[Tensor]:
    """``x`` in float32 at least, with autocast off."""
    kind = x.device.type if x.device.type != "meta" else "cpu"
    with torch.autocast(kind, enabled=False):
        yield x if x.dtype == torch.float64 else x.float()


def init_kaiming(module: Module) -> Module:
    """Start every convolution as the peers' authors do, in the way of ResNet: normal, by the fan-out."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return module
