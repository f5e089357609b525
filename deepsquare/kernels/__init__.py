"""The functions of :mod:`deepsquare.functional`, fused: one pass over a map where plain operations take several.

:func:`run` is the one place that chooses. The kernels serve eager mode on plain tensors. Whatever looks at operations
(``torch.compile``, ``torch.export``, ``vmap`` and the other transforms, forward-mode derivatives, fake tensors,
dispatch modes, subclasses) is shown the plain ones, and so is a second derivative.

``DEEPSQUARE_KERNELS=0`` in the environment, or :func:`without_kernels`, turns them off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deepsquare.kernels import cpu

__all__ = ["run", "run_add_relu", "serving", "without_kernels"]

_enabled = ContextVar("_enabled", default=os.environ.get("DEEPSQUARE_KERNELS") != "0")
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, every function runs as plain operations: to compare, or to look for the cause of a difference."""
    before = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(before)


def backend_for(*inputs: Tensor) -> ModuleType | None:
    """The module whose kernels take these inputs, the map first; None where plain operations serve."""
    return None if torch.compiler.is_compiling() else _kernels_for(*inputs)  # first: a compiler goes no further


def run(name: str, eager: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The function ``name`` of ``inputs``, the map first: by a kernel where one serves, else ``eager``."""
    kernels = backend_for(*inputs)
    if kernels is None:
        return eager(*inputs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        result: Tensor = _Fused.apply(kernels, name, eager, *inputs)  # type: ignore[no-untyped-call]
        return result
    return _forward(kernels, name, *inputs)


def run_add_relu(
    name: str, eager: Callable[..., Tensor], *inputs: Tensor, residual: Tensor, inplace: bool = False
) -> Tensor:
    """ReLU(function ``name`` of ``inputs`` + ``residual``), likewise; the kernel is called ``name`` + ``_add_relu``.

    ``inplace`` lets it take the place of the map, where no gradient needs that.
    """
    kernels = backend_for(*inputs, residual)
    if kernels is None:
        return torch.relu(eager(*inputs) + residual)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, residual)):
        result: Tensor = _FusedAddReLU.apply(kernels, name, eager, residual, *inputs)  # type: ignore[no-untyped-call]
        return result
    x = inputs[0]
    inplace = inplace and not _overlap_partly(x, residual)
    written: Tensor = getattr(kernels, name + "_add_relu")(*inputs, residual, inplace=inplace)
    if inplace:
        torch.autograd.graph.increment_version(x)  # a graph that has kept it is told
    return written


def _overlap_partly(x: Tensor, other: Tensor) -> bool:
    same = x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and x.data_ptr() != other.data_ptr()


def _kernels_for(*inputs: Tensor) -> ModuleType | None:
    """The module whose kernels can take these inputs, if nothing looks at what is computed.

    Asked at every call: what is cheap and often decides comes first.
    """
    if not _enabled.get() or forward_ad._current_level >= 0:
        return None
    x = inputs[0]
    on_cpu = x.is_cpu
    for tensor in inputs:
        if not _is_plain_tensor(tensor) or not (tensor.is_cpu if on_cpu else tensor.device == x.device):
            return None
    if (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    ):
        return None
    if on_cpu:
        return cpu if cpu.supports(x) else None
    if x.is_cuda:
        from deepsquare.kernels import gpu  # here, since it imports Triton

        return gpu if gpu.supports(x) else None
    return None


def _is_plain_tensor(tensor: Tensor) -> bool:
    """A tensor with memory of its own that holds what it says."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and torch._C._has_storage(tensor)  # a vmapped one has none
    )


class _Fused(torch.autograd.Function):
    """A kernel and the kernel of its gradient, keeping the inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, name: str, eager: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.kernels, ctx.name, ctx.eager = kernels, name, eager
        ctx.save_for_backward(*inputs)
        return _forward(kernels, name, *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        if torch.is_grad_enabled() or _kernels_for(*inputs, *gradients) is None:
            found = _eager_gradients(ctx.eager, inputs, needed, *gradients)
        else:
            found = getattr(ctx.kernels, ctx.name + "_backward")(*gradients, *inputs)
        return None, None, None, *found


class _FusedAddReLU(torch.autograd.Function):
    """The same with the addition and the ReLU; their gradient needs the result."""

    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, name: str, eager: Callable[..., Tensor], residual: Tensor, *inputs: Tensor
    ) -> Tensor:
        result: Tensor = getattr(kernels, name + "_add_relu")(*inputs, residual)
        ctx.kernels, ctx.name, ctx.eager = kernels, name, eager
        ctx.save_for_backward(result, *inputs)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled() or _kernels_for(*inputs, *gradients, result) is None:
            grad_masked = gradients[0].masked_fill(result <= 0, 0)
            found = _eager_gradients(ctx.eager, inputs, ctx.needs_input_grad[4:], grad_masked)
        else:
            backward = getattr(ctx.kernels, ctx.name + "_add_relu_backward")
            *found, grad_masked = backward(*gradients, result, *inputs)
        return None, None, None, grad_masked, *found


def _eager_gradients(
    eager: Callable[..., Tensor], inputs: Sequence[Tensor], needed: Sequence[bool], gradient: Tensor
) -> Iterator[Tensor | None]:
    """By plain operations, which can be differentiated again."""
    again = torch.is_grad_enabled()
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(eager(*inputs), wanted, gradient, create_graph=again) if wanted else ())
    return (next(found) if need else None for need in needed)


def _forward(kernels: ModuleType, name: str, *inputs: Tensor) -> Tensor:
    result: Tensor = getattr(kernels, name)(*inputs)
    return result
