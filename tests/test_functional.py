"""Each function against loops over floats, its derivatives against differences, its edges."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import blockwise

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# float64 and float32: some 20 roundings in a sum of up to 120 terms. Half types: the float32 error and then
# one rounding to nearest, of relative error eps/2.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.float16: 2**-11 + 3e-6,
    torch.bfloat16: 2**-8 + 3e-6,
}
SHAPES = [(2, 3, 7), (3, 2, 4, 5), (1, 4, 1, 1), (2, 3, 4, 3, 5)]
KERNEL = {shape: DF.gaussian_kernel(shape[2:], dtype=torch.float64) for shape in SHAPES}
# torch's own forward-mode AD still compiles a few formulas by TorchScript when first used
forward_ad = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Uniform in [-1.5, 1.5): powers up to the sixth stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, dtype=torch.float64, generator=generator) * 3 - 1.5).to(dtype)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same map in other orders of memory."""
    channels_last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    every_second = torch.stack([x, torch.full_like(x, 9)], -1).flatten(-2)[..., ::2]
    transposed = x.transpose(0, -1).contiguous().transpose(0, -1)
    made = {"contiguous": x, "channels_last": channels_last, "step": every_second, "transposed": transposed}
    assert all(torch.equal(x, other) for other in made.values())
    return made


def check(actual: Tensor, expected: reference.Array, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), torch.from_numpy(expected), rtol=tolerance, atol=tolerance)


def as_float64(x: Tensor) -> reference.Array:
    array: reference.Array = x.detach().double().numpy()
    return array


MAP_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[reference.Array], reference.Array]]] = {
    "square": (DF.square, reference.square),
    "relu_square": (DF.relu_square, reference.relu_square),
    "square_pooling": (DF.square_pooling, reference.square_pooling),
    **{
        f"moment{order}": (
            lambda x, order=order: DF.moment_pooling(x, order),  # type: ignore[misc]
            lambda x, order=order: reference.moment_pooling(x, order),  # type: ignore[misc]
        )
        for order in range(1, 7)
    },
    "gem3": (lambda x: DF.gem_pooling(x, 3.0), lambda x: reference.gem_pooling(x, 3.0)),
    "gem_tensor": (
        lambda x: DF.gem_pooling(x, torch.tensor([2.5]), eps=0.1),
        lambda x: reference.gem_pooling(x, 2.5, eps=0.1),
    ),
    "lp2": (
        lambda x: DF.lp_pooling(x, 2.0, KERNEL[tuple(x.shape)]),
        lambda x: reference.lp_pooling(x, 2.0, KERNEL[x.shape].numpy()),
    ),
    "lp3.5": (
        lambda x: DF.lp_pooling(x, 3.5, KERNEL[tuple(x.shape)]),
        lambda x: reference.lp_pooling(x, 3.5, KERNEL[x.shape].numpy()),
    ),
    "excitation": (
        lambda x: DF.square_excitation(x, torch.tensor(0.75)),
        lambda x: reference.square_excitation(x, 0.75),
    ),
}


@pytest.mark.parametrize("name", MAP_FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_in_every_layout(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    function, expected = MAP_FUNCTIONS[name]
    x = numbers(*shape, dtype=dtype)
    for layout in layouts(x).values():
        check(function(layout), expected(as_float64(x)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 6, 4, 3), (1, 6, 4, 3), (1, 1, 5, 9)], ids=str)
def test_square_pooling_in_small_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a large map without a compiled kernel."""
    monkeypatch.setattr(blockwise, "_BLOCK", 30)
    x = numbers(*shape, dtype=dtype)
    for layout in layouts(x).values():
        with kernels.without_kernels():
            check(DF.square_pooling(layout), reference.square_pooling(as_float64(x)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmin_values(dtype: torch.dtype) -> None:
    scales = [None, torch.tensor(1.7), torch.tensor([0.3]), torch.tensor([0.0, 0.5, 1.0, 2.0])]
    for x in (numbers(3, 4, dtype=dtype), numbers(3, 4, 1, 1, dtype=dtype)):
        for scale in scales:
            s = None if scale is None else as_float64(scale)
            check(DF.square_softmin(x, scale), reference.square_softmin(as_float64(x), s), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_proportion_values(dtype: torch.dtype) -> None:
    g = numbers(3, 4, dtype=dtype).abs()
    g[0, 0] = 0
    for alpha in (0.25, -2.0, 0.0):
        check(
            DF.scale_proportion(g, torch.tensor(alpha)),
            reference.scale_proportion(as_float64(g), alpha),
            dtype,
        )


@pytest.mark.parametrize("size", [(1,), (7,), (4, 6), (2, 3, 4)], ids=str)
def test_gaussian_kernel(size: tuple[int, ...]) -> None:
    check(
        DF.gaussian_kernel(size, 0.4, dtype=torch.float64),
        reference.gaussian_kernel(size, 0.4),
        torch.float64,
    )


LAYOUTS = st.sampled_from(["contiguous", "channels_last", "step", "transposed"])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    batch=st.integers(0, 3),
    channels=st.integers(1, 4),
    sides=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    layout=LAYOUTS,
    alpha=st.floats(-4, 4, width=32),
    seed=st.integers(0, 99),
)
def test_any_map(
    batch: int, channels: int, sides: list[int], dtype: torch.dtype, layout: str, alpha: float, seed: int
) -> None:
    x = layouts(numbers(batch, channels, *sides, dtype=dtype, seed=seed))[layout]
    check(DF.square_pooling(x), reference.square_pooling(as_float64(x)), dtype)
    check(DF.square_excitation(x, torch.tensor(alpha)), reference.square_excitation(as_float64(x), alpha), dtype)
    # Equation (21): the second moment is mean² + variance
    flat = x.double().flatten(2)
    mean = flat.mean(2, keepdim=True)
    variance = (flat - mean).square().mean(2)
    expected = mean[..., 0].square() + variance
    torch.testing.assert_close(DF.square_pooling(flat), expected, rtol=1e-12, atol=1e-14)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed).requires_grad_()


ALPHA = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
P = torch.tensor(2.7, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("side", [1, 2, 7, 8, 300])
def test_a_gaussian_kernel_of_any_width_sums_to_one(side: int, dtype: torch.dtype) -> None:
    """The narrowest have only the center, which of an even side is two positions; the widest are even."""
    center = torch.zeros(side, dtype=dtype)
    center[(side - 1) // 2 : side // 2 + 1] = 1
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    for sigma in (5e-324, 1e-300, 1e-40, 1e-9, 1e-5):
        narrow = DF.gaussian_kernel((side,), sigma, dtype=dtype)
        torch.testing.assert_close(narrow, center / center.sum(), rtol=0, atol=0)
    for sigma in (1e8, 1e40, 1.7e308, math.inf):
        wide = DF.gaussian_kernel((side,), sigma, dtype=dtype)
        torch.testing.assert_close(wide, torch.full((side,), 1 / side, dtype=dtype), rtol=tolerance, atol=0)
    for sigma in (0.25, 3.0):
        exact = torch.from_numpy(reference.gaussian_kernel((side,), sigma))
        kernel = DF.gaussian_kernel((side,), sigma, dtype=dtype)
        torch.testing.assert_close(kernel.double(), exact, rtol=tolerance, atol=tolerance)


UNEVEN = DF.gaussian_kernel((3, 2), dtype=torch.float64)
DERIVATIVES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "square": (DF.square, (leaf(2, 3),)),
    "relu_square": (DF.relu_square, (leaf(2, 3),)),
    "square_pooling": (DF.square_pooling, (leaf(2, 3, 3, 2),)),
    "square_pooling_keepdim": (lambda x: DF.square_pooling(x, True), (leaf(2, 3, 3, 2),)),
    "square_pooling_of_zero": (DF.square_pooling, (torch.zeros(1, 2, 3, 2).double().requires_grad_(),)),
    "moment3": (lambda x: DF.moment_pooling(x, 3), (leaf(2, 2, 3, 2),)),
    "gem": (lambda x, p: DF.gem_pooling(x.abs() + 0.1, p), (leaf(2, 2, 3, 2), P)),
    "lp": (lambda x: DF.lp_pooling(x, 3.0, UNEVEN), (leaf(2, 2, 3, 2),)),
    "softmin": (DF.square_softmin, (leaf(3, 4), leaf(4, seed=1))),
    "scale_proportion": (DF.scale_proportion, (leaf(2, 3).detach().abs().requires_grad_(), ALPHA)),
    "scale_proportion_of_zero": (DF.scale_proportion, (torch.zeros(2, 3).double().requires_grad_(), ALPHA)),
    "excitation": (DF.square_excitation, (leaf(2, 2, 3, 2), ALPHA)),
}


@forward_ad
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name: str) -> None:
    function, inputs = DERIVATIVES[name]
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


@forward_ad
def test_square_pooling_under_function_transforms() -> None:
    x, tangent = numbers(4, 2, 3, 5, 6), numbers(4, 2, 3, 5, 6, seed=1)

    def plain(t: Tensor) -> Tensor:
        return t.square().mean((-2, -1))

    vmap: Any = torch.func.vmap
    jvp: Any = torch.func.jvp
    for in_dim in (0, 1):
        torch.testing.assert_close(vmap(DF.square_pooling, in_dim)(x), plain(x.movedim(in_dim, 0)))
    nested = vmap(vmap(DF.square_pooling))(x.unsqueeze(2))
    torch.testing.assert_close(nested.squeeze(2), plain(x))
    value, derivative = jvp(DF.square_pooling, (x[0],), (tangent[0],))
    torch.testing.assert_close(value, plain(x[0]))
    torch.testing.assert_close(derivative, 2 * (x[0] * tangent[0]).mean((-2, -1)))
    per_sample = vmap(torch.func.grad(lambda t: DF.square_pooling(t).sum()))(x)
    torch.testing.assert_close(per_sample, 2 * x / 30)
    curvature = torch.func.hessian(lambda t: DF.square_pooling(t).sum())(x[0, :1, :1])
    torch.testing.assert_close(curvature.reshape(30, 30), torch.eye(30, dtype=torch.float64) / 15)


def same_with_gradients(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor], x: Tensor) -> None:
    results = []
    for function in (a, b):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        out.backward(numbers(*out.shape, seed=5))  # type: ignore[no-untyped-call]
        results.append((out, leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_degenerate_cases_are_known_operations() -> None:
    x = numbers(2, 3, 4, 5)
    positive, uniform = x.abs() + 0.1, torch.full((4, 5), 1 / 20, dtype=torch.float64)

    def average(t: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(t, 1).flatten(1)

    same_with_gradients(lambda t: DF.moment_pooling(t, 1), average, x)
    same_with_gradients(lambda t: DF.moment_pooling(t, 2), DF.square_pooling, x)
    same_with_gradients(DF.square_pooling, lambda t: average(t.square()), x)
    same_with_gradients(lambda t: DF.square_pooling(t, keepdim=True), lambda t: F.avg_pool2d(t**2, (4, 5)), x)
    same_with_gradients(lambda t: DF.gem_pooling(t, 1.0), average, positive)
    same_with_gradients(lambda t: DF.gem_pooling(t, 2.0), lambda t: DF.square_pooling(t).sqrt(), positive)
    same_with_gradients(lambda t: DF.lp_pooling(t, 1.0, uniform), average, positive)
    same_with_gradients(lambda t: DF.lp_pooling(t, 2.0, uniform), lambda t: DF.gem_pooling(t, 2.0), positive)
    same_with_gradients(DF.square_softmin, lambda t: -t.square(), x[:, :, 0, 0])
    same_with_gradients(lambda t: DF.relu_square(t), lambda t: t.clamp(min=0) ** 2, x)
    constant = torch.full((2, 3, 4, 5), -1.5, dtype=torch.float64)
    torch.testing.assert_close(DF.square_pooling(constant), torch.full((2, 3), 2.25).double(), rtol=1e-15, atol=0)
    torch.testing.assert_close(DF.lp_pooling(constant, 3.0, uniform), torch.full((2, 3), 1.5).double())


# the square of 1e-30 is 0 in float32, where half types are computed too
@pytest.mark.parametrize(("dtype", "alpha"), [(t, 0.0) for t in DTYPES] + [(t, 1e-30) for t in DTYPES[1:]])
def test_zero_alpha_is_exactly_the_identity(dtype: torch.dtype, alpha: float) -> None:
    x = numbers(2, 3, 4, 5, dtype=dtype)
    x[0, 0] = 0
    x.requires_grad_()
    weight = torch.tensor(alpha, requires_grad=True)
    y = DF.square_excitation(x, weight)
    upstream = numbers(2, 3, 4, 5, dtype=dtype, seed=1)
    y.backward(upstream)  # type: ignore[no-untyped-call]
    assert torch.equal(y, x)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)
    assert weight.grad is not None
    assert weight.grad.isfinite()


def test_scale_proportion_at_its_limits() -> None:
    tiny = torch.finfo(torch.float32).tiny
    g = torch.tensor([0.0, tiny / 4, tiny, 1.0, 3e38, math.inf], requires_grad=True)
    for value in (0.0, 1e-19, 1e-18, 1.0, 1e18):
        alpha = torch.tensor(value, requires_grad=True)
        s = DF.scale_proportion(g, alpha)
        assert s[-1] == 1
        assert bool(((s >= 0) & (s <= 1)).all())
        grads = torch.autograd.grad(s.sum(), (g, alpha))
        assert all(bool(grad.isfinite().all()) for grad in grads)
    assert DF.scale_proportion(torch.tensor(math.nan), torch.tensor(1.0)).isnan()  # never hidden
    assert DF.scale_proportion(torch.tensor(1.0), torch.tensor(math.nan)).isnan()


def test_gradients_at_dead_channels_are_finite() -> None:
    """A channel that ReLU has closed is zero everywhere: no pooling may answer NaN."""
    p = torch.tensor(9.0, requires_grad=True)  # eps^9 is 0 in float32
    kernel = DF.gaussian_kernel((4, 4))
    pools: list[Callable[[Tensor], Tensor]] = [
        lambda t: DF.gem_pooling(t, p),
        lambda t: DF.lp_pooling(t, 2.0, kernel) + 0 * p,
    ]
    for pool in pools:
        x = torch.zeros(1, 2, 4, 4, requires_grad=True)
        out = pool(x)
        torch.testing.assert_close(out, torch.zeros(1, 2), rtol=0, atol=1.01e-6)
        grads = torch.autograd.grad(out.sum(), (x, p))
        torch.testing.assert_close(grads, (torch.zeros(1, 2, 4, 4), torch.tensor(0.0)), rtol=0, atol=1e-6)
    large = torch.full((1, 1, 2, 2), 1e30)
    torch.testing.assert_close(DF.gem_pooling(large, 3.0), torch.full((1, 1), 1e30))
    torch.testing.assert_close(DF.lp_pooling(large, 3.0, DF.gaussian_kernel((2, 2))), torch.full((1, 1), 1e30))


def ulps_apart(a: Tensor, b: Tensor) -> int:
    """The number of float16 values from one to the other; the sign bit is folded so that -0 meets 0."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


@pytest.mark.parametrize("alpha", [1e-30, 1e-9, 1e-7, 1e-3, 1.0, 300.0, 1e5, 1e15, 1e30])
@pytest.mark.parametrize("largest", [65504.0, 300.0, 1.0, 1e-3, 6e-5, 6e-8])
def test_float16_excitation_over_the_whole_range(largest: float, alpha: float) -> None:
    """G reaches 4e9, far beyond float16, and 4e-15, far below it: neither may be rounded to it."""
    x = (numbers(2, 3, 4, 5) / 1.5 * largest).half()
    x[0, 0, 0, 0], x[0, 0, 0, 1], x[0, 0, 1, 0] = largest, -largest, 2**-24  # the extremes side by side
    x[1, 1] = 2**-24
    weight = torch.tensor(alpha)
    y = DF.square_excitation(x, weight)
    expected = reference.square_excitation(as_float64(x), float(weight))
    assert y.dtype == torch.float16
    assert ulps_apart(y, torch.from_numpy(expected.astype(np.float16))) <= 1


def test_half_gradients_follow_float64() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        grads: list[Any] = []
        for t in (torch.float64, dtype):
            x = numbers(2, 3, 4, 5, dtype=dtype).to(t).requires_grad_()
            alpha = torch.tensor(0.75, dtype=torch.float32, requires_grad=True)
            y = DF.square_excitation(x, alpha)
            upstream = numbers(2, 3, 4, 5, dtype=dtype, seed=1).to(t)
            grads.append([g.double() for g in torch.autograd.grad(y, (x, alpha), upstream)])
        # the gradient of x is a sum of two terms, each rounded to the half type, then rounded itself
        torch.testing.assert_close(grads[1], grads[0], rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def test_only_the_input_is_kept_and_results_may_be_changed_in_place() -> None:
    kept: list[Tensor] = []
    x = numbers(2, 3, 4, 5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = DF.square_pooling(x, keepdim=True)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()] * len(kept)
    assert kept
    F.relu_(y)
    DF.square_pooling(x).mul_(3).sum().add(y.sum()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, x.detach() * 4 * 2 / 20)


MAP, VECTOR = torch.ones(2, 3, 4, 5), torch.ones(2, 3)
ONE, EVEN = torch.tensor(1.0), torch.ones(4, 5) / 20
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, that its nested and CSR tensors are prototypes
    NESTED, CSR = torch.nested.nested_tensor([MAP[0], MAP[1]]), VECTOR.to_sparse_csr()
    JAGGED = torch.nested.nested_tensor([MAP[0, 0], MAP[0, 0, :2]], layout=torch.jagged)
MISTAKES: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "no_space": (lambda: DF.square_pooling(VECTOR), ValueError, r"shape \(2, 3\), expected \(N, C, spatial"),
    "no_space_excite": (lambda: DF.square_excitation(VECTOR, ONE), ValueError, "before the map is pooled"),
    "empty_space": (lambda: DF.square_pooling(MAP[..., :0]), ValueError, r"\(2, 3, 4, 0\).*too small"),
    "empty_gem": (lambda: DF.gem_pooling(MAP[:, :, :0], 2.0), ValueError, "too small"),
    "integer": (lambda: DF.square_pooling(MAP.int()), TypeError, r"torch.int32.*x.float\(\)"),
    "boolean": (lambda: DF.square(MAP.bool()), TypeError, "torch.bool"),
    "complex": (lambda: DF.moment_pooling(MAP.to(torch.complex64), 3), TypeError, "torch.complex64"),
    "sparse": (lambda: DF.square_pooling(MAP.to_sparse()), TypeError, r"is sparse_coo, expected a dense .*to_dense"),
    "mkldnn": (lambda: DF.square_excitation(MAP.to_mkldnn(), ONE), TypeError, "is mkldnn, expected a dense one"),
    "nested": (lambda: DF.square(NESTED), TypeError, "is nested, expected a dense"),
    "jagged": (lambda: DF.relu_square(JAGGED), TypeError, "is nested, expected a dense one: call this for each"),
    "sparse_logits": (lambda: DF.square_softmin(CSR), TypeError, "is sparse_csr"),
    "order_0": (lambda: DF.moment_pooling(MAP, 0), ValueError, "order is 0, expected a positive integer"),
    "order_2.5": (lambda: DF.moment_pooling(MAP, 2.5), ValueError, "order is 2.5"),  # type: ignore[arg-type]
    "gem_p": (lambda: DF.gem_pooling(MAP, 0.0), ValueError, "p is 0.0, expected a positive"),
    "gem_p_nan": (lambda: DF.gem_pooling(MAP, math.nan), ValueError, "p is nan"),
    "gem_p_many": (lambda: DF.gem_pooling(MAP, torch.ones(3)), ValueError, r"p has shape \(3,\)"),
    "gem_eps": (lambda: DF.gem_pooling(MAP, 2.0, eps=0.0), ValueError, "eps is 0.0"),
    "lp_p": (lambda: DF.lp_pooling(MAP, -2.0, EVEN), ValueError, "p is -2.0, expected .* at least 1"),
    "lp_kernel": (lambda: DF.lp_pooling(MAP, 2.0, EVEN.T), ValueError, r"\(5, 4\), expected .*\(4, 5\)"),
    "sigma": (lambda: DF.gaussian_kernel((4, 5), 0.0), ValueError, "sigma is 0.0, expected a positive"),
    "scale": (lambda: DF.square_softmin(VECTOR, torch.ones(2)), ValueError, "2 elements, expected 1 .* or 3"),
    "logits": (lambda: DF.square_softmin(VECTOR[0]), ValueError, r"shape \(3,\), expected \(N, K\)"),
    "alpha": (lambda: DF.scale_proportion(VECTOR, torch.ones(3)), ValueError, r"alpha has shape \(3,\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(name: str) -> None:
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        call()
