"""The cost of a model: parameters, multiply-accumulates, activation memory, counted on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _output_size(*args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return out_val.numel()


def _input_size(x: Tensor, *args: Any, **kwargs: Any) -> int:
    return x.numel()


# torch's counter has convolutions and matrix products; DeepSquare adds elementwise products.
ELEMENTWISE: dict[Any, Any] = {aten.mul: _output_size, aten.pow: _output_size, aten.linalg_vector_norm: _input_size}


def _eigh_flops(matrix: Tensor, *args: Any, **kwargs: Any) -> int:
    return 9 * matrix.numel() * matrix.shape[-1]  # Golub and Van Loan, Matrix Computations: 9n³ for the symmetric QR


OTHERS: dict[Any, Any] = {aten._linalg_eigh: _eigh_flops}
for _count in (*ELEMENTWISE.values(), *OTHERS.values()):
    _count._get_raw = True  # torch's counter then passes tensors instead of shapes


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass on one image.

    Attributes:
        parameters: number of learnable values.
        macs: multiply-accumulates of convolutions, fully connected layers and other matrix products (torch's own
            count, halved), and of eigendecompositions.
        elementwise_muls: elementwise multiplications: squares, rescalings, gates.
        activation_bytes: memory that a training step saves in the forward pass for the backward pass.
    """

    parameters: int
    macs: int
    elementwise_muls: int
    activation_bytes: int

    def added_to(self, base: Cost) -> dict[str, int]:
        """The difference to ``base``, field by field."""
        return {key: value - getattr(base, key) for key, value in asdict(self).items()}


def cost(model: nn.Module, input_shape: Sequence[int] | None = None) -> Cost:
    """Count parameters, multiply-accumulates and activation memory per image.

    Args:
        model: any classifier that takes one tensor.
        input_shape: shape of one input without the batch; guessed when not given.
    """
    from deepsquare.surgery.trace import copy_around, example_shape

    shape = tuple(input_shape) if input_shape is not None else example_shape(model)
    on_meta = copy_around(model, _to_meta).train()
    # The difference of two batch sizes is one image: what depends on parameters only cancels out.
    fewer, more = (_count_batch(on_meta, (batch, *shape)) for batch in (2, 3))
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(**{**more.added_to(fewer), "parameters": parameters})


@cache
def cost_of(name: str, spec: str) -> Cost:
    """The cost of a model by name, built without its weights."""
    from deepsquare.models import create_model

    with torch.device("meta"):
        return cost(create_model(name, spec))


class _BatchNormShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Batch normalization by its shapes alone: on the meta device torch decomposes it in Python, which is slow."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
            x = args[0]
            return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        return func(*args, **(kwargs or {}))


def _count_batch(model: nn.Module, shape: tuple[int, ...]) -> Cost:
    """One forward pass over a whole batch, on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    owned = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    anchor = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    counter = FlopCounterMode(display=False, custom_mapping=ELEMENTWISE | OTHERS)
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with torch.device("meta"), counter, _BatchNormShapes(), hooks:  # type: ignore[no-untyped-call]
            output = model(torch.empty(shape, dtype=anchor.dtype))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} could not be run on an input of shape {shape}: {str(error).rstrip('.')}. "
            "Give the shape of one input without the batch as input_shape=(channels, height, width)"
        ) from error
    del output  # it kept the graph alive, and with it the storages
    counts = counter.get_flop_counts().get("Global", {})  # empty if nothing multiplies
    elementwise_muls = sum(n for op, n in counts.items() if op in ELEMENTWISE)
    macs = sum(n for op, n in counts.items() if op not in ELEMENTWISE) // 2
    return Cost(0, macs, elementwise_muls, sum(saved.values()))


def _to_meta(tensor: Tensor) -> Tensor:
    """The tensor on the meta device; a parameter stays a parameter."""
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def format_count(number: int) -> str:
    """Four digits and a unit; small numbers in full."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,}"
