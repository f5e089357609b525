"""The baselines: each against its authors' definition, written again in NumPy and float64; gradients; precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import deepsquare as ds
from deepsquare import baselines
from deepsquare.baselines import fisher, second_order
from deepsquare.surgery.techniques import parse_spec

Array: TypeAlias = npt.NDArray[np.float64]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def covariances(x: Array) -> Array:
    """np.cov of every map, with 1/N."""
    return np.stack([np.cov(one.reshape(len(one), -1), bias=True) for one in x])


def randomise(module: nn.Module) -> nn.Module:
    """Parameters and statistics unlike those at the start, in float64 and evaluation mode."""
    module.double().eval()
    with torch.no_grad():
        for index, (name, value) in enumerate((*module.named_parameters(), *module.named_buffers())):
            if value.is_floating_point() and name != "sign":
                value.copy_(
                    normal(*value.shape, seed=index + 1).abs() if "var" in name else normal(*value.shape, seed=index)
                )
    return module


def norm(x: Array, layer: Any) -> Array:
    """Batch normalisation in evaluation mode; the channels are the second dimension."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, variance, weight, bias = (
        value.detach().numpy().reshape(shape)
        for value in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    )
    out: Array = (x - mean) / np.sqrt(variance + layer.eps) * weight + bias
    return out


def mix(x: Array, layer: Any) -> Array:
    """A 1×1 convolution."""
    weight = layer.weight.detach().numpy()[:, :, 0, 0]
    out: Array = np.einsum("oc,nchw->nohw", weight, x)
    return out if layer.bias is None else out + layer.bias.detach().numpy()[None, :, None, None]


def test_squeeze_and_excitation() -> None:
    x = normal(2, 32, 5, 6)
    module: Any = randomise(parse_spec("se(reduction=8)")[0].build(ds.sites(ds.vanilla_cnn()).of_kind("pooling")[0]))
    assert module.fc1.out_channels == 128 // 8
    module = randomise(type(module)(32, 4))
    pooled = x.numpy().mean((2, 3), keepdims=True)
    gate = sigmoid(mix(np.maximum(mix(pooled, module.fc1), 0), module.fc2))
    np.testing.assert_allclose(module(x).detach().numpy(), x.numpy() * gate, rtol=1e-12)


def test_gather_excite_without_parameters() -> None:
    x = normal(2, 3, 6, 7)
    module = baselines.GatherExcite(3)
    assert not list(module.parameters())
    pooled = x.numpy().mean((2, 3), keepdims=True)
    np.testing.assert_allclose(module(x).numpy(), x.numpy() * sigmoid(pooled), rtol=1e-12)


@pytest.mark.parametrize("extent", [2, 4, 8])
def test_gather_excite_means_of_a_neighbourhood(extent: int) -> None:
    x = normal(1, 2, 9, 13)
    values = x.numpy()
    expected = np.empty_like(values)
    for i in range(9):
        for j in range(13):
            # nearest upsampling to the positions u of the coarse grid, each the mean within 2e − 1 around e·u
            coarse = [-(-9 // extent), -(-13 // extent)]
            u, v = i * coarse[0] // 9, j * coarse[1] // 13
            rows = slice(max(0, u * extent - extent + 1), u * extent + extent)
            columns = slice(max(0, v * extent - extent + 1), v * extent + extent)
            expected[:, :, i, j] = values[:, :, i, j] * sigmoid(values[:, :, rows, columns].mean((2, 3)))
    np.testing.assert_allclose(baselines.GatherExcite(2, extent=extent)(x).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("reduction", [0, 2])
def test_gather_excite_over_the_whole_map(reduction: int) -> None:
    x = normal(2, 4, 3, 5)
    module: Any = randomise(baselines.GatherExcite(4, (3, 5), learned=True, reduction=reduction))
    weights = module.gather[0].weight.detach().numpy()[:, 0]
    gathered = norm(np.einsum("nchw,chw->nc", x.numpy(), weights)[:, :, None, None], module.gather[1])
    if reduction:
        hidden = np.maximum(mix(np.maximum(gathered, 0), module.mix[1]), 0)
        gathered = mix(hidden, module.mix[3])
    np.testing.assert_allclose(module(x).detach().numpy(), x.numpy() * sigmoid(gathered), rtol=1e-10)
    with pytest.raises(ValueError, match=r"the map is 4×5, but this GE-θ has one weight for each position of 3×5"):
        module(normal(2, 4, 4, 5))


def halved(x: Array, layer: Any) -> Array:
    """A depthwise 3×3 convolution of stride 2 with a border of one zero."""
    weight = layer.weight.detach().numpy()[:, 0]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows, columns = -(-x.shape[2] // 2), -(-x.shape[3] // 2)
    out = np.empty((*x.shape[:2], rows, columns))
    for i in range(rows):
        for j in range(columns):
            out[:, :, i, j] = (padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] * weight).sum((2, 3))
    return out


@pytest.mark.parametrize(("extent", "layers"), [(2, 1), (4, 2), (8, 3)])
def test_gather_excite_by_strided_convolutions(extent: int, layers: int) -> None:
    x = normal(2, 4, 11, 16)
    module: Any = randomise(baselines.GatherExcite(4, extent=extent, learned=True))
    assert [type(layer).__name__ for layer in module.gather] == (["Conv2d", "BatchNorm2d", "ReLU"] * layers)[:-1]
    gathered = x.numpy()
    for layer in range(layers):
        gathered = np.maximum(gathered, 0) if layer else gathered
        gathered = norm(halved(gathered, module.gather[3 * layer]), module.gather[3 * layer + 1])
    rows = np.arange(11) * gathered.shape[2] // 11  # nearest upsampling
    columns = np.arange(16) * gathered.shape[3] // 16
    gate = sigmoid(gathered[:, :, rows][:, :, :, columns])
    np.testing.assert_allclose(module(x).detach().numpy(), x.numpy() * gate, rtol=1e-9)


def test_gsop_block() -> None:
    x = normal(2, 6, 5, 4)
    module: Any = randomise(baselines.GSoP(6, 3))
    reduced = np.maximum(norm(mix(np.maximum(x.numpy(), 0), module.reduce[1]), module.reduce[2]), 0)
    rows = norm(covariances(reduced)[..., None], module.norm)[..., 0]
    weight, bias = module.rows.weight.detach().numpy()[:, 0, :, 0], module.rows.bias.detach().numpy()
    hidden = np.stack([(rows * weight[i::4][None]).sum(-1) for i in range(4)], -1).reshape(2, 12) + bias
    gate = sigmoid(mix(hidden[..., None, None], module.expand))
    np.testing.assert_allclose(module(x).detach().numpy(), x.numpy() * gate, rtol=1e-9)


def test_covariance() -> None:
    x = normal(2, 4, 3, 5)
    np.testing.assert_allclose(second_order.covariance(x).numpy(), covariances(x.numpy()), rtol=1e-12)


@pytest.mark.parametrize("positions", [50, 3], ids=["full rank", "rank-deficient"])
@pytest.mark.parametrize("iterations", [0, 25], ids=["eigenvalues", "Newton–Schulz"])
def test_both_square_roots_by_singular_values(positions: int, iterations: int) -> None:
    matrix = second_order.covariance(normal(2, 6, positions))
    root = (
        second_order.root_by_newton_schulz(matrix, iterations)
        if iterations
        else second_order.root_by_eigenvalues(matrix)
    )
    u, values, _ = np.linalg.svd(matrix.numpy())
    expected = np.einsum("nij,nj,nkj->nik", u, np.sqrt(values), u)
    np.testing.assert_allclose(root.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose((root @ root).numpy(), matrix.numpy(), atol=1e-9)


def test_five_iterations_are_the_authors() -> None:
    a = covariances(normal(1, 4, 30).numpy()[..., None])[0]
    y, z, identity = a / np.trace(a), np.eye(4), np.eye(4)
    for _ in range(5):
        t = 0.5 * (3 * identity - z @ y)
        y, z = y @ t, t @ z
    found = second_order.root_by_newton_schulz(torch.from_numpy(a)[None], 5)[0]
    np.testing.assert_allclose(found.numpy(), np.sqrt(np.trace(a)) * y, rtol=1e-12)


@pytest.mark.parametrize("positions", [12, 3], ids=["full rank", "rank-deficient"])
def test_gradients_of_the_roots(positions: int) -> None:
    """Of a map, as in training: a rank-deficient covariance keeps its rank there."""
    x = normal(2, 5, positions).requires_grad_()
    assert gradcheck(lambda x: second_order.root_by_eigenvalues(second_order.covariance(x)), x, atol=1e-6)
    assert gradcheck(lambda x: second_order.root_by_newton_schulz(second_order.covariance(x)), x)


def test_channels_that_are_zero() -> None:
    """A ReLU makes them. Their eigenvalues coincide, and torch's own gradient of eigh is NaN: what ours is for."""
    dead = torch.tensor([1.0, 1, 1, 0, 0]).double()[:, None]
    x, weights = normal(1, 5, 9).requires_grad_(), normal(5, 5)
    values, vectors = torch.linalg.eigh(second_order.covariance(x * dead))
    plain = vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT
    ours = second_order.root_by_eigenvalues(second_order.covariance(x * dead))
    torch.testing.assert_close(ours, plain)
    (wrong,) = torch.autograd.grad((weights * plain).sum(), x)
    (right,) = torch.autograd.grad((weights * ours).sum(), x)
    assert not bool(wrong.isfinite().all())
    assert bool(right.isfinite().all())


def test_a_root_that_float32_does_not_reach_is_taken_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = second_order.covariance(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)))
    eigh, expected = torch.linalg.eigh, second_order.root_by_eigenvalues(matrix)

    def failing(given: Tensor) -> Any:
        if given.dtype == torch.float32:
            raise torch.linalg.LinAlgError("it did not converge")  # type: ignore[attr-defined]
        return eigh(given)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    found = second_order.root_by_eigenvalues(matrix)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("root", [second_order.root_by_eigenvalues, second_order.root_by_newton_schulz])
def test_second_derivatives(root: Callable[[Tensor], Tensor]) -> None:
    x = normal(1, 3, 9).requires_grad_()
    assert gradgradcheck(lambda x: root(second_order.covariance(x)), x)


@pytest.mark.parametrize("iterations", [0, 5])
def test_a_map_that_is_not_finite_spoils_itself_alone(iterations: int) -> None:
    x = normal(2, 8, 3, 3)
    x[0, 0, 0, 0] = torch.nan
    values = baselines.CovariancePooling(4, 8, iterations).values(x)
    assert values.isfinite().all(1).tolist() == [False, True]


@pytest.mark.parametrize("iterations", [0, 5])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e15], ids=str)
def test_roots_of_any_size_have_finite_gradients(iterations: int, scale: float) -> None:
    head = baselines.CovariancePooling(4, 8, iterations)
    x = (scale * normal(2, 8, 2, 2).float()).requires_grad_()
    values = head.values(x)
    torch.autograd.backward(values.sum())
    assert x.grad is not None
    assert bool(values.isfinite().all())
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("iterations", [0, 5])
def test_covariance_pooling_under_autocast_and_in_half(iterations: int) -> None:
    head = baselines.CovariancePooling(16, 8, iterations).eval()
    x = normal(2, 16, 4, 4).float()
    expected = head(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = head(x)
    half = head.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    scale = float(expected.detach().abs().max())
    for found in (mixed, half):
        assert float((found.float() - expected).detach().abs().max()) < 0.05 * scale


def test_upper_triangle() -> None:
    matrix = torch.arange(9.0).reshape(1, 3, 3)
    assert second_order.upper_triangle(matrix).tolist() == [[0, 1, 2, 4, 5, 8]]


def test_bilinear_pooling() -> None:
    x = normal(2, 3, 4, 5)
    module = baselines.BilinearPooling(3, 0)
    flat = x.numpy().reshape(2, 3, 20)
    moments = np.einsum("ncp,ndp->ncd", flat, flat).reshape(2, 9) / 20
    rooted = np.sign(moments) * np.sqrt(np.abs(moments) + 1e-8)
    expected = rooted / np.linalg.norm(rooted, axis=1, keepdims=True)
    np.testing.assert_allclose(module(x).numpy()[..., 0, 0], expected, rtol=1e-12)


def test_signed_root_has_a_finite_gradient() -> None:
    x = torch.tensor([-4.0, -1e-30, 0.0, 1e-30, 4.0], requires_grad=True)
    torch.autograd.backward(second_order.signed_root(x).sum())
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.25, 5000, 0, 5000, 0.25], rel=1e-3)
    assert gradcheck(second_order.signed_root, normal(5).requires_grad_())


def test_tensor_sketch_is_a_sketch_of_the_outer_product() -> None:
    x = normal(2, 6, 2, 3)
    torch.manual_seed(0)
    module = baselines.CompactBilinearPooling(6, 10).double()
    index, sign = module.index.numpy(), module.sign.numpy()
    moments = second_order.bilinear(x).numpy().reshape(2, 6, 6)
    expected = np.zeros((2, 10))
    for i in range(6):
        for j in range(6):
            expected[:, (index[0, i] + index[1, j]) % 10] += sign[0, i] * sign[1, j] * moments[:, i, j]
    sketch = second_order.tensor_sketch(x, module.index, module.sign, 10)
    np.testing.assert_allclose(sketch.numpy(), expected, rtol=1e-10, atol=1e-14)
    assert gradcheck(lambda x: second_order.tensor_sketch(x, module.index, module.sign, 10), x.requires_grad_())


def test_the_sketch_keeps_inner_products() -> None:
    x, y = normal(1, 8, 9).abs(), normal(1, 8, 9, seed=1).abs()
    exact = float((second_order.bilinear(x) * second_order.bilinear(y)).sum())
    found = []
    for seed in range(200):
        torch.manual_seed(seed)
        module = baselines.CompactBilinearPooling(8, 64).double()
        a, b = (second_order.tensor_sketch(z, module.index, module.sign, 64) for z in (x, y))
        found.append(float((a * b).sum()))
    assert np.mean(found) == pytest.approx(exact, abs=3 * np.std(found) / len(found) ** 0.5)


def mixture(components: int = 3, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    weights = normal(components, seed=1).softmax(0)
    return weights, normal(components, size, seed=2), normal(components, size, seed=3).square() + 0.1


def test_fisher_vector_by_equations_1_and_2() -> None:
    x = normal(2, 7, 4)
    weights, means, variances = (value.numpy() for value in mixture())
    expected = []
    for descriptors in x.numpy():
        first, second = np.zeros((3, 4)), np.zeros((3, 4))
        for t in descriptors:
            likelihood = weights * np.prod(
                np.exp(-((t - means) ** 2) / variances / 2) / np.sqrt(2 * np.pi * variances), 1
            )
            gamma = likelihood / likelihood.sum()
            for k in range(3):
                alpha = (t - means[k]) / np.sqrt(variances[k])
                first[k] += gamma[k] * alpha
                second[k] += gamma[k] * (alpha**2 - 1)
        first /= 7 * np.sqrt(weights)[:, None]
        second /= 7 * np.sqrt(2 * weights)[:, None]
        expected.append(np.concatenate([first.ravel(), second.ravel()]))
    np.testing.assert_allclose(fisher.fisher_vector(x, *mixture()).numpy(), expected, rtol=1e-9)
    assert gradcheck(lambda x: fisher.fisher_vector(x, *mixture()), x.requires_grad_())


def test_a_mixture_is_fitted_to_features() -> None:
    model = ds.create_model("vanilla_cnn", "fisher(components=4, size=8)")
    images = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="not fitted yet"):
        model.train()(images)
    baselines.fit_fisher(model, [(images, torch.zeros(40))])
    layer = next(module for module in model.modules() if isinstance(module, baselines.FisherVector))
    assert float(layer.weights.sum()) == pytest.approx(1, abs=1e-5)
    # On its own data the mixture is a maximum of the likelihood: the Fisher vector, its gradient, is about zero.
    features: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    model.eval()(images)
    handle.remove()
    reduced = layer.reduce(features[0]).detach().flatten(2).mT
    together = fisher.fisher_vector(reduced.flatten(0, 1)[None], layer.weights, layer.means, layer.variances)
    alone = fisher.fisher_vector(reduced, layer.weights, layer.means, layer.variances)
    assert float(together.norm()) < 0.1 * float(alone.norm(dim=1).mean())
    assert model.train()(images).shape == (40, 10)
    again = ds.create_model("vanilla_cnn", "fisher(components=4, size=8)")
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(images), model.eval()(images))
    assert again.train()(images).shape == (40, 10)


def test_a_mixture_in_half_precision_and_with_frozen_layers() -> None:
    model: Any = ds.create_model("vanilla_cnn", "fisher(components=8, size=8)").train()
    model.layer1.eval()
    x = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    baselines.fit_fisher(model, [x])
    assert model.training
    assert not model.layer1.training
    layer = next(module for module in model.modules() if isinstance(module, baselines.FisherVector))
    layer.weights[0] = 1e-20
    assert bool(model.eval().half()(x.half()).isfinite().all())


def test_loading_an_unfitted_mixture_fits_nothing() -> None:
    model = ds.create_model("vanilla_cnn", "fisher(components=4, size=8)")
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="not fitted yet"):
        model.train()(torch.rand(2, 3, 32, 32))


def test_what_fit_fisher_refuses() -> None:
    with pytest.raises(ValueError, match="has 0 Fisher vectors"):
        baselines.fit_fisher(ds.vanilla_cnn(), [])
    model = ds.create_model("vanilla_cnn", "fisher")
    with pytest.raises(ValueError, match="the loader is empty"):
        baselines.fit_fisher(model, [])
    with pytest.raises(ValueError, match="gave 32 positions; expected at least 64"):
        baselines.fit_fisher(model, [torch.rand(2, 3, 32, 32)])
    with pytest.raises(TypeError, match=r"the loader gave dict; expected images \(N, C, H, W\)"):
        baselines.fit_fisher(model, [{"image": 1}])
    with pytest.raises(ValueError, match="the same at every position"):
        baselines.fit_fisher(model, [torch.zeros(1, 3, 320, 320)])
    with pytest.raises(ValueError, match="not finite"):
        baselines.fit_fisher(model, [torch.full((8, 3, 32, 32), torch.nan)])
