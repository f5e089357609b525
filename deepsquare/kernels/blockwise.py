"""Square-Pooling by PyTorch's operations in blocks, for maps that no compiled kernel supports.

``x.square().mean((2, 3))`` writes the squares of the whole map to memory, in float32 for half types, and saves a copy
for the backward pass. Here a buffer that fits a cache holds the squares of one block at a time.
"""

import math

import torch
from torch import Tensor

from deepsquare.kernels.cpu import Kernel

_BLOCK = 1 << 20  # elements: 4 MB in float32


def launch(kernel: Kernel, x: Tensor, **tensors: Tensor) -> None:
    """Run ``POOL`` or ``POOL_BACKWARD`` on the map ``x``."""
    if kernel is Kernel.POOL:
        tensors["per_plane"].copy_(_mean_square(x, tensors["per_plane"].dtype))
        return
    factor = tensors["factor"].reshape(*x.shape[:2], *[1] * (x.ndim - 2))
    dim, size = _split(x)
    for block, scale, y in zip(*(torch.split(t, size, dim) for t in (x, factor, tensors["y"])), strict=True):
        torch.mul(block, scale, out=y)


def _mean_square(x: Tensor, dtype: torch.dtype) -> Tensor:
    spatial = tuple(range(2, x.ndim))
    if not x.is_cpu:  # one reduction: fast and accurate on a GPU; on a CPU neither for every type and layout
        norm: Tensor = torch.linalg.vector_norm(x, dim=spatial, dtype=dtype)
        return norm.square() / math.prod(x.shape[2:])
    dim, size = _split(x)
    blocks = torch.split(x, size, dim)
    buffer = torch.empty_like(blocks[0], dtype=dtype)
    squares = (buffer.narrow(dim, 0, block.shape[dim]).copy_(block).square_() for block in blocks)
    return torch.cat([block.mean(spatial) for block in squares], dim)


def _split(x: Tensor) -> tuple[int, int]:
    """The dimension, batch or channels, and the size of its blocks; one block for a tensor that is not on a CPU."""
    dim = 0 if x.shape[0] > 1 else 1
    return dim, max(1, _BLOCK * x.shape[dim] // max(1, x.numel())) if x.is_cpu else max(1, x.shape[dim])
