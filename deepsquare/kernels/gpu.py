"""The GPU backend: the kernels of ``cpu.c`` in Triton. ``docs/kernels.md`` has the memory traffic of each.

NOTE tested under Triton's interpreter and compiled for a GPU, but never run on one: no speed was measured.

An excitation needs the sum of a plane before its first result, so it reads a plane twice. One program does both for a
few planes; the second read comes from a cache, as long as the planes that run at once fit there.

Every sum is taken by one program in a fixed order, without atomics: results are deterministic. α is read on the
device, so no call waits for the GPU.
"""

from __future__ import annotations  # Triton, whose types the kernels name, may be missing

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepsquare.kernels.cpu import RUN, Kernel, memory_layout

try:
    import triton
    import triton.language as tl
except ImportError:  # supports() is False, and PyTorch's operations run
    triton = None

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 2048  # elements of a tile: 16 for each thread of 4 warps
_WIDTH = 32  # channels of a tile in channels_last: whole memory sectors in every type


def _jit(kernel: Callable[..., Any]) -> Any:
    """``triton.jit``, typed; the plain function where Triton is missing."""
    return kernel if triton is None else triton.jit(kernel)


def supports(x: Tensor) -> bool:
    """Whether the kernels take this tensor: its device and type, and its layout, which must be dense."""
    return (
        triton is not None
        and (x.is_cuda or not isinstance(_scale_planes, triton.JITFunction))  # the interpreter takes any device
        and x.dtype in _DTYPES
        and x.numel() > 0
        and memory_layout(x) is not None
        and _runs_on(x.device)
    )


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Whether Triton can build and run a kernel: it may lack a C compiler, or not support the device."""
    x = torch.ones(1, device=device)
    try:
        launch(Kernel.RELU_SQUARE, x, y=torch.empty_like(x))
    except Exception as error:  # whatever it is, PyTorch's operations run
        warnings.warn(f"Triton cannot run on {device} ({error}); PyTorch's operations run instead", stacklevel=2)
        return False
    return True


def launch(kernel: Kernel, x: Tensor, **tensors: Tensor) -> None:
    """Run ``kernel`` on the map ``x``; maps among ``tensors`` have the type and layout of ``x``.

    One program computes a tile of neighbouring channels of an image. In the contiguous layout all planes are taken as
    channels of one image, so that small planes share a program.
    """
    run = _KERNELS[kernel]
    arguments = {**dict.fromkeys(run.arg_names), **tensors}  # a kernel skips what is None
    if kernel >= Kernel.RELU_SQUARE:
        programs = triton.cdiv(x.numel(), RUN)
        arguments |= {"x": x, "count": x.numel(), "block": RUN}
    else:
        n, c, hw = *x.shape[:2], math.prod(x.shape[2:])
        channels_last = not x.is_contiguous()
        images, channels = (n, c) if channels_last else (1, n * c)
        rows, width = _tile_shape(channels, hw, channels_last)
        programs = images * triton.cdiv(channels, width)
        arguments |= {"x": x, "channels": channels, "hw": hw, "channels_last": channels_last}
        arguments |= {"rows": rows, "width": width, "planes": n * c}
        if run is _scale_planes:
            arguments["both"] = kernel in _BOTH
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device; for a CPU tensor this does nothing
        run[(programs,)](**arguments)


def _tile_shape(channels: int, hw: int, channels_last: bool) -> tuple[int, int]:
    """Positions and channels of a tile, powers of 2: as many as fit, the innermost dimension first."""
    rows, width = triton.next_power_of_2(hw), triton.next_power_of_2(channels)
    if channels_last:
        width = min(width, _WIDTH)
        return min(rows, _TILE // width), width
    rows = min(rows, _TILE)
    return rows, min(width, _TILE // rows)


# ---- The kernels. Indices have 64 bits, since a map may hold more than 2³¹ values. Values are computed in float32; a
# store rounds once, to the type of its map. Outside a map reads give 0, which adds nothing to a sum. Arguments are
# annotated in Triton's own terms: it reads the annotations, takes `int` for 32 bits and refuses `Any`. ----


@_jit
def _planes(channels: tl.int64, width: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The image of this program and its channels, (1, width)."""
    chunks = (channels + width - 1) // width
    program = tl.program_id(0).to(tl.int64)
    return program // chunks, program % chunks * width + tl.arange(0, width)[None, :]


@_jit
def _tile(
    start: tl.tensor, image: tl.tensor, channel: tl.tensor, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The offsets of the tile at position ``start`` and the mask of those inside the map, both (rows, width)."""
    position = start + tl.arange(0, rows).to(tl.int64)[:, None]
    if channels_last:  # noqa: SIM108
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
def _grad_masked(grad: tl.tensor, result: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The gradient of the sum of branch and residual: 0 where the ReLU is inactive."""
    grad_masked = _read(grad, at, inside)
    if result is not None:
        grad_masked = tl.where(_read(result, at, inside) <= 0, 0.0, grad_masked)
    return grad_masked


@_jit
def _excitation(
    mean: tl.tensor, alpha: tl.tensor, beta: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The factor 1 − β + β · s of a plane, its derivatives in G, α and β, whether s is 1; 0/0 and inf as ``cpu.c``."""
    alpha = tl.load(alpha).to(tl.float32)
    alpha = tl.broadcast_to(alpha, mean.shape)  # the interpreter cannot broadcast a scalar comparison to a mask
    blend = tl.full(mean.shape, 1.0, tl.float32)
    if beta is not None:
        blend *= tl.load(beta).to(tl.float32)
    offset = alpha * alpha
    total = mean + offset
    # 2⁻¹²⁶, the smallest normal number. A smaller literal, though equal in float32, would compare in float64.
    one = (offset == 0) | (total < 1.1754943508222875e-38) | (mean == float("inf"))
    flat = one | (total == float("inf"))
    part = tl.div_rn(mean, total)  # `/` may be two ulps off, and the scale above 1
    # One less itself is 0, or NaN for a β that is.
    scale = tl.where(one, 1 + (blend - blend), 1 - blend + blend * part)
    slope = tl.where(flat, 0.0, blend * tl.div_rn(tl.div_rn(offset, total), total))
    alpha_slope = tl.where(flat, 0.0 * alpha, blend * tl.div_rn(-2 * alpha * part, total))
    beta_slope = tl.where(one, 0.0, tl.where(flat, -1.0, -tl.div_rn(offset, total)))
    return scale, slope, alpha_slope, beta_slope, one


@_jit
def _scale_planes(
    x: tl.tensor, factor: tl.tensor, alpha: tl.tensor, beta: tl.tensor, residual: tl.tensor, y: tl.tensor,
    per_plane: tl.tensor, planes: tl.int64, both: tl.constexpr, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """``y``: each plane times its ``factor``, or its excitation; ``per_plane``: the mean square of each plane.

    With ``both``, ``per_plane`` has the means in a row before, and ``factor`` has a row before that is added.
    """
    image, channel = _planes(channels, width)
    plane, present = image * channels + channel, channel < channels
    if factor is not None:
        if both:
            shift = _read(factor, plane, present)
            scale = _read(factor, planes + plane, present)
        else:
            scale = _read(factor, plane, present)
    else:
        squares = tl.zeros([rows, width], dtype=tl.float32)  # partial sums, added below
        values = tl.zeros([rows, width], dtype=tl.float32)
        for start in range(0, hw, rows):
            at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
            value = _read(x, at, inside)
            squares += value * value
            if both:
                values += value
        mean = tl.sum(squares, axis=0, keep_dims=True) / hw  # (1, width)
        if both:
            tl.store(per_plane + plane, tl.sum(values, axis=0, keep_dims=True) / hw, mask=present)
            tl.store(per_plane + planes + plane, mean, mask=present)
        elif per_plane is not None:
            tl.store(per_plane + plane, mean, mask=present)
        else:
            scale, _, _, _, _ = _excitation(mean, alpha, beta)
    if y is not None:
        for start in range(0, hw, rows):
            at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
            value = _read(x, at, inside) * scale
            if both:
                value += shift
            if residual is not None:
                value = _positive(value + _read(residual, at, inside))
            tl.store(y + at, value, mask=inside)


@_jit
def _excite_backward(
    x: tl.tensor, alpha: tl.tensor, beta: tl.tensor, grad: tl.tensor, result: tl.tensor,
    y: tl.tensor, dresidual: tl.tensor, per_plane: tl.tensor, planes: tl.int64, channels: tl.int64, hw: tl.int64,
    channels_last: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    image, channel = _planes(channels, width)
    squares = tl.zeros([rows, width], dtype=tl.float32)
    products = tl.zeros([rows, width], dtype=tl.float32)
    for start in range(0, hw, rows):
        at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
        value = _read(x, at, inside)
        squares += value * value
        products += value * _grad_masked(grad, result, at, inside)
    mean = tl.sum(squares, axis=0, keep_dims=True) / hw
    product = tl.sum(products, axis=0, keep_dims=True)
    scale, slope, alpha_slope, beta_slope, one = _excitation(mean, alpha, beta)
    part, present = per_plane + image * channels + channel, channel < channels
    tl.store(part, tl.where(one, 0.0 * tl.load(alpha), product * alpha_slope), mask=present)
    tl.store(part + planes, product * beta_slope, mask=present)
    slope = tl.where(one, 0.0, slope * 2 * (product / hw))  # avoids 0 · inf
    for start in range(0, hw, rows):
        at, inside = _tile(start, image, channel, channels, hw, channels_last, rows)
        grad_masked = _grad_masked(grad, result, at, inside)
        tl.store(y + at, grad_masked * scale + _read(x, at, inside) * slope, mask=inside)
        if result is not None:
            tl.store(dresidual + at, grad_masked, mask=inside)


@_jit
def _relu_square(x: tl.tensor, grad: tl.tensor, y: tl.tensor, count: tl.int64, block: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = _positive(_read(x, at, at < count))
    result = value * value
    if grad is not None:
        product = _read(grad, at, at < count) * value  # doubled last: the value itself may be huge
        result = tl.where(value <= 0, 0.0, product + product)
    tl.store(y + at, result, mask=at < count)


@_jit
def _blend_square(
    x: tl.tensor, beta: tl.tensor, grad: tl.tensor, y: tl.tensor, per_plane: tl.tensor, count: tl.int64,
    block: tl.constexpr,
) -> None:  # fmt: skip
    """t · (1 − β + β · t), or its gradient and in ``per_plane`` the program's part of dβ."""
    program = tl.program_id(0).to(tl.int64)
    at = program * block + tl.arange(0, block)
    value, blend = _read(x, at, at < count), tl.load(beta).to(tl.float32)
    if grad is None:
        tl.store(y + at, value * (1 - blend + blend * value), mask=at < count)
    else:
        slope = _read(grad, at, at < count)
        tl.store(y + at, slope * (1 - blend + 2 * blend * value), mask=at < count)
        tl.store(per_plane + program, tl.sum(slope * value * (value - 1), axis=0))


_EXCITE_BACKWARD = (Kernel.EXCITE_BACKWARD, Kernel.EXCITE_ADD_RELU_BACKWARD)
_BOTH = (Kernel.POOL_BOTH, Kernel.POOL_BOTH_BACKWARD)
_KERNELS = {
    **dict.fromkeys((Kernel.POOL, Kernel.POOL_BACKWARD, Kernel.EXCITE, Kernel.EXCITE_ADD_RELU, *_BOTH), _scale_planes),
    **dict.fromkeys(_EXCITE_BACKWARD, _excite_backward),
    **dict.fromkeys((Kernel.RELU_SQUARE, Kernel.RELU_SQUARE_BACKWARD), _relu_square),
    **dict.fromkeys((Kernel.BLEND_SQUARE, Kernel.BLEND_SQUARE_BACKWARD), _blend_square),
}
