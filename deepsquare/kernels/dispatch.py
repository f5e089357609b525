"""The operations that have kernels: for each, its eager reference and the forward and backward that a backend runs.

An operation decorates its eager reference, which :mod:`deepsquare.functional` defines::

    @kernels.ReLUSquare
    def _relu_square(x): ...

A call then runs the kernels of the backend that :func:`backend_for` selects, or the reference. The kernels run in eager
mode on plain tensors. Whatever inspects or transforms operations (``torch.compile``, ``torch.export``, tracing,
``vmap`` and other function transforms, forward-mode AD, fake tensors, dispatch modes, tensor subclasses) gets the eager
reference instead, and so does a second derivative.

``DEEPSQUARE_KERNELS=0`` in the environment, or :func:`without_kernels`, turns the kernels off.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deepsquare.kernels import blockwise, cpu
from deepsquare.kernels.cpu import Kernel, match_layout

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

    Runs at every call: cheap checks first, and before them ``is_compiling``: a compiler cannot trace the others.
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


class Operation:
    """An operation on a map, its first input. Subclasses name the backend's functions."""

    forward: ClassVar[Callable[..., Tensor]]  # (backend, *inputs) → result
    backward: ClassVar[Callable[..., tuple[Tensor, ...]]]  # (backend, grad, *saved) → one gradient per input

    def __init__(self, eager: Callable[..., Tensor]) -> None:
        self.eager = eager

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The result, by the fastest backend that takes ``inputs``."""
        return self.run(self.backend_for(*inputs), *inputs)

    def run(self, backend: ModuleType | None, *inputs: Tensor) -> Tensor:
        """The result by ``backend``, with autograd where an input requires it; by the eager reference for None."""
        if backend is None:
            return self.eager(*inputs)
        if _requires_grad(*inputs):
            result: Tensor = _Fused.apply(self, backend, *inputs)  # type: ignore[no-untyped-call]
            return result
        return self.forward(backend, *inputs)

    def backend_for(self, *inputs: Tensor) -> ModuleType | None:
        """The backend for ``inputs``, the map first; None for the eager reference."""
        return backend_for(*inputs)

    def saved(self, result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the backward pass needs, the map first."""
        return inputs

    def eager_backward(self, needed: Sequence[bool], grad: Tensor, *saved: Tensor) -> Iterable[Tensor | None]:
        """The gradients by the eager reference, which can be differentiated again."""
        create_graph = torch.is_grad_enabled()
        differentiated = [tensor for tensor, need in zip(saved, needed, strict=True) if need]
        if not differentiated:
            return [None] * len(saved)
        with torch.enable_grad():
            grads = iter(torch.autograd.grad(self.eager(*saved), differentiated, grad, create_graph=create_graph))
        return [next(grads) if need else None for need in needed]


class MeanSquare(Operation):
    """Equation (20): (N, C, spatial…) to the mean of squares of each plane, (N, C), at least in float32."""

    @staticmethod
    def forward(backend: ModuleType, x: Tensor) -> Tensor:
        """G, the mean of F²."""
        pooled = _per_plane(x)
        backend.launch(Kernel.POOL, x, per_plane=pooled)
        return pooled

    @staticmethod
    def backward(backend: ModuleType, grad: Tensor, x: Tensor) -> tuple[Tensor]:
        """2/HW · F · ``grad``, rounded once to the type of F."""
        dx, factor = torch.empty_like(x), (grad * (2 / math.prod(x.shape[2:]))).contiguous()
        backend.launch(Kernel.POOL_BACKWARD, x, y=dx, factor=factor)
        return (dx,)

    def backend_for(self, *inputs: Tensor) -> ModuleType | None:
        """Also ``blockwise``, where no kernel takes the map and nothing compiles, traces or transforms it."""
        return backend_for(*inputs) or (blockwise if runs_eagerly(*inputs) else None)


class SquareExcitation(Operation):
    """F · s, with s = G / (G + α²) and G the mean of F²."""

    @staticmethod
    def forward(
        backend: ModuleType, x: Tensor, alpha: Tensor, residual: Tensor | None = None, *, inplace: bool = False
    ) -> Tensor:
        """F · s in the type of F, or max(0, F · s + residual); with ``inplace`` written over F."""
        y = x if inplace else torch.empty_like(x)
        if residual is None:
            backend.launch(Kernel.EXCITE, x, alpha=alpha, y=y)
        else:
            backend.launch(Kernel.EXCITE_ADD_RELU, x, alpha=alpha, residual=match_layout(residual, x), y=y)
        return y

    @staticmethod
    def backward(
        backend: ModuleType, grad: Tensor, x: Tensor, alpha: Tensor, result: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The gradients of F and α; with a residual, whose ``result`` tells where the ReLU is active, also its own."""
        dx, dalpha = torch.empty_like(x), _per_plane(x)
        kernel, maps = Kernel.EXCITE_BACKWARD, {"grad": match_layout(grad, x), "y": dx, "per_plane": dalpha}
        if result is not None:
            kernel = Kernel.EXCITE_ADD_RELU_BACKWARD
            maps |= {"result": match_layout(result, x), "dresidual": torch.empty_like(x)}
        backend.launch(kernel, x, alpha=alpha, **maps)
        grads = dx, dalpha.sum().to(alpha.dtype).reshape(alpha.shape)
        return grads if result is None else (*grads, maps["dresidual"])


class SquareExcitationAddReLU(SquareExcitation):
    """max(0, F · s + residual), the end of a residual block; built from the operation F · s."""

    def __init__(self, excitation: SquareExcitation) -> None:
        super().__init__(lambda x, alpha, residual: torch.relu(excitation.eager(x, alpha) + residual))
        self.excitation = excitation

    def __call__(self, *inputs: Tensor, inplace: bool = False) -> Tensor:
        """The result; ``inplace`` allows writing it over F, which happens only where no gradient needs F."""
        x, _, residual = inputs
        backend = self.backend_for(*inputs)
        if inplace and backend is not None and not _requires_grad(*inputs):
            same_storage = x.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr()
            if not same_storage or x.data_ptr() == residual.data_ptr():  # they do not overlap partly
                torch.autograd.graph.increment_version(x)  # a graph that has saved x raises, rather than use new values
                return self.forward(backend, *inputs, inplace=True)
        return self.run(backend, *inputs)

    def saved(self, result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return *inputs[:2], result

    def eager_backward(self, needed: Sequence[bool], grad: Tensor, *saved: Tensor) -> Iterable[Tensor | None]:
        """As in ``Operation``; the gradient of the residual is that of the sum."""
        *inputs, result = saved
        grad_masked = grad.masked_fill(result <= 0, 0)
        return *self.excitation.eager_backward(needed[:2], grad_masked, *inputs), grad_masked


class ReLUSquare(Operation):
    """Equation (19): max(0, t)², elementwise."""

    @staticmethod
    def forward(backend: ModuleType, x: Tensor) -> Tensor:
        """max(0, t)²."""
        y = torch.empty_like(x)
        backend.launch(Kernel.RELU_SQUARE, x, y=y)
        return y

    @staticmethod
    def backward(backend: ModuleType, grad: Tensor, x: Tensor) -> tuple[Tensor]:
        """2 · max(0, t) · ``grad``."""
        dx = torch.empty_like(x)
        backend.launch(Kernel.RELU_SQUARE_BACKWARD, x, grad=match_layout(grad, x), y=dx)
        return (dx,)


class _Fused(torch.autograd.Function):
    """An operation by a backend's kernels; the backward pass selects the backend anew."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, backend: ModuleType, *inputs: Tensor) -> Tensor:
        result = operation.forward(backend, *inputs)
        ctx.operation = operation
        ctx.save_for_backward(*operation.saved(result, *inputs))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operation, saved = ctx.operation, ctx.saved_tensors
        backend = None if torch.is_grad_enabled() else operation.backend_for(*saved, *grads)
        if backend is None:
            return None, None, *operation.eager_backward(ctx.needs_input_grad[2:], *grads, *saved)
        return None, None, *operation.backward(backend, *grads, *saved)


def _per_plane(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _requires_grad(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
