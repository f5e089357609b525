"""Second-order statistics in float32 at least, also within autocast."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def wide(x: Tensor) -> Iterator[Tensor]:
    """``x`` in float32 at least, with autocast off."""
    kind = x.device.type if x.device.type != "meta" else "cpu"
    with torch.autocast(kind, enabled=False):
        yield x if x.dtype == torch.float64 else x.float()
