"""The CPU backend: the compiled kernels of ``cpu.c``, run on PyTorch's own threads.

``cpu.c`` is plain C, built with the package and called through ctypes. Unlike a C++ extension it needs neither torch's
headers nor a build per torch version; unlike generated code or numba it needs no compiler at run time and no second
thread pool. Where it was not built, :func:`supports` is False and PyTorch's operations run instead.
"""

import ctypes
import functools
import importlib.util
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
RUN = 1 << 12  # values of one part of an elementwise sum, as in ``cpu.c``
GROUP = 16  # channels are computed in such groups between two passes, as in ``cpu_norm.h``
WIDEST_VECTORS = 2  # AVX-512; 1 is vectors of eight floats: AVX2 on x86. The kernels take the widest there is.
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Kernel(IntEnum):
    """The kernels of every backend; the order is that of ``enum kernel`` in ``cpu.c``."""

    POOL = 0
    POOL_BACKWARD = 1
    EXCITE = 2
    EXCITE_BACKWARD = 3
    EXCITE_ADD_RELU = 4
    EXCITE_ADD_RELU_BACKWARD = 5
    POOL_BOTH = 6
    POOL_BOTH_BACKWARD = 7
    RELU_SQUARE = 8
    RELU_SQUARE_BACKWARD = 9
    BLEND_SQUARE = 10
    BLEND_SQUARE_BACKWARD = 11
    BLOCK_ADD = 12  # by ``block_end``
    BLOCK_SHUFFLE = 13


# What the C functions read, packed into bytes: a call then passes one argument, and no tensor's value becomes Python's.
_CALL = struct.Struct("@4l10P3l")  # ``call`` of ``cpu.c``
_BLOCK_END = struct.Struct("@4l11P2d2P7l")  # ``block_end`` of ``cpu.c``
_BLOCK_TRAINING = struct.Struct("@3l14P2d3l")  # ``block_training`` of ``cpu.c``
NO_NORM = (0, 0, 0, 0)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot run."""
    spec = importlib.util.find_spec("deepsquare.kernels._cpu")
    if spec is None or spec.origin is None:
        return None
    try:
        compiled = ctypes.CDLL(spec.origin)
        # Looked up through torch's own library, a symbol is that of the OpenMP runtime it is linked with.
        libtorch = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        openmp = [ctypes.cast(getattr(libtorch, name), ctypes.c_void_p) for name in _OPENMP]
    except (AttributeError, OSError, StopIteration):
        return None
    compiled.deepsquare_use_threads(*openmp)
    compiled.deepsquare_call.argtypes = compiled.deepsquare_block_end.argtypes = (ctypes.c_char_p,)
    compiled.deepsquare_block_training.argtypes = (ctypes.c_char_p,)
    compiled.deepsquare_call.restype = None
    return compiled if compiled.deepsquare_select(WIDEST_VECTORS) else None


def supports(x: Tensor) -> bool:
    """Whether the kernels take this tensor: its type, and its layout, which must be dense."""
    return x.dtype in _FORMATS and x.numel() > 0 and memory_layout(x) is not None and library() is not None


def launch(
    kernel: Kernel, x: Tensor, *, grad: Tensor | None = None, residual: Tensor | None = None,
    result: Tensor | None = None, y: Tensor | None = None, dresidual: Tensor | None = None,
    factor: Tensor | None = None, per_plane: Tensor | None = None,
    alpha: Tensor | None = None, beta: Tensor | None = None,
) -> None:  # fmt: skip
    """Run ``kernel`` on the map ``x``; the other maps have its type and layout. No β is β = 1.

    ``y`` and ``dresidual`` are output maps, ``y`` the gradient of ``x`` in a backward kernel; ``result`` is the output
    of the forward pass. ``factor`` and ``per_plane`` are float32 with one or two values per plane: an input of
    ``POOL_BACKWARD``, and an output.
    """
    compiled = library()
    assert compiled is not None
    if alpha is not None and alpha.dtype is not torch.float32:
        alpha = alpha.float()
    if beta is not None and beta.dtype is not torch.float32:
        beta = beta.float()
    n, c = (1, 1) if kernel >= Kernel.RELU_SQUARE else x.shape[:2]
    maps = (grad, residual, result, y, dresidual, factor, per_plane, alpha, beta)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in maps]
    layout = not x.is_contiguous(), torch.get_num_threads()
    compiled.deepsquare_call(
        _CALL.pack(kernel, _FORMATS[x.dtype], *layout, x.data_ptr(), *addresses, n, c, x.numel() // (n * c))
    )


def block_end(
    kernel: Kernel, z: Tensor, shortcut: Tensor, y: Tensor, norms: Sequence[int], eps: Sequence[float],
    scalars: Sequence[int], relu: Sequence[bool],
) -> None:  # fmt: skip
    """The end of a building block at inference, ``BLOCK_ADD`` or ``BLOCK_SHUFFLE``, from ``z`` and ``shortcut``.

    ``norms`` are the addresses of the running mean and variance, weight and bias of the normalization of ``z``, then of
    ``shortcut``, ``scalars`` those of the excitation's α and β: all of float32 values, 0 for what is not there.
    """
    compiled = library()
    assert compiled is not None
    shape = z.shape
    n, c = shape[0], shape[1]
    hw = z.numel() // (n * c)
    channels_last = not z.is_contiguous()
    image, row = c * hw, c
    if channels_last or not shortcut.is_contiguous():
        strides = _slice_strides(shortcut, channels_last)
        if strides is None:
            shortcut, strides = match_layout(shortcut, z), (image, row)
        image, row = strides
    packed = _BLOCK_END.pack(
        kernel, _FORMATS[z.dtype], channels_last, torch.get_num_threads(), z.data_ptr(), shortcut.data_ptr(),
        y.data_ptr(), *norms, *eps, *scalars, *relu, n, c, hw, image, row,
    )  # fmt: skip
    if not compiled.deepsquare_block_end(packed):
        raise MemoryError("the end of a building block")


def block_training(
    z: Tensor, *, y: Tensor, moments: Tensor, per_channel: Tensor, eps: float, shortcut: Tensor | None = None,
    grad: Tensor | None = None, result: Tensor | None = None, dshortcut: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, alpha: Tensor | None = None, beta: Tensor | None = None,
    running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float = 0.0,
) -> bool:  # fmt: skip
    """The end of a building block in training, from the map ``z`` before its batch normalization.

    Forward it needs ``shortcut`` and writes ``moments`` (of the planes, of :func:`moments_shape`) and ``per_channel``:
    the mean and variance of each channel. Backward it needs ``grad``, ``result`` and ``moments`` and writes the
    gradients: of ``z`` into ``y``, of ``shortcut``, and into ``per_channel`` those of ``weight`` and ``bias`` and the
    channels' parts of those of ``alpha`` and ``beta``. The maps have the type and layout of ``z``.

    False if the mean or variance of a channel is not finite in float32; then nothing is computed.
    """
    compiled = library()
    assert compiled is not None
    n, c = z.shape[:2]
    maps = (z, shortcut, grad, result, y, dshortcut)
    tensors = (*maps, weight, bias, alpha, beta, moments, per_channel, running_mean, running_var)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    layout = not z.is_contiguous(), torch.get_num_threads()
    result = compiled.deepsquare_block_training(
        _BLOCK_TRAINING.pack(_FORMATS[z.dtype], *layout, *addresses, eps, momentum, n, c, z.numel() // (n * c))
    )
    if not result:
        raise MemoryError("the end of a building block")
    return bool(result == 1)


def moments_shape(z: Tensor) -> tuple[int, int, int]:
    """The shape of ``moments`` of :func:`block_training`; its last dimension is that of ``per_channel``."""
    n, c = z.shape[:2]
    return 2, n, -(-c // GROUP) * GROUP


def _slice_strides(x: Tensor, channels_last: bool) -> tuple[int, int] | None:
    """The strides of an image and, in channels_last, a position of some channels of a dense map; None for others."""
    if x.ndim != 4 or x.numel() == 0:
        return None
    _, c, height, width = x.shape
    image, channel, line, position = x.stride()
    if channels_last:
        return (image, position) if channel == 1 and line == width * position and position >= c else None
    return (image, 0) if position == 1 and line == width and channel == height * width else None


def memory_layout(x: Tensor) -> torch.memory_format | None:
    """Contiguous or channels_last, and dense; None for any other layout."""
    if x.is_contiguous():
        return torch.contiguous_format
    layout = _CHANNELS_LAST.get(x.ndim)
    return layout if layout is not None and x.is_contiguous(memory_format=layout) else None


def match_layout(tensor: Tensor, x: Tensor) -> Tensor:
    """``tensor`` in the type and memory layout of ``x``; itself where it has them already."""
    layout = memory_layout(x)
    assert layout is not None
    if tensor.dtype is x.dtype and tensor.is_contiguous(memory_format=layout):
        return tensor
    return tensor.to(x.dtype).contiguous(memory_format=layout)
