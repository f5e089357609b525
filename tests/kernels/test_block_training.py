"""The end of a building block in training: the plain formula in float64, its gradients, and the running statistics."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_kernels import DTYPES, LAYOUTS, TOLERANCE, made
from torch import Tensor, nn

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import cpu
from deepsquare.surgery import block_training as module

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")
SHAPES: list[tuple[int, ...]] = [(2, 3, 1, 2), (1, 5, 3, 3), (2, 58, 7, 7), (3, 16, 4, 4), (2, 33, 14, 15)]
SHAPES += [(5, 17, 14, 14), (1, 2, 70, 90), (1, 2100, 3, 3), (1, 70, 31, 47), (4, 6, 3, 2, 5)]


@pytest.fixture(params=[1, 2], ids=["eight floats", "AVX-512"])
def vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """The vectors that the kernels use."""
    library = cpu.library()
    assert library is not None
    if library.deepsquare_select(request.param) < request.param:
        pytest.skip("this machine has no AVX-512")
    yield
    library.deepsquare_select(cpu.WIDEST_VECTORS)


def block_training(norm: nn.Module, z: Tensor, shortcut: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    y = module.block_training(norm, z, shortcut, alpha, beta)
    assert y is not None
    return y


def batch_norm(channels: int, **options: Any) -> Any:
    """Batch normalization with one weight of 0."""
    norm = nn.BatchNorm2d(channels, **options)
    if norm.affine:
        norm.weight.data = made((channels,), seed=5) * (torch.arange(channels) != 1)
        norm.bias.data = made((channels,), seed=6)
    norm._check_input_dim = lambda input: None  # type: ignore[method-assign]
    return norm


def plain(norm: nn.Module, z: Tensor, shortcut: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    """The formula, in the type of its inputs."""
    y = norm(z)
    if alpha is not None:
        g = y.square().flatten(2).mean(2).reshape(*y.shape[:2], *[1] * (y.ndim - 2))
        s = torch.where(g + alpha**2 == 0, 1, g / (g + alpha**2))
        y = y * (s if beta is None else 1 - beta + beta * s)
    return torch.relu(y + shortcut)


def results(run: Any, norm: Any, grad: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    """The output, the gradients of the inputs and of the normalization's parameters, and its buffers."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    y = run(norm, *leaves)
    y.backward(grad.to(y.dtype))
    found = [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]
    return [*found, *(p.grad for p in norm.parameters()), *norm.buffers()]


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_formula(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    z, shortcut, grad = (made(shape, dtype, layout, seed=seed) * (3 - seed) + (not seed) for seed in range(3))
    alpha, beta = torch.tensor(0.7), torch.tensor([0.4])
    for options, scalars in (
        ({}, (alpha, None)),
        ({"momentum": None}, (alpha, beta)),
        ({"affine": False, "eps": 0.1}, (torch.zeros(()), None)),
        ({"track_running_stats": False}, (None, None)),
        ({"momentum": 0.5}, (alpha, torch.zeros(()))),
    ):
        norm = batch_norm(shape[1], **options)
        found = results(block_training, copy.deepcopy(norm), grad, z, shortcut, *scalars)
        exact = [None if each is None else each.double() for each in (z, shortcut, *scalars)]
        expected = results(plain, copy.deepcopy(norm).double(), grad.double(), *exact)
        assert len(found) == len(expected)
        assert found[0].stride() == found[1].stride() == z.stride()
        for ours, reference in zip(found, expected, strict=True):
            tolerance = TOLERANCE[dtype] if ours.dtype is dtype else TOLERANCE[torch.float32]
            # A sum over planes of products that cancel, or a gradient from which one is subtracted.
            size = max(1.0, float(reference.abs().max())) * (30 if ours.dtype is not dtype or ours.ndim < 3 else 4)
            torch.testing.assert_close(ours.double(), reference.double(), rtol=tolerance, atol=tolerance * size)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_mean_does_not_cancel(layout: str) -> None:
    maps = [made((4, 3, 9, 11), layout=layout, seed=seed) for seed in range(3)]
    z, shortcut, grad = maps[0] * 1e-2 + 1000, maps[1], maps[2]
    norm, alpha = batch_norm(3), torch.ones(())
    expected = results(plain, copy.deepcopy(norm).double(), grad, z.double(), shortcut.double(), alpha.double(), None)
    found, usual = (
        results(run, copy.deepcopy(norm), grad, z, shortcut, alpha, None) for run in (block_training, plain)
    )
    for ours, torchs, exact in zip(found, usual, expected, strict=True):
        error, allowed = ((each.double() - exact).norm() for each in (ours, torchs))
        assert error <= 2 * allowed + 1e-5 * exact.double().norm()


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", [(28, 0), (28, 28), (17, 28), (0, 0)], ids=str)
def test_an_outlier_does_not_cancel(place: tuple[int, int], layout: str) -> None:
    maps = [made((4, 8, 56, 56), layout=layout, seed=seed) for seed in range(3)]
    z, shortcut, grad = maps
    z[:, :, place[0], place[1]] = 1000.0
    expected = results(plain, batch_norm(8).double(), grad, z.double(), shortcut.double(), None, None)
    found = results(block_training, batch_norm(8), grad, z, shortcut, None, None)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.double() - exact).norm() <= 2e-6 * exact.double().norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_whose_squares_overflow_are_left_to_pytorch(layout: str) -> None:
    z, norm = 1e30 * made((2, 3, 9, 9), layout=layout), batch_norm(3)
    assert module.block_training(norm, z, z, torch.ones(()), None) is None
    assert all(map(torch.equal, norm.buffers(), batch_norm(3).buffers()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_threads_gives_the_same_bits(layout: str) -> None:
    maps = [made((2, 70, 31, 47), layout=layout, seed=seed) for seed in range(3)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(block_training, batch_norm(70), maps[2], *maps[:2], torch.ones(()), torch.ones(())))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_propagate_as_in_plain_operations(layout: str, value: float) -> None:
    for place in ("z", "shortcut", "grad", "alpha"):
        names = ("z", "shortcut", "grad")
        maps = {name: made((2, 3, 3, 7), layout=layout, seed=seed) for seed, name in enumerate(names)}
        alpha = torch.tensor(value if place == "alpha" else 0.5)
        if place != "alpha":
            maps[place][1, 2, 1, 3] = value
        z, shortcut, grad = maps.values()
        if place == "z":  # its statistics are not finite: left to PyTorch, with the state as it was
            norm = batch_norm(3)
            assert module.block_training(norm, z, shortcut, alpha, None) is None
            assert all(map(torch.equal, norm.buffers(), batch_norm(3).buffers()))
            continue
        found = results(block_training, batch_norm(3), grad, z, shortcut, alpha, None)
        with kernels.without_kernels():
            expected = results(excited, batch_norm(3), grad, z, shortcut, alpha, None)
        torch.testing.assert_close(found[0], expected[0], equal_nan=True, rtol=1e-5, atol=1e-5)
        for ours, reference in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(ours.isfinite(), reference.isfinite()), place


def excited(norm: nn.Module, z: Tensor, shortcut: Tensor, alpha: Tensor, beta: Tensor | None) -> Tensor:
    return torch.relu(DF.square_excitation(norm(z), alpha, beta) + shortcut)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_can_be_differentiated_twice(layout: str) -> None:
    given = [made((2, 3, 3, 3), layout=layout, seed=seed).double().float() for seed in range(3)]

    def second(run: Any, dtype: torch.dtype) -> list[Tensor]:
        norm, (z, shortcut, grad) = batch_norm(3).to(dtype), (each.to(dtype) for each in given)
        leaves = [z.requires_grad_(), shortcut.requires_grad_(), torch.tensor(0.7, dtype=dtype, requires_grad=True)]
        inputs = [*leaves, *norm.parameters()]
        first = torch.autograd.grad(run(norm, *leaves, None), inputs, grad, create_graph=True)
        penalty = torch.stack([each.square().sum() for each in first]).sum()
        return list(torch.autograd.grad(penalty, inputs, allow_unused=True, materialize_grads=True))

    for ours, exact in zip(second(block_training, torch.float32), second(plain, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


def test_batches_of_gradients() -> None:
    norm, z, shortcut = batch_norm(3), made((2, 3, 3, 3)).requires_grad_(), made((2, 3, 3, 3), seed=1)
    y, grads = block_training(norm, z, shortcut, torch.ones(()), None), made((4, 2, 3, 3, 3), seed=2)
    (together,) = torch.autograd.grad(y, z, grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, z, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(together, torch.stack(one_by_one), rtol=1e-4, atol=1e-5)


def test_saves_two_maps_for_the_backward_pass() -> None:
    """Guards against a form that keeps more: PyTorch's saves the normalized map, and the excited one, as well."""
    norm, z, shortcut = batch_norm(8), made((4, 8, 20, 20)).requires_grad_(), made((4, 8, 20, 20), seed=1)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block_training(norm, z, shortcut, torch.ones(()), None)
    assert sorted(saved, reverse=True)[:2] == [z.numel()] * 2
    assert sum(saved) < 2.1 * z.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_allocates_its_results_only(layout: str) -> None:
    """Guards against a slower form: another pass over the map needs memory to write to."""
    norm, (z, shortcut, grad) = batch_norm(8), (made((4, 8, 60, 60), layout=layout, seed=seed) for seed in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        y = block_training(norm, z.requires_grad_(), shortcut.requires_grad_(), torch.ones(()), None)
        torch.autograd.backward(y, grad)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events() or ())
    maps = 1 + 2  # the output, and the gradients of z and of the shortcut
    assert allocated <= 1.05 * maps * z.numel() * z.element_size()
