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
from deepsquare.kernels.cpu import RUN, Kernel, match_layout

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


def backend_for(x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """The backend, ``cpu`` or ``gpu``, for the map ``x`` and other inputs; None for the eager reference."""
    if not runs_eagerly(x, *others) or not _enabled.get() or torch._C._len_torch_dispatch_stack() > 0:
        return None  # a dispatch mode, such as a FLOP counter, sees PyTorch's operations only
    if x.is_cpu:
        return cpu if cpu.supports(x) else None
    if x.is_cuda:
        from deepsquare.kernels import gpu  # imports Triton

        return gpu if gpu.supports(x) else None
    return None


def runs_eagerly(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the inputs are plain tensors of one device and nothing compiles, traces or transforms the operations.

    Runs at every call: cheap checks first, and before them ``is_compiling``: a compiler cannot trace the others.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    on_cpu = x.is_cpu
    for tensor in (x, *others):
        if tensor is None:
            continue
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
    """An operation on a map, its first input; others may be None. Subclasses name the backend's functions."""

    forward: ClassVar[Callable[..., Tensor]]  # (backend, *inputs) → result
    backward: ClassVar[Callable[..., tuple[Tensor | None, ...]]]  # (backend, grad, *saved) → one gradient per input

    def __init__(self, eager: Callable[..., Tensor]) -> None:
        self.eager = eager

    def __call__(self, x: Tensor, *others: Tensor | None) -> Tensor:
        """The result, by the fastest backend that takes the inputs."""
        return self.run(self.backend_for(x, *others), x, *others)

    def run(self, backend: ModuleType | None, *inputs: Tensor | None) -> Tensor:
        """The result by ``backend``, with autograd where an input requires it; by the eager reference for None."""
        if backend is None:
            return self.eager(*inputs)
        if _requires_grad(*inputs):
            result: Tensor = _Fused.apply(self, backend, *inputs)  # type: ignore[no-untyped-call]
            return result
        return self.forward(backend, *inputs)

    def backend_for(self, x: Tensor, *others: Tensor | None) -> ModuleType | None:
        """The backend for the map ``x`` and the other inputs; None for the eager reference."""
        return backend_for(x, *others)

    def saved(self, result: Tensor, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """What the backward pass needs, the map first."""
        return inputs

    def eager_backward(self, needed: Sequence[bool], grad: Tensor, *saved: Tensor | None) -> Iterable[Tensor | None]:
        """The gradients by the eager reference, which can be differentiated again."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():  # views: one input may have been computed from another
            views = [None if tensor is None else tensor.view_as(tensor) for tensor in saved]
            differentiated = [view for view, need in zip(views, needed, strict=True) if need and view is not None]
            if not differentiated:
                return [None] * len(saved)
            grads = iter(torch.autograd.grad(self.eager(*views), differentiated, grad, create_graph=create_graph))
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

    def backend_for(self, x: Tensor, *others: Tensor | None) -> ModuleType | None:
        """Also ``blockwise``, where no kernel takes the map and nothing compiles, traces or transforms it."""
        return backend_for(x, *others) or (blockwise if runs_eagerly(x, *others) else None)


class MeanAndMeanSquare(Operation):
    """(N, C, spatial…) to the mean and the mean of squares of each plane, (2, N, C), at least in float32."""

    @staticmethod
    def forward(backend: ModuleType, x: Tensor) -> Tensor:
        """The means of F and of F²."""
        pooled = _per_plane(x, 2)
        backend.launch(Kernel.POOL_BOTH, x, per_plane=pooled)
        return pooled

    @staticmethod
    def backward(backend: ModuleType, grad: Tensor, x: Tensor) -> tuple[Tensor]:
        """1/HW · ``grad[0]`` + 2/HW · F · ``grad[1]``, rounded once to the type of F."""
        positions = math.prod(x.shape[2:])
        dx, factor = torch.empty_like(x), torch.stack([grad[0] * (1 / positions), grad[1] * (2 / positions)])
        backend.launch(Kernel.POOL_BOTH_BACKWARD, x, y=dx, factor=factor)
        return (dx,)


class SquareExcitation(Operation):
    """F · (1 − β + β · s), with s = G / (G + α²) and G the mean of F²; None for β is 1."""

    @staticmethod
    def forward(
        backend: ModuleType,
        x: Tensor,
        alpha: Tensor,
        beta: Tensor | None,
        residual: Tensor | None = None,
        *,
        inplace: bool = False,
    ) -> Tensor:
        """The product in the type of F, or max(0, product + residual); with ``inplace`` written over F."""
        y = x if inplace else torch.empty_like(x)
        if residual is None:
            backend.launch(Kernel.EXCITE, x, alpha=alpha, beta=beta, y=y)
        else:
            maps = {"residual": match_layout(residual, x), "y": y}
            backend.launch(Kernel.EXCITE_ADD_RELU, x, alpha=alpha, beta=beta, **maps)
        return y

    @staticmethod
    def backward(
        backend: ModuleType,
        grad: Tensor,
        x: Tensor,
        alpha: Tensor,
        beta: Tensor | None,
        result: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of F, α, β and, with a ``result``, which tells where the ReLU is active, the residual."""
        dx, parts = torch.empty_like(x), _per_plane(x, 2)
        kernel, maps = Kernel.EXCITE_BACKWARD, {"grad": match_layout(grad, x), "y": dx, "per_plane": parts}
        if result is not None:
            kernel = Kernel.EXCITE_ADD_RELU_BACKWARD
            maps |= {"result": match_layout(result, x), "dresidual": torch.empty_like(x)}
        backend.launch(kernel, x, alpha=alpha, beta=beta, **maps)
        dalpha = parts[0].sum().to(alpha.dtype).reshape(alpha.shape)
        dbeta = None if beta is None else parts[1].sum().to(beta.dtype).reshape(beta.shape)
        return (dx, dalpha, dbeta) if result is None else (dx, dalpha, dbeta, maps["dresidual"])


class SquareExcitationAddReLU(SquareExcitation):
    """max(0, F · (1 − β + β · s) + residual), the end of a residual block; built from the operation without these."""

    def __init__(self, excitation: SquareExcitation) -> None:
        super().__init__(lambda x, alpha, beta, residual: torch.relu(excitation.eager(x, alpha, beta) + residual))
        self.excitation = excitation

    def __call__(self, x: Tensor, *others: Tensor | None, inplace: bool = False) -> Tensor:
        """The result; ``inplace`` allows writing it over F, which happens only where no gradient needs F."""
        alpha, beta, residual = others
        assert alpha is not None
        assert residual is not None
        backend = self.backend_for(x, *others)
        if inplace and backend is not None and not _requires_grad(x, *others):
            same_storage = x.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr()
            if not same_storage or x.data_ptr() == residual.data_ptr():  # they do not overlap partly
                torch.autograd.graph.increment_version(x)  # a graph that has saved x raises, rather than use new values
                return self.forward(backend, x, alpha, beta, residual, inplace=True)
        return self.run(backend, x, *others)

    def saved(self, result: Tensor, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return *inputs[:3], result

    def eager_backward(self, needed: Sequence[bool], grad: Tensor, *saved: Tensor | None) -> Iterable[Tensor | None]:
        """As in ``Operation``; the gradient of the residual is that of the sum."""
        *inputs, result = saved
        assert result is not None
        grad_masked = grad.masked_fill(result <= 0, 0)
        return *self.excitation.eager_backward(needed[:3], grad_masked, *inputs), grad_masked


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


class BlendedSquare(Operation):
    """t · (1 − β + β · t), elementwise."""

    @staticmethod
    def forward(backend: ModuleType, x: Tensor, beta: Tensor) -> Tensor:
        """The result in the type of t."""
        y = torch.empty_like(x)
        backend.launch(Kernel.BLEND_SQUARE, x, beta=beta, y=y)
        return y

    @staticmethod
    def backward(backend: ModuleType, grad: Tensor, x: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        """(1 − β + 2β · t) · ``grad``, and the sum of t · (t − 1) · ``grad``."""
        dx, parts = torch.empty_like(x), torch.empty(-(-x.numel() // RUN), dtype=torch.float32, device=x.device)
        backend.launch(Kernel.BLEND_SQUARE_BACKWARD, x, beta=beta, grad=match_layout(grad, x), y=dx, per_plane=parts)
        return dx, parts.sum().to(beta.dtype).reshape(beta.shape)


class _Fused(torch.autograd.Function):
    """An operation by a backend's kernels; the backward pass selects the backend anew."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, backend: ModuleType, *inputs: Tensor | None) -> Tensor:
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


def _per_plane(x: Tensor, *rows: int) -> Tensor:
    return torch.empty(*rows, *x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _requires_grad(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
