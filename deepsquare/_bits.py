"""Booleans as text, for rows: which test images a model classified correctly."""

from __future__ import annotations

import base64

import numpy as np
import torch
from torch import Tensor


def pack_bits(values: Tensor) -> str:
    """Booleans as base64 text: eight per byte, the first in the highest bit."""
    return base64.b64encode(np.packbits(values.numpy()).tobytes()).decode()


def unpack_bits(text: str, count: int) -> Tensor:
    """The first ``count`` booleans of a text by :func:`pack_bits`."""
    packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if not 0 <= count <= 8 * len(packed):
        raise ValueError(f"count is {count}; expected at most the {8 * len(packed)} bits of the text")
    return torch.from_numpy(np.unpackbits(packed, count=count).astype(bool))
