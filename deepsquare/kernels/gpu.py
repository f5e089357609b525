"""The same functions as in :mod:`deepsquare.kernels.cpu` for a GPU, as Triton kernels.

NOTE these were checked under Triton's interpreter only: they compile for a GPU, but none ran on one and no speed was
measured. What can be said is the traffic with memory. M is the size of a map in bytes; the numbers of planes, four
bytes each, are left out.

=======================================  =====  ==================  ======
function                                 reads  again from a cache  writes
=======================================  =====  ==================  ======
``mean_square``                          1 M                        0
``mean_square_backward``                 1 M                        1 M
``square_excitation``                    1 M    1 M                 1 M
``square_excitation_backward``           2 M    2 M                 1 M
``square_excitation_add_relu``           2 M    1 M                 1 M
``square_excitation_add_relu_backward``  3 M    3 M                 2 M
``relu_square``                          1 M                        1 M
``relu_square_backward``                 2 M                        1 M
=======================================  =====  ==================  ======

The excitations need the sum of a plane before its first result, so what is summed is read twice. One program does both
for a few planes: the second time they come from a cache, as long as the planes that run at once fit there.

Every sum is taken by one program in a fixed order: no atomics, the same bits on every call. α is read on the device:
no call waits for the GPU.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepsquare.kernels.cpu import memory_layout

try:
    import triton
    import triton.language as tl
except ImportError:  # supports() says no, and the callers go on with PyTorch's own operations
    triton = None

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 2048  # values at a time in a program: 16 for each thread of 4 warps
_WIDTH = 32  # channels of a tile where they are innermost: whole sectors of memory in every type


def _jit(kernel: Callable[..., Any]) -> Any:
    """``triton.jit``, typed, and harmless where there is no Triton."""
    return kernel if triton is None else triton.jit(kernel)


def supports(x: Tensor) -> bool:
    """Whether there is a kernel for this tensor: for its device, type and layout, a memory without gaps."""
    return (
        triton is not None
        and (x.is_cuda or not isinstance(_pool, triton.JITFunction))  # the interpreter takes any device
        and x.dtype in _DTYPES
        and x.numel() > 0
        and memory_layout(x) is not None
        and _runs_on(x.device)
    )


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Whether Triton can build a kernel here and run it: it may lack a C compiler, or not know the device."""
    try:
        relu_square(torch.ones(1, device=device))
    except Exception as error:  # whatever it is, plain operations go on
        warnings.warn(f"Triton cannot run on {device} ({error}); plain operations serve instead", stacklevel=2)
        return False
    return True


def mean_square(x: Tensor) -> Tensor:
    """Equation (20): a map (N, C, spatial…) to the mean of its squares, (N, C) in float32."""
    pooled = _for_each_plane(x)
    _run(_pool, x, pooled=pooled)
    return pooled


def mean_square_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor]:
    """Its gradient: 2/HW · x · ``gradient``, rounded once to the type of ``x``."""
    y = torch.empty_like(x)
    _run(_pool_backward, x, gradient=gradient.contiguous(), y=y)
    return (y,)


def square_excitation(x: Tensor, alpha: Tensor) -> Tensor:
    """Square-Excitation: F · s, with s = G / (G + α²) and G the mean of F²."""
    y = torch.empty_like(x)
    _run(_excite, x, alpha=alpha, residual=None, y=y)
    return y


def square_excitation_backward(gradient: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of F and α."""
    y, dalpha_partial = torch.empty_like(x), _for_each_plane(x)
    _run(
        _excite_backward, x, alpha=alpha, gradient=_alike(gradient, x), result=None,
        y=y, residual_gradient=None, dalpha_partial=dalpha_partial,
    )  # fmt: skip
    return y, dalpha_partial.sum().to(alpha.dtype).reshape(alpha.shape)


def square_excitation_add_relu(x: Tensor, alpha: Tensor, residual: Tensor, *, inplace: bool = False) -> Tensor:
    """max(0, F · s + residual): the end of a residual block, if wished in the place of F."""
    y = x if inplace else torch.empty_like(x)
    _run(_excite, x, alpha=alpha, residual=_alike(residual, x), y=y)
    return y


def square_excitation_add_relu_backward(
    gradient: Tensor, result: Tensor, x: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of F, α and the residual."""
    y, of_residual, dalpha_partial = torch.empty_like(x), torch.empty_like(x), _for_each_plane(x)
    _run(
        _excite_backward, x, alpha=alpha, gradient=_alike(gradient, x), result=_alike(result, x),
        y=y, residual_gradient=of_residual, dalpha_partial=dalpha_partial,
    )  # fmt: skip
    return y, dalpha_partial.sum().to(alpha.dtype).reshape(alpha.shape), of_residual


def relu_square(x: Tensor) -> Tensor:
    """Equation (19): max(0, t)², elementwise."""
    y = torch.empty_like(x)
    _run_elementwise(_relu_square, x, y=y)
    return y


def relu_square_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor]:
    """Its gradient: 2 · max(0, t) · ``gradient``."""
    y = torch.empty_like(x)
    _run_elementwise(_relu_square_backward, x, gradient=_alike(gradient, x), y=y)
    return (y,)


def _alike(tensor: Tensor, x: Tensor) -> Tensor:
    """In the type and layout of ``x``."""
    layout = memory_layout(x)
    assert layout is not None
    return tensor.to(x.dtype).contiguous(memory_format=layout)


def _for_each_plane(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)


def _device(x: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, whatever that of its arguments: makes it theirs. The CPU's is -1, none."""
    return torch.cuda.device(x.get_device())


def _run(kernel: Any, x: Tensor, **tensors: Tensor | None) -> None:
    """One program for each tile of neighbouring channels of an image.

    Without channels innermost all planes lie in a row, and whose they are makes no difference: they are taken as the
    channels of one image, so that small planes share a program.
    """
    n, c, hw = (*x.shape[:2], math.prod(x.shape[2:]))
    channels_last = memory_layout(x) != torch.contiguous_format
    images, channels = (n, c) if channels_last else (1, n * c)
    rows, width = _tile_shape(channels, hw, channels_last)
    with _device(x):
        kernel[(images * triton.cdiv(channels, width),)](
            x=x, channels=channels, hw=hw, channels_last=channels_last, rows=rows, width=width, **tensors
        )


def _tile_shape(channels: int, hw: int, channels_last: bool) -> tuple[int, int]:
    """Positions and channels of a tile, powers of 2: as many as it has room for, first of what is innermost."""
    rows, width = triton.next_power_of_2(hw), triton.next_power_of_2(channels)
    if channels_last:
        width = min(width, _WIDTH)
        return min(rows, _TILE // width), width
    rows = min(rows, _TILE)
    return rows, min(width, _TILE // rows)


def _run_elementwise(kernel: Any, x: Tensor, **tensors: Tensor) -> None:
    with _device(x):
        kernel[(triton.cdiv(x.numel(), _TILE),)](x=x, count=x.numel(), block=_TILE, **tensors)


# ---- The kernels. They count in 64 bits, since a map may hold more than 2³¹ values, and compute in float32; a store
# rounds to the type of its map, once. What lies outside a map reads as 0, which adds nothing to a sum. Their arguments
# are annotated in Triton's own terms: it reads the annotations, and takes `int` for 32 bits and refuses `Any`. ----


@_jit
def _planes(channels: tl.int64, width: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The image of this program, and its channels (1, width)."""
    chunks = (channels + width - 1) // width
    program = tl.program_id(0).to(tl.int64)
    return program // chunks, program % chunks * width + tl.arange(0, width)[None, :]


@_jit
def _tile(
    start: tl.tensor, image: tl.tensor, channel: tl.tensor, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Where the values of the tile from position ``start`` lie, and which of them exist: both (rows, width)."""
    position = start + tl.arange(0, rows).to(tl.int64)[:, None]
    if channels_last:
        at = (image * hw + position) * channels + channel
    else:
        at = (image * channels + channel) * hw + position
    return at, (position < hw) & (channel < channels)


@_jit
def _read(source: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)


@_jit
def _positive(value: tl.tensor) -> tl.tensor:
    return tl.where(value < 0, 0.0, value)  # not tl.maximum: NaN stays


@_jit
def _grad_masked(gradient: tl.tensor, result: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The gradient that reaches the sum of branch and residual: nothing where the ReLU cut it off."""
    grad_masked = _read(gradient, at, inside)
    if result is not None:
        grad_masked = tl.where(_read(result, at, inside) <= 0, 0.0, grad_masked)
    return grad_masked


@_jit
def _excitation(mean: tl.tensor, alpha: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Equation (25): the scale of a plane, its slope and that of α; 0/0 and inf as in ``cpu.c``."""
    alpha = tl.broadcast_to(alpha, mean.shape)  # a scalar's comparison, broadcast, is no mask to the interpreter
    offset = alpha * alpha
    total = mean + offset
    # 2⁻¹²⁶, the smallest normal number. A literal below it, though equal in float32, would make the test a float64 one.
    one = (offset == 0) | (total < 1.1754943508222875e-38) | (mean == float("inf"))
    flat = one | (total == float("inf"))
    part = tl.div_rn(mean, total)  # `/` may be two units off, and then the scale above 1
    scale = tl.where(one, 1.0, tl.where(flat, 0.0, part))
    slope = tl.where(flat, 0.0, tl.div_rn(tl.div_rn(offset, total), total))
    alpha_slope = tl.where(flat, 0.0, tl.div_rn(-2 * alpha * part, total))
    return scale, slope, alpha_slope


@_jit
def _mean_square(
    x: tl.tensor, image: tl.tensor, channel: tl.tensor, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    squares = tl.zeros([rows, width], dtype=tl.float32)  # many short sums, then one of them
    for start in range(0, hw, rows):
        at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
        value = _read(x, at, inside)
        squares += value * value
    return tl.sum(squares, axis=0, keep_dims=True) / hw  # (1, width)


@_jit
def _pool(
    x: tl.tensor, pooled: tl.tensor, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    image, channel = _planes(channels, width)
    mean = _mean_square(x, image, channel, channels, hw, channels_last, rows, width)
    tl.store(pooled + image * channels + channel, mean, mask=channel < channels)


@_jit
def _pool_backward(
    x: tl.tensor, gradient: tl.tensor, y: tl.tensor, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    image, channel = _planes(channels, width)
    factor = 2 * (_read(gradient, image * channels + channel, channel < channels) / hw)
    for start in range(0, hw, rows):
        at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
        tl.store(y + at, _read(x, at, inside) * factor, mask=inside)


@_jit
def _excite(
    x: tl.tensor, alpha: tl.tensor, residual: tl.tensor, y: tl.tensor, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    image, channel = _planes(channels, width)
    mean = _mean_square(x, image, channel, channels, hw, channels_last, rows, width)
    scale, _, _ = _excitation(mean, tl.load(alpha).to(tl.float32))
    for start in range(0, hw, rows):
        at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
        value = _read(x, at, inside) * scale
        if residual is not None:
            value = _positive(value + _read(residual, at, inside))
        tl.store(y + at, value, mask=inside)


@_jit
def _excite_backward(
    x: tl.tensor, alpha: tl.tensor, gradient: tl.tensor, result: tl.tensor,
    y: tl.tensor, residual_gradient: tl.tensor, dalpha_partial: tl.tensor, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    image, channel = _planes(channels, width)
    squares = tl.zeros([rows, width], dtype=tl.float32)
    elementwise_muls = tl.zeros([rows, width], dtype=tl.float32)
    for start in range(0, hw, rows):
        at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
        value = _read(x, at, inside)
        squares += value * value
        elementwise_muls += value * _grad_masked(gradient, result, at, inside)
    mean = tl.sum(squares, axis=0, keep_dims=True) / hw
    product = tl.sum(elementwise_muls, axis=0, keep_dims=True)
    scale, slope, alpha_slope = _excitation(mean, tl.load(alpha).to(tl.float32))
    tl.store(
        dalpha_partial + image * channels + channel,
        tl.where(alpha_slope == 0, 0.0, product * alpha_slope),
        mask=channel < channels,
    )
    slope = tl.where(slope == 0, 0.0, slope * 2 * (product / hw))  # 0 · inf is not meant
    for start in range(0, hw, rows):
        at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
        grad_masked = _grad_masked(gradient, result, at, inside)
        tl.store(y + at, grad_masked * scale + _read(x, at, inside) * slope, mask=inside)
        if result is not None:
            tl.store(residual_gradient + at, grad_masked, mask=inside)


@_jit
def _relu_square(x: tl.tensor, y: tl.tensor, count: tl.int64, block: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = _positive(_read(x, at, at < count))
    tl.store(y + at, value * value, mask=at < count)


@_jit
def _relu_square_backward(
    x: tl.tensor, gradient: tl.tensor, y: tl.tensor, count: tl.int64, block: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = _positive(_read(x, at, at < count))
    product = _read(gradient, at, at < count) * value  # doubled last: the value itself may be huge
    tl.store(y + at, tl.where(value <= 0, 0.0, product + product), mask=at < count)
