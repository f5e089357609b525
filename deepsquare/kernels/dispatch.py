"""Which backend runs an operation.

The kernels run in eager mode on plain tensors. Whatever inspects or transforms operations (``torch.compile``,
``torch.export``, tracing, ``vmap`` and other function transforms, forward-mode AD, fake tensors, dispatch modes, tensor
subclasses) gets the eager reference instead, and so does a second derivative.

``DEEPSQUARE_KERNELS=0`` in the environment, or :func:`without_kernels`, turns the kernels off.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deepsquare.kernels import cpu

_enabled = ContextVar("_enabled", default=os.environ.get("DEEPSQUARE_KERNELS") != "0")
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Run the eager references inside this context, to compare with the kernels or to debug a difference."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def backend_for(*inputs: Tensor) -> ModuleType | None:
    """The backend, ``cpu`` or ``gpu``, for ``inputs``, the map first; None for the eager reference."""
    if not runs_eagerly(*inputs) or not _enabled.get() or torch._C._len_torch_dispatch_stack() > 0:
        return None  # a dispatch mode, such as a FLOP counter, sees PyTorch's operations only
    x = inputs[0]
    if x.is_cpu:
        return cpu if cpu.supports(x) else None
    if x.is_cuda:
        from deepsquare.kernels import gpu  # imports Triton

        return gpu if gpu.supports(x) else None
    return None


def runs_eagerly(*inputs: Tensor) -> bool:
    """Whether ``inputs`` are plain tensors of one device and nothing compiles, traces or transforms the operations.

    Runs at every call: cheap checks come first. ``is_compiling`` leads, since a compiler cannot trace the others.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    x = inputs[0]
    on_cpu = x.is_cpu
    for tensor in inputs:
        if not _is_plain_tensor(tensor) or not (tensor.is_cpu if on_cpu else tensor.device == x.device):
            return False
    return not torch._C._are_functorch_transforms_active() and torch._C._get_tracing_state() is None


def _is_plain_tensor(tensor: Tensor) -> bool:
    """A strided tensor, not a subclass, whose storage holds its values."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and torch._C._has_storage(tensor)  # a vmapped tensor has none
    )
