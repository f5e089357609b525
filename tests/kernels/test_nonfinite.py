"""NaN and infinity, in kernels and plain operations alike; and the digits of small gradients.

The result is NaN, +inf and −inf at the same positions, the gradients are finite at the same positions: where an input
has such a value. What overflows on the way from finite values may do so in one of them only, as each rounds elsewhere.
"""

import contextlib
import math
from collections.abc import Sequence

import pytest
import torch
from test_kernels import DTYPES, FUNCTIONS, LAYOUTS, functions, made, results
from torch import Tensor

from deepsquare import functional as DF
from deepsquare import kernels

NONFINITE = (math.nan, math.inf, -math.inf)


def kinds(values: Tensor) -> list[str]:
    return [str(value) if not math.isfinite(value) else "finite" for value in values.flatten().tolist()]


def compare(name: str, given: Sequence[Tensor], gradient: Tensor) -> None:
    inputs = [tensor.detach().requires_grad_() for tensor in given]
    found = results(name, tuple(inputs), gradient)
    with kernels.without_kernels():
        expected = results(name, tuple(inputs), gradient)
    assert kinds(found[0]) == kinds(expected[0])
    for ours, plain in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(ours.isfinite(), plain.isfinite())


@functions
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite_values_propagate_as_in_plain_operations(name: str, dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator().manual_seed(len(name))

    def drawn(values: Sequence[float]) -> float:
        return values[int(torch.randint(len(values), (), generator=generator))]

    for case in range(60):
        shape = (2, 3, int(drawn((1, 2, 5))), int(drawn((1, 3, 7))))
        maps = [made(shape, dtype, layout, seed=3 * case + number) for number in range(3)]
        for tensor, chance in zip(maps, (0.8, 0.3, 0.3), strict=True):
            if torch.rand((), generator=generator) < chance:
                place = tuple(int(torch.randint(side, (), generator=generator)) for side in shape)
                tensor[place] = drawn(NONFINITE)
        x, residual, gradient = maps
        alpha = torch.tensor([drawn((1.0, 0.5, 0.0, 1e-3, math.nan, math.inf))])
        y = FUNCTIONS[name](x, alpha, residual)
        compare(
            name, (x, alpha, residual), gradient.to(y.dtype) if y.shape == shape else gradient[:, :, 0, 0].to(y.dtype)
        )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, math.nan])
def test_an_overflowed_square_hides_no_beta(beta: float) -> None:
    x = torch.tensor([3e38, 1.0, 2.0, 4.0]).reshape(1, 1, 2, 2)  # G = inf, so s is 1 whatever α and β are
    for context in (contextlib.nullcontext(), kernels.without_kernels()):
        with context:
            excited = DF.square_excitation(x, torch.ones(1), torch.tensor([beta]))
        assert kinds(excited) == (["nan"] * 4 if math.isnan(beta) else ["finite"] * 4)


@pytest.mark.parametrize("plain", [False, True])
def test_small_gradients_keep_their_digits(plain: bool) -> None:
    """Where only one position has a gradient, that of all others is the slope of s alone: α²/(G + α²)², times x."""
    for factor in (1e-3, 1e-2, 1.0, 30.0):
        x, alpha = made((1, 2, 7, 7)).requires_grad_(), torch.tensor([factor], requires_grad=True)
        gradient = torch.zeros_like(x)
        gradient[..., 0, 0] = 1
        with kernels.without_kernels() if plain else contextlib.nullcontext():
            found = torch.autograd.grad(DF.square_excitation(x, alpha), (x, alpha), gradient)
        wide, root = x.detach().double(), alpha.detach().double()
        g, product = wide.square().mean((2, 3), keepdim=True), wide[..., :1, :1]
        slope = root**2 / (g + root**2) ** 2
        expected = gradient.double() * g / (g + root**2) + 2 / 49 * product * slope * wide
        torch.testing.assert_close(found[0].double(), expected, rtol=2e-6, atol=0)
        parts = -2 * root * product * g / (g + root**2) ** 2
        bound = 2e-6 * float(parts.abs().sum())
        torch.testing.assert_close(found[1].double(), parts.sum().reshape(1), rtol=0, atol=bound)
