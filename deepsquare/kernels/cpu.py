"""The kernels of ``cpu.c``: found, given PyTorch's threads, and called.

Plain C built with the package, called through ctypes: a user needs neither torch's headers nor a C++ compiler of the
right version, as an extension against torch would, nor a compiler at run time, as generated code would, nor a second
runtime with threads of its own, as numba would. Where it was not built (no C compiler, another system) nothing is lost
but speed: :func:`supports` says no, and the callers go on with PyTorch's own operations.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_MAPS = ("x", "gradient", "residual", "result", "y", "residual_gradient")
_READ_ALIKE = ("gradient", "residual", "result")  # in the type and layout of x


class _Kind(IntEnum):
    POOL = 0
    SCALE = 1
    EXCITE = 2
    EXCITE_BACKWARD = 3
    EXCITE_ADD_RELU = 4
    EXCITE_ADD_RELU_BACKWARD = 5
    RELU_SQUARE = 6
    RELU_SQUARE_BACKWARD = 7


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_MAPS, "factor", "dalpha_partial")),
        ("alpha", ctypes.c_float),
        *((name, ctypes.c_long) for name in ("n", "c", "hw")),
        ("inverse", ctypes.c_double),
        *((name, ctypes.c_long) for name in ("nontemporal", "tasks", "parts", "pass_")),
        *((name, ctypes.c_void_p) for name in ("sums", "run")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot run."""
    found = importlib.util.find_spec("deepsquare.kernels._cpu")
    if found is None or found.origin is None:
        return None
    try:
        kernels = ctypes.CDLL(found.origin)
        # Looked up through torch's own library, a symbol is that of the OpenMP runtime it is linked with.
        of_torch = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        runtime = [ctypes.cast(getattr(of_torch, name), ctypes.c_void_p) for name in _OPENMP]
    except (AttributeError, OSError, StopIteration):
        return None
    kernels.deepsquare_use_threads(*runtime)
    kernels.deepsquare_run.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    kernels.deepsquare_run.restype = None
    return kernels if kernels.deepsquare_supported() else None


def supports(x: Tensor) -> bool:
    """Whether there is a kernel for this tensor: for its type and layout, a memory without gaps."""
    return x.dtype in _FORMATS and x.numel() > 0 and memory_layout(x) is not None and library() is not None


def mean_square(x: Tensor) -> Tensor:
    """Equation (20): a map (N, C, spatial…) to the mean of its squares, (N, C) in float32."""
    pooled = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    _run(_Kind.POOL, x, dalpha_partial=pooled)
    return pooled


def mean_square_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor]:
    """Its gradient: 2/HW · x · ``gradient``, rounded once to the type of ``x``."""
    factor = (gradient * (2 / math.prod(x.shape[2:]))).contiguous()
    return (_run(_Kind.SCALE, x, y=torch.empty_like(x), factor=factor),)


def square_excitation(x: Tensor, alpha: Tensor) -> Tensor:
    """Square-Excitation: F · s, with s = G / (G + α²) and G the mean of F²."""
    return _run(_Kind.EXCITE, x, y=torch.empty_like(x), alpha=alpha)


def square_excitation_backward(gradient: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of F and α."""
    dalpha_partial = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    y = _run(
        _Kind.EXCITE_BACKWARD, x, y=torch.empty_like(x), gradient=gradient, alpha=alpha, dalpha_partial=dalpha_partial
    )
    return y, dalpha_partial.sum().to(alpha.dtype).reshape(alpha.shape)


def square_excitation_add_relu(x: Tensor, alpha: Tensor, residual: Tensor, *, inplace: bool = False) -> Tensor:
    """max(0, F · s + residual): the end of a residual block, if wished in the place of F."""
    y = x if inplace else torch.empty_like(x)
    return _run(_Kind.EXCITE_ADD_RELU, x, y=y, residual=residual, alpha=alpha)


def square_excitation_add_relu_backward(
    gradient: Tensor, result: Tensor, x: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of F, α and the residual."""
    dalpha_partial, of_residual = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device), torch.empty_like(x)
    y = _run(
        _Kind.EXCITE_ADD_RELU_BACKWARD, x, y=torch.empty_like(x), gradient=gradient, result=result,
        residual_gradient=of_residual, alpha=alpha, dalpha_partial=dalpha_partial,
    )  # fmt: skip
    return y, dalpha_partial.sum().to(alpha.dtype).reshape(alpha.shape), of_residual


def relu_square(x: Tensor) -> Tensor:
    """Equation (19): max(0, t)², elementwise."""
    return _run(_Kind.RELU_SQUARE, x, y=torch.empty_like(x))


def relu_square_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor]:
    """Its gradient: 2 · max(0, t) · ``gradient``."""
    return (_run(_Kind.RELU_SQUARE_BACKWARD, x, y=torch.empty_like(x), gradient=gradient),)


def memory_layout(x: Tensor) -> torch.memory_format | None:
    """Contiguous or channels_last, without gaps; None for any other."""
    if x.is_contiguous():
        return torch.contiguous_format
    layout = _CHANNELS_LAST.get(x.ndim)
    return layout if layout is not None and x.is_contiguous(memory_format=layout) else None


def _run(kind: _Kind, x: Tensor, *, alpha: Tensor | None = None, **tensors: Tensor) -> Tensor:
    """Call the kernel; returns ``y``, or ``x`` where none is written."""
    layout, kernels = memory_layout(x), library()
    assert layout is not None
    assert kernels is not None
    n, c = (1, 1) if kind >= _Kind.RELU_SQUARE else x.shape[:2]
    job = _Job(x=x.data_ptr(), n=n, c=c, hw=x.numel() // (n * c), alpha=0.0 if alpha is None else alpha.item())
    for name, tensor in tensors.items():
        if name in _READ_ALIKE and not (tensor.dtype is x.dtype and tensor.is_contiguous(memory_format=layout)):
            tensors[name] = tensor = tensor.to(x.dtype).contiguous(memory_format=layout)
        setattr(job, name, tensor.data_ptr())
    channels_last = layout is not torch.contiguous_format
    kernels.deepsquare_run(ctypes.byref(job), kind, _FORMATS[x.dtype], channels_last, torch.get_num_threads())
    return tensors.get("y", x)
