"""The end of a building block in one pass: the plain formula in float64, in every type, layout and shape."""

import math
from collections.abc import Sequence

import pytest
import torch
from test_kernels import DTYPES, LAYOUTS, TOLERANCE, made
from torch import Tensor

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")
EPS = (1e-5, 1e-3)
SHAPES = [(2, 3, 1, 2), (1, 5, 3, 3), (2, 58, 7, 7), (3, 16, 4, 4), (2, 33, 14, 15), (5, 17, 14, 14), (1, 2, 70, 90)]
SHAPES += [(1, 2100, 3, 3), (1, 70, 31, 47)]
KERNELS = [cpu.Kernel.BLOCK_ADD, cpu.Kernel.BLOCK_SHUFFLE]


def numbers(channels: int, seed: int) -> list[Tensor]:
    """Running mean and variance, weight (one of them 0) and bias."""
    values = [made((channels,), seed=seed + k) for k in range(4)]
    return [values[0], values[1].abs() + 0.1, values[2] * (torch.arange(channels) != 1), values[3]]


def ended(
    kernel: cpu.Kernel,
    z: Tensor,
    shortcut: Tensor,
    norms: Sequence[list[Tensor] | None] = (None, None),
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    relu: tuple[bool, bool] = (False, False),
    inplace: bool = False,
) -> Tensor:
    n, c, *sides = z.shape
    layout = cpu.memory_layout(z) or torch.contiguous_format
    shape = (n, 2 * c, *sides) if kernel is cpu.Kernel.BLOCK_SHUFFLE else z.shape
    y = z if inplace else torch.full(shape, math.nan, dtype=z.dtype).contiguous(memory_format=layout)
    addresses = [
        0 if norm is None else tensor.data_ptr() for norm in norms for tensor in (norm or [torch.empty(0)] * 4)
    ]
    scalars = [0 if tensor is None else tensor.data_ptr() for tensor in (alpha, beta)]
    cpu.block_end(kernel, z, shortcut, y, addresses, EPS, scalars, relu)
    return y


def batch_norm(x: Tensor, norm: list[Tensor]) -> Tensor:
    mean, variance, weight, bias = norm
    return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, eps=EPS[0])


def expected(
    kernel: cpu.Kernel,
    z: Tensor,
    shortcut: Tensor,
    norms: Sequence[list[Tensor] | None] = (None, None),
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    relu: tuple[bool, bool] = (False, False),
) -> Tensor:
    sides = []
    for x, norm, eps, positive in zip((z.double(), shortcut.double()), norms, EPS, relu, strict=True):
        if norm is not None:
            mean, variance, weight, bias = (tensor.double().reshape(-1, 1, 1) for tensor in norm)
            x = (x - mean) / (variance + eps).sqrt() * weight + bias
        sides.append(x.clamp(min=0) if positive else x)
    main, other = sides
    if alpha is not None:
        g = main.square().mean((2, 3), keepdim=True)
        s = torch.where(g + alpha.double() ** 2 == 0, 1, g / (g + alpha.double() ** 2))
        b = 1 if beta is None else beta.double()
        main = main * (1 - b + b * s)
    if kernel is cpu.Kernel.BLOCK_ADD:
        return (main + other).clamp(min=0)
    return torch.stack([other, main], 2).flatten(1, 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_formula(kernel: cpu.Kernel, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    z, shortcut = (made(shape, dtype, layout, seed=seed) for seed in (0, 1))
    alpha, beta = torch.tensor([0.7]), torch.tensor([0.4])
    both, none = (numbers(shape[1], 2), numbers(shape[1], 6)), (None, None)
    for norms, a, b, relu in (
        (both, alpha, None, (False, False)),
        (both, alpha, beta, (True, True)),
        ((both[0], None), None, None, (True, False)),
        (none, torch.zeros(1), None, (False, False)),
        (none, alpha, torch.zeros(1), (False, True)),
    ):
        found = ended(kernel, z, shortcut, norms, a, b, relu)
        reference = expected(kernel, z, shortcut, norms, a, b, relu)
        bound = TOLERANCE[dtype] * float(reference.abs().max())
        torch.testing.assert_close(found.double(), reference, rtol=TOLERANCE[dtype], atol=bound)
        if kernel is cpu.Kernel.BLOCK_ADD:
            place = z.clone()
            assert torch.equal(ended(kernel, place, shortcut, norms, a, b, relu, inplace=True), found)
            assert torch.equal(place, found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_mean_does_not_cancel(layout: str) -> None:
    z, shortcut = made((2, 3, 9, 11), layout=layout) * 1e-2 + 1000, torch.zeros(2, 3, 9, 11)
    norm = [torch.full((3,), 1000.0), torch.full((3,), 1e-4), torch.ones(3), torch.full((3,), 3.0)]
    alpha = torch.ones(1)
    exact = expected(cpu.Kernel.BLOCK_ADD, z, shortcut, (norm, None), alpha)
    found = ended(cpu.Kernel.BLOCK_ADD, z, shortcut, (norm, None), alpha)
    normalized = batch_norm(z, norm)
    excited = normalized * (g := normalized.square().mean((2, 3), keepdim=True)) / (g + 1)
    error = float((torch.relu(excited).double() - exact).abs().max())  # PyTorch's own: it computes a·z + b as well
    assert float((found.double() - exact).abs().max()) <= 2 * error + 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shortcuts_in_memory_with_gaps(kernel: cpu.Kernel, layout: str) -> None:
    z, wide = made((3, 6, 5, 7), layout=layout), made((3, 12, 5, 7), layout=layout, seed=1)
    other = made((3, 6, 5, 7), layout="contiguous" if layout == "channels_last" else "channels_last")
    for shortcut in (*wide.chunk(2, 1), wide[:, ::2], made((3, 6, 7, 5)).transpose(2, 3), other, z[:1].expand_as(z)):
        found = ended(kernel, z, shortcut, (numbers(6, 2), None), torch.ones(1))
        reference = expected(kernel, z, shortcut, (numbers(6, 2), None), torch.ones(1))
        torch.testing.assert_close(found.double(), reference, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_threads_gives_the_same_bits(kernel: cpu.Kernel, layout: str) -> None:
    z, shortcut = (made((1, 70, 31, 47), layout=layout, seed=seed) for seed in (0, 1))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ended(kernel, z, shortcut, (numbers(70, 2), None), torch.ones(1)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_propagate_as_in_plain_operations(kernel: cpu.Kernel, layout: str, value: float) -> None:
    norm = numbers(3, 2)
    for place in ("z", "shortcut", "alpha"):
        maps = {"z": made((2, 3, 3, 7), layout=layout), "shortcut": made((2, 3, 3, 7), layout=layout, seed=1)}
        alpha = torch.tensor([value if place == "alpha" else 0.5])
        if place != "alpha":
            maps[place][1, 2, 1, 3] = value
        found = ended(kernel, maps["z"], maps["shortcut"], (norm, None), alpha).double()
        sides = batch_norm(maps["z"], norm), maps["shortcut"]
        with kernels.without_kernels():
            excited = DF.square_excitation(sides[0], alpha)
        plain = torch.relu(excited + sides[1]) if kernel is cpu.Kernel.BLOCK_ADD else None
        plain = torch.stack([sides[1], excited], 2).flatten(1, 2) if plain is None else plain
        torch.testing.assert_close(found, plain.double(), equal_nan=True, rtol=1e-5, atol=1e-5)
