"""The cost of a model: parameters, multiply-accumulates, activation memory, counted on the meta device."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from deepsquare.models import create_model
from deepsquare.surgery import unwrap
from deepsquare.surgery.inputs import example_shape, explain_shape, float_tensor
from deepsquare.surgery.trace import BatchNormShapes, copy_around

aten = torch.ops.aten

# torch's counter has convolutions and matrix products; DeepSquare adds elementwise products and eigendecompositions.
ELEMENTWISE: dict[Any, Any] = {
    aten.mul: lambda *args, out_val, **kwargs: out_val.numel(),
    aten.pow: lambda *args, out_val, **kwargs: out_val.numel(),
    aten.linalg_vector_norm: lambda x, *args, **kwargs: x.numel(),
}
# 9n³ for the symmetric QR algorithm (Golub and Van Loan, Matrix Computations).
COUNTS = {**ELEMENTWISE, aten._linalg_eigh: lambda matrix, *args, **kwargs: 9 * matrix.numel() * matrix.shape[-1]}
for _count in COUNTS.values():
    _count._get_raw = True  # torch's counter then passes tensors instead of shapes


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass on one image.

    Multiply-accumulates are torch's own count, halved: those of convolutions, fully connected layers and other matrix
    products, and of eigendecompositions.
    """

    parameters: int  # number of learnable values
    macs: int  # multiply-accumulates
    elementwise_muls: int  # elementwise multiplications: squares, rescalings, gates
    activation_bytes: int  # memory that a training step saves in the forward pass for the backward pass

    def added_to(self, base: Self) -> dict[str, int]:
        """The difference to ``base``, field by field."""
        return {key: value - getattr(base, key) for key, value in asdict(self).items()}


def cost(model: nn.Module, input_shape: Sequence[int] | None = None) -> Cost:
    """Count parameters, multiply-accumulates and activation memory per image.

    Args:
        model: any classifier that takes one tensor.
        input_shape: shape of one input without the batch; guessed when not given.
    """
    shape = example_shape(unwrap(model), input_shape)
    on_meta = copy_around(unwrap(model), _to_meta).train()
    # The difference of two batch sizes is one image: what depends on parameters only cancels out.
    fewer, more = (_count_batch(on_meta, (batch, *shape)) for batch in (2, 3))
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(**{**more.added_to(fewer), "parameters": parameters})


@cache
def cost_of(name: str, spec: str) -> Cost:
    """The cost of a model by name, built without its weights."""
    with torch.device("meta"):
        return cost(create_model(name, spec))


def _count_batch(model: nn.Module, shape: tuple[int, ...]) -> Cost:
    """One forward pass over a whole batch, on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton, which takes a while

    owned = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    batch = torch.empty(shape, device="meta", dtype=float_tensor(model).dtype)
    counter = FlopCounterMode(display=False, custom_mapping=COUNTS)
    saving = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    shapes: Any = BatchNormShapes()  # type: ignore[no-untyped-call]
    with explain_shape(model, shape), torch.device("meta"), counter, shapes, saving:
        output = model(batch)
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
