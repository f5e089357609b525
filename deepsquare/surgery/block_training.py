"""The end of a building block in training: batch normalization, excitation, addition and ReLU in two passes.

A map's statistics must be known before its values can be normalized, so the kernels read the convolution's result twice
and write the block's output. The normalized map is neither written nor kept: the backward pass computes it from the
convolution's result and the statistics.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import cpu


class _NotFiniteError(Exception):
    """A statistic of the batch is not finite in float32."""


def block_training(norm: Any, z: Tensor, shortcut: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor | None:
    """relu(excitation(norm(z)) + shortcut), and the running statistics of ``norm`` updated; no α: not excited.

    None where a statistic of the batch is not finite in float32; PyTorch adds up in double precision.
    """
    running, momentum = (None, None), 0.0
    tracks = norm.track_running_stats and norm.running_mean is not None
    counter = norm.num_batches_tracked if norm.track_running_stats else None
    if counter is not None:
        counter.add_(1)
    if tracks:
        running, momentum = (norm.running_mean, norm.running_var), norm.momentum or 0.0
        if norm.momentum is None and counter is not None:
            momentum = 1 / float(counter)
    tensors = z, cpu.match_layout(shortcut, z), norm.weight, norm.bias, alpha, beta
    try:
        y: Tensor = _BlockTraining.apply(norm.eps, running, momentum, *tensors)  # type: ignore[no-untyped-call]
    except _NotFiniteError:
        if counter is not None:
            counter.sub_(1)
        return None
    return y


class _BlockTraining(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, eps: float, running: Sequence[Tensor | None], momentum: float, z: Tensor, shortcut: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:  # fmt: skip
        y, moments = torch.empty_like(z), torch.zeros(cpu.moments_shape(z), dtype=torch.float64, device=z.device)
        statistics = torch.empty(2, moments.shape[2], dtype=torch.float32, device=z.device)
        # The kernel updates the running statistics and, as PyTorch's does, leaves their version: what else in the graph
        # is normalized by them can still be differentiated.
        if not cpu.block_training(
            z, y=y, moments=moments, per_channel=statistics, eps=eps, shortcut=shortcut, running_mean=running[0],
            running_var=running[1], momentum=momentum, **_named(parameters),
        ):  # fmt: skip
            raise _NotFiniteError
        ctx.eps = eps
        ctx.save_for_backward(z, y, moments, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, y, moments, *parameters = ctx.saved_tensors
        grad = grads[0]
        if torch.is_grad_enabled() or kernels.backend_for(z, y, grad) is not cpu:
            return None, None, None, *_eager_backward(ctx.needs_input_grad[3:], ctx.eps, grad, z, y, parameters)
        dz, dshortcut = torch.empty_like(z), torch.empty_like(z)
        per_channel = torch.empty(4, moments.shape[2], dtype=torch.float32, device=z.device)
        cpu.block_training(
            z, y=dz, moments=moments, per_channel=per_channel, eps=ctx.eps, grad=cpu.match_layout(grad, z),
            result=cpu.match_layout(y, z), dshortcut=dshortcut, **_named(parameters),
        )  # fmt: skip
        weight, bias, alpha, beta = parameters
        rows = per_channel[:, : z.shape[1]]
        return (
            None, None, None, dz, dshortcut,
            None if weight is None else rows[0].clone(), None if bias is None else rows[1].clone(),
            None if alpha is None else rows[2].sum().reshape(alpha.shape),
            None if beta is None else rows[3].sum().reshape(beta.shape),
        )  # fmt: skip


def _named(parameters: Iterable[Tensor | None]) -> dict[str, Any]:
    return dict(zip(("weight", "bias", "alpha", "beta"), parameters, strict=True))


def _eager_backward(
    needed: tuple[bool, ...], eps: float, grad: Tensor, z: Tensor, y: Tensor, parameters: Iterable[Tensor | None]
) -> Iterable[Tensor | None]:
    """The gradients by PyTorch's operations, which can be differentiated again; the shortcut's is that of the sum."""
    create_graph = torch.is_grad_enabled()
    grad = grad.masked_fill(y <= 0, 0)
    inputs = z, *parameters
    needed = needed[0], *needed[2:]
    with torch.enable_grad():  # views: one input may have been computed from another
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        weight, bias, alpha, beta = views[1:]
        x = F.batch_norm(views[0], None, None, weight, bias, True, 0.0, eps)  # type: ignore[arg-type]
        if alpha is not None:
            x = DF.square_excitation(x, alpha, beta)
        differentiated = [view for view, need in zip(views, needed, strict=True) if need and view is not None]
        found = iter(torch.autograd.grad(x, differentiated, grad, create_graph=create_graph) if differentiated else ())
    dz, *others = (next(found) if need else None for need in needed)
    return dz, grad, *others
