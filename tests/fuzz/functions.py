"""The functions with a random map: kernels and plain operations against float64, and against each other."""

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepsquare import functional as DF
from deepsquare import kernels

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "relu_square": lambda x, alpha, beta, residual: DF.relu_square(x),
    "square": lambda x, alpha, beta, residual: DF.square(x, beta),
    "square_pooling": lambda x, alpha, beta, residual: DF.square_pooling(x),
    "blended_pooling": lambda x, alpha, beta, residual: DF.square_pooling(x, True, beta),
    "excitation": lambda x, alpha, beta, residual: DF.square_excitation(x, alpha),
    "blended_excitation": lambda x, alpha, beta, residual: DF.square_excitation(x, alpha, beta),
    "block_end": lambda x, alpha, beta, residual: DF.square_excitation_add_relu(x, alpha, residual),
    "blended_block_end": lambda x, alpha, beta, residual: DF.square_excitation_add_relu(x, alpha, residual, beta),
    "gem_pooling": lambda x, alpha, beta, residual: DF.gem_pooling(x, 3),
    "square_softmin": lambda x, alpha, beta, residual: DF.square_softmin(x.flatten(1), alpha),
    "moment_pooling": lambda x, alpha, beta, residual: DF.moment_pooling(x, 3),
}
NAMES = ("value", "dx", "dα", "dβ", "dresidual")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIDES, CHANNELS = (1, 2, 3, 5, 7, 8, 13, 14, 33), (1, 2, 3, 8, 9, 17, 64)
ULPS = 16  # of the largest value: a gradient is a sum of a few rounded terms


def check_functions(data: bytes) -> None:
    """Raise AssertionError where a function, drawn with its input from ``data``, is wrong."""
    draw = random.Random(data)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    name, dtype = draw.choice(list(FUNCTIONS)), draw.choice(DTYPES)
    spatial = (draw.choice(SIDES) for _ in range(draw.choice((1, 2, 2, 2, 3))))
    shape, layout = (
        (draw.choice((1, 2, 3)), draw.choice(CHANNELS), *spatial),
        draw.choice(("", "channels_last", "strided")),
    )
    nonfinite = draw.random() < 0.3
    x, residual = (_map(shape, dtype, layout, generator, draw, nonfinite) for _ in range(2))
    alpha = torch.tensor([10 ** draw.uniform(-3, 1) * (draw.random() < 0.9)])
    given = (x, alpha, torch.tensor([draw.choice((0.0, 0.3, 1.0))]), residual)
    torch.set_num_threads(draw.choice((1, 2)))
    gradient = torch.randn(FUNCTIONS[name](*given).shape, generator=generator).to(dtype)
    fused = _results(name, given, gradient)
    with kernels.without_kernels():
        plain = _results(name, given, gradient)
    case = f"{name}, {tuple(shape)} {dtype}, strides {x.stride()}, α {float(alpha):.3g}, β {float(given[2])}"
    if nonfinite:
        _require_same_kinds(case, fused, plain)
    else:
        exact = _results(name, tuple(tensor.double() for tensor in given), gradient)
        scale = float(FUNCTIONS[name](*(tensor.double().abs() for tensor in given)).abs().max())  # nothing cancels
        _require_accurate(f"{case}, kernels", given, gradient, fused, exact, scale)
        _require_accurate(f"{case}, plain operations", given, gradient, plain, exact, scale)


def _map(
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: str,
    generator: torch.Generator,
    draw: random.Random,
    nonfinite: bool,
) -> Tensor:
    x = torch.randn(shape, generator=generator) * 10 ** draw.uniform(-1.5, 1.5) + draw.choice((0, 0, 1))
    if nonfinite:
        x[tuple(draw.randrange(side) for side in shape)] = draw.choice((math.nan, math.inf, -math.inf))
    x = x.to(dtype)
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return torch.stack([x, x], -1)[..., 0] if layout == "strided" else x


def _results(name: str, given: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
    """The value, and the gradients of what the function takes."""
    inputs = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in given]
    result = FUNCTIONS[name](*inputs)
    return [result.detach(), *torch.autograd.grad(result, inputs, gradient.to(result.dtype), allow_unused=True)]


def _require_same_kinds(case: str, fused: Sequence[Tensor | None], plain: Sequence[Tensor | None]) -> None:
    """The value is NaN, +inf and −inf at the same positions, the gradients are finite at the same positions."""
    for name, ours, other in zip(NAMES, fused, plain, strict=True):
        if ours is not None and other is not None:
            kinds = [_kinds(values) if name == "value" else values.isfinite() for values in (ours, other)]
            assert kinds[0].equal(kinds[1]), f"{case}: {name} is not finite elsewhere than in plain operations"


def _kinds(values: Tensor) -> Tensor:
    return torch.stack([values.isnan(), values.isposinf(), values.isneginf()])


def _require_accurate(
    case: str,
    given: Sequence[Tensor],
    gradient: Tensor,
    found: Sequence[Tensor | None],
    exact: Sequence[Tensor | None],
    scale: float,
) -> None:
    """Raise unless each result is as near to the exact one as its terms are precise; ``scale`` is that of the value."""
    x, alpha, *_ = given
    # A sum over the map may cancel: it is as accurate as its terms.
    terms = float((x.double().abs().max() + x.double().square().max()) * gradient.double().abs().sum()) * math.prod(
        x.shape[2:]
    )
    terms *= 1 + 1 / max(float(alpha), 1e-3)
    for name, ours, reference in zip(NAMES, found, exact, strict=True):
        if ours is None or reference is None or (name != "value" and _relu_decides_otherwise(found, exact)):
            continue
        summed, largest = name in ("dα", "dβ"), float(reference.abs().max())
        largest = max(largest, terms if summed else scale if name == "value" else 0)
        elementwise = case.startswith("square,")  # with β computed in the type of x, but for the kernels
        precision = torch.finfo(torch.float32 if summed and not elementwise else x.dtype).eps
        if largest > torch.finfo(x.dtype if elementwise else ours.dtype).max / 4:
            continue  # it may overflow
        if ours.dtype == torch.float16:
            largest = max(largest, 2**-14)  # below, numbers have fewer digits
        worst = float((ours.double() - reference).abs().max())
        assert worst <= ULPS * precision * largest, (
            f"{case}: {name} differs from float64 by {worst:.3g} of {largest:.3g}"
        )


def _relu_decides_otherwise(found: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> bool:
    """Whether a sum that is 0 after rounding was not before: the gradient of ReLU differs there."""
    value, reference = found[0], exact[0]
    return value is not None and reference is not None and not (value == 0).equal(reference == 0)
