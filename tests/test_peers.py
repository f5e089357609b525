"""The peers: each against its authors' definition, written again in NumPy and float64; gradients; precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from common import images, own_keys, step
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import deepsquare as ds
from deepsquare import peers
from deepsquare.peers import fisher, second_order
from deepsquare.surgery.techniques import NETWORKS, PEERS, parse_spec

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
    module: Any = randomise(parse_spec("se(reduction=8)")[0].build(ds.sites(ds.vanilla_cnn()).of("pooling")[0]))
    assert module.fc1.out_channels == 128 // 8
    module = randomise(type(module)(32, 4))
    pooled = x.numpy().mean((2, 3), keepdims=True)
    gate = sigmoid(mix(np.maximum(mix(pooled, module.fc1), 0), module.fc2))
    np.testing.assert_allclose(module(x).detach().numpy(), x.numpy() * gate, rtol=1e-12)


def test_gather_excite_without_parameters() -> None:
    x = normal(2, 3, 6, 7)
    module = peers.GatherExcite(3)
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
    np.testing.assert_allclose(peers.GatherExcite(2, extent=extent)(x).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("reduction", [0, 2])
def test_gather_excite_over_the_whole_map(reduction: int) -> None:
    x = normal(2, 4, 3, 5)
    module: Any = randomise(peers.GatherExcite(4, (3, 5), learned=True, reduction=reduction))
    weights = module.gather[0].weight.detach().numpy()[:, 0]
    gathered = norm(np.einsum("nchw,chw->nc", x.numpy(), weights)[:, :, None, None], module.gather[1])
    if reduction:
        hidden = np.maximum(mix(np.maximum(gathered, 0), module.mix[1]), 0)
        gathered = mix(hidden, module.mix[3])
    np.testing.assert_allclose(module(x).detach().numpy(), x.numpy() * sigmoid(gathered), rtol=1e-10)
    with pytest.raises(ValueError, match=r"the map is 4×5, but this GE-θ has a weight for each position of 3×5"):
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
    module: Any = randomise(peers.GatherExcite(4, extent=extent, learned=True))
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
    module: Any = randomise(peers.GSoP(6, 3))
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


@pytest.mark.parametrize("root", [second_order.root_by_eigenvalues, second_order.root_by_newton_schulz])
def test_second_derivatives(root: Callable[[Tensor], Tensor]) -> None:
    x = normal(1, 3, 9).requires_grad_()
    assert gradgradcheck(lambda x: root(second_order.covariance(x)), x)


@pytest.mark.parametrize("iterations", [0, 5])
def test_a_map_that_is_not_finite_spoils_itself_alone(iterations: int) -> None:
    x = normal(2, 8, 3, 3)
    x[0, 0, 0, 0] = torch.nan
    values = peers.CovariancePooling(4, 8, iterations).values(x)
    assert values.isfinite().all(1).tolist() == [False, True]


@pytest.mark.parametrize("iterations", [0, 5])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e15], ids=str)
def test_roots_of_any_size_have_finite_gradients(iterations: int, scale: float) -> None:
    head = peers.CovariancePooling(4, 8, iterations)
    x = (scale * normal(2, 8, 2, 2).float()).requires_grad_()
    values = head.values(x)
    torch.autograd.backward(values.sum())
    assert x.grad is not None
    assert bool(values.isfinite().all())
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("iterations", [0, 5])
def test_covariance_pooling_under_autocast_and_in_half(iterations: int) -> None:
    head = peers.CovariancePooling(16, 8, iterations).eval()
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
    module = peers.BilinearPooling(3, 0)
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
    module = peers.CompactBilinearPooling(6, 10).double()
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
        module = peers.CompactBilinearPooling(8, 64).double()
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
    peers.fit_fisher(model, [(images, torch.zeros(40))])
    layer = next(module for module in model.modules() if isinstance(module, peers.FisherVector))
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
    peers.fit_fisher(model, [x])
    assert model.training
    assert not model.layer1.training
    layer = next(module for module in model.modules() if isinstance(module, peers.FisherVector))
    layer.weights[0] = 1e-20
    assert bool(model.eval().half()(x.half()).isfinite().all())


def test_loading_an_unfitted_mixture_fits_nothing() -> None:
    model = ds.create_model("vanilla_cnn", "fisher(components=4, size=8)")
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="not fitted yet"):
        model.train()(torch.rand(2, 3, 32, 32))


def test_what_fit_fisher_refuses() -> None:
    with pytest.raises(ValueError, match="has 0 Fisher vectors"):
        peers.fit_fisher(ds.vanilla_cnn(), [])
    model = ds.create_model("vanilla_cnn", "fisher")
    with pytest.raises(ValueError, match="the loader is empty"):
        peers.fit_fisher(model, [])
    with pytest.raises(ValueError, match="gave 32 positions; expected at least 64"):
        peers.fit_fisher(model, [torch.rand(2, 3, 32, 32)])
    with pytest.raises(TypeError, match=r"the loader gave dict; expected images \(N, C, H, W\)"):
        peers.fit_fisher(model, [{"image": 1}])
    with pytest.raises(ValueError, match="the same at every position"):
        peers.fit_fisher(model, [torch.zeros(1, 3, 320, 320)])
    with pytest.raises(ValueError, match="not finite"):
        peers.fit_fisher(model, [torch.full((8, 3, 32, 32), torch.nan)])


# Table 6. Added to the 25,557,032 parameters of ResNet50, counted by hand from the definitions.
WIDTHS = {256: (3, 56), 512: (4, 28), 1024: (6, 14), 2048: (3, 7)}  # channels: blocks, side of the map


def gsop_parameters(channels: int) -> int:
    reduce = channels * 128 + 128 + 2 * 128
    return reduce + 2 * 128 + (512 * 128 + 512) + (512 * channels + channels)


HEAD = 2048 * 256 + 2 * 256 + (256 * 257 // 2 - 2048) * 1000
TABLE_6 = {
    "se": (sum(n * (2 * c * c // 16 + c // 16 + c) for c, (n, _) in WIDTHS.items()), 10),
    "ge_theta_minus": (0, 0),
    "ge_theta": (sum(n * (c * side**2 + 2 * c) for c, (n, side) in WIDTHS.items()), 22),
    "mpn_cov": (HEAD, 120),
    "isqrt_cov": (HEAD, 120),
    "gsop1": (sum(map(gsop_parameters, WIDTHS)), 10),
    "gsop2": (sum(map(gsop_parameters, (256, 512, 1024))) + HEAD, 130),
    "pooling+excitation": (16, 0),
}


@pytest.mark.parametrize("spec", TABLE_6)
def test_parameters_of_table_6(spec: str) -> None:
    with torch.device("meta"):
        model = ds.create_model("resnet50", spec)
    added, column = TABLE_6[spec]
    assert sum(p.numel() for p in model.parameters()) == 25_557_032 + added
    # The paper rounds to ten per cent, Gather-Excite's to one.
    percent = 100 * added / 25_557_032
    assert round(percent) == column if spec == "ge_theta" else round(percent / 10) * 10 == column


def test_networks_of_gsop() -> None:
    assert parse_spec("gsop1") == parse_spec(NETWORKS["gsop1"])
    with torch.device("meta"):
        first, second = (ds.create_model("resnet50", spec) for spec in ("gsop1", "gsop2"))
    blocks = [name for name, module in first.named_modules() if isinstance(module, peers.GSoP)]
    assert blocks == [f"layer{i}.{n}.bn3.deepsquare_gsop" for i, n in ((1, 2), (2, 3), (3, 5), (4, 2))]
    strides = [first.get_submodule(f"{block}.reduce.1").stride for block in blocks]
    assert strides == [(2, 2), (1, 1), (1, 1), (1, 1)]
    assert sum(isinstance(module, peers.GSoP) for module in second.modules()) == 3
    head = second.get_submodule("avgpool.deepsquare_isqrt_cov")
    assert isinstance(head, peers.CovariancePooling)
    assert head.iterations == 3


def test_the_last_stage_goes_at_stride_1_and_back() -> None:
    model: Any = ds.create_model("resnet18")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.rand(2, 3, 64, 64)
    expected = model.eval()(x)
    ds.equip(model, "isqrt_cov(size=16)", input_shape=(3, 64, 64))
    assert [m.stride for m in (model.layer4[0].conv1, model.layer4[0].downsample[0])] == [(1, 1)] * 2
    assert model.fc.in_features == 136
    assert model(x).shape == (2, 1000)
    assert {k for k in model.state_dict() if "deepsquare" not in k} == set(before)
    ds.unequip(model)
    assert model.fc.in_features == 512
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(model(x), expected)


def test_a_gate_of_the_model_does_not_make_its_map_smaller() -> None:
    model = ds.create_model("regnet_y_400mf", "isqrt_cov(size=8)")
    strides = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)}
    assert strides
    assert not [name for name in strides if "block4" in name]


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model: Any = ds.create_model("resnet18")
    with pytest.raises(ValueError, match="has no module 'nowhere' for the word 'se'"):
        ds.equip(model, "isqrt_cov+se(after='nowhere')")
    assert model.layer4[0].conv1.stride == (2, 2)
    assert model.fc.in_features == 512
    ds.equip(model, "se")


def test_after_a_new_classifier_unequip_keeps_its_classes() -> None:
    model: Any = ds.create_model("resnet18", "bilinear(size=8)")
    model.fc = nn.Linear(model.fc.in_features, 7)
    ds.unequip(model)
    assert model.eval()(torch.rand(1, 3, 64, 64)).shape == (1, 7)


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Sequential(nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 7))])
def test_unequip_leaves_a_layer_of_another_kind_alone(layer: nn.Module) -> None:
    model: Any = ds.create_model("vanilla_cnn", "isqrt_cov(size=8)")
    model.fc = layer
    ds.unequip(model)
    assert model.fc is layer
    assert not hasattr(layer, "in_features")
    assert model.layer3.conv.stride == (2, 2)
    assert not own_keys(model)


class FixedView(ds.models.VanillaCNN):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.pool(self.layer3(self.layer2(self.layer1(x)))).view(-1, 128))
        return out


class FixedWindow(ds.models.VanillaCNN):
    def forward(self, x: Tensor) -> Tensor:
        maps = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(nn.functional.avg_pool2d(maps, 4).flatten(1))
        return out


@pytest.mark.parametrize(
    ("model", "spec", "message"),
    [
        (FixedView(), "bilinear(size=8)", "FixedView cannot run with more pooled values; something else reads them"),
        (FixedWindow(), "isqrt_cov(size=8)", "FixedWindow cannot run at stride 1 in its last stage; .* dense=False"),
    ],
    ids=str,
)
def test_what_a_model_cannot_run_is_refused(model: nn.Module, spec: str, message: str) -> None:
    x = torch.rand(2, 3, 32, 32)
    expected = model.eval()(x)
    with pytest.raises(ValueError, match=message):
        ds.equip(model, spec)
    torch.testing.assert_close(model(x), expected)


def test_an_empty_batch() -> None:
    assert peers.CompactBilinearPooling(4, 8)(torch.rand(0, 4, 3, 3)).shape == (0, 8, 1, 1)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("resnet18", "gsop1(size=3)", "gsop1 takes no options; write gsop"),
        ("resnet18", "se(reduction=0)", "the word se.* reduction is 0; expected at least 1"),
        ("resnet18", "ge_theta(extent=3)", "extent is 3; expected 2, 4, 8, or 0"),
        ("resnet18", "se+excitation", "fills the same site twice, by se and excitation"),
        ("resnet18", "isqrt_cov+gem", "fills the same site twice"),
        ("vanilla_cnn", "se", "no branch_end site for the word 'se'.*se\\(after='…'\\) stands behind"),
        ("vanilla_cnn", "fisher(size=256)", "size is 256; expected at most the map's 128 channels"),
        ("timm/resnet50d", "isqrt_cov", "made smaller by layer4.0.downsample.0, .*dense=False"),
        ("vanilla_cnn", "se(after='fc')", "takes maps with height and width; fc gives 10"),
        ("timm/efficientnet_lite0", "nothing", "unknown word 'nothing'.*gsop1, gsop2"),
    ],
)  # fmt: skip
def test_what_does_not_suit(name: str, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        ds.create_model(name, spec)


@pytest.mark.parametrize("word", [*PEERS, *NETWORKS])
@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5"])
def test_every_peer_trains_saves_and_comes_off(name: str, word: str, tmp_path: Path) -> None:
    small = {"mpn_cov": "(size=16)", "isqrt_cov": "(size=16)", "bilinear": "(size=16)", "compact_bilinear": "(size=64)"}
    spec = word + small.get(word, "")
    model = ds.create_model(name, spec, num_classes=5, input_shape=(3, 64, 64))
    assert own_keys(model) or word == "ge_theta_minus"
    for module in model.modules():
        if isinstance(module, peers.FisherVector):
            module.fitted = True
    x = images()
    assert all(bool(gradient.isfinite().all()) for gradient in step(model, x).values())
    ds.save(model, tmp_path / "model.safetensors")
    again = ds.load(tmp_path / "model.safetensors").eval()
    torch.testing.assert_close(again(x), model.eval()(x))
    torch.testing.assert_close(ds.fold(model)(x), model(x), rtol=1e-3, atol=1e-3)
    assert not own_keys(ds.unequip(model))
    assert model(x).shape == (2, 5)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by dynamo itself
@pytest.mark.parametrize("word", PEERS)
def test_compile_and_export(word: str) -> None:
    small = {"mpn_cov": "(size=8)", "isqrt_cov": "(size=8)", "bilinear": "(size=4)", "compact_bilinear": "(size=32)"}
    after = "(after='layer2')" if PEERS[word].kind == "branch_end" and word != "gsop" else small.get(word, "")
    if word == "gsop":
        model: nn.Module = peers.GSoP(8, 4).eval()
        x = torch.rand(2, 8, 6, 6)
    else:
        model = ds.create_model("vanilla_cnn", word + after).eval()
        x = torch.rand(2, 3, 32, 32)
    expected = model(x)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.autograd.backward(compiled(x).sum())
