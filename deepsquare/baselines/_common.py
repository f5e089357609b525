"""Shared by the baselines: initialization, and statistics in at least float32, also under autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def fp32_context(x: Tensor) -> Iterator[Tensor]:
    """``x`` in at least float32, with autocast disabled."""
    kind = x.device.type if x.device.type != "meta" else "cpu"
    with torch.autocast(kind, enabled=False):
        yield x if x.dtype == torch.float64 else x.float()


def init_kaiming(module: Module) -> Module:
    """Initialize every convolution as in ResNet and the authors' releases: normal, by the fan-out."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return module
