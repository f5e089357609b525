"""The baselines as terms of a spec: Table 6, strides, wider classifiers, errors, copying and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import images, own_keys, step
from torch import Tensor, nn

import deepsquare as ds
from deepsquare import baselines
from deepsquare.surgery.spec import ALIASES, parse_spec
from deepsquare.surgery.techniques import BASELINES

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
    assert parse_spec("gsop1") == parse_spec(ALIASES["gsop1"])
    with torch.device("meta"):
        first, second = (ds.create_model("resnet50", spec) for spec in ("gsop1", "gsop2"))
    blocks = [name for name, module in first.named_modules() if isinstance(module, baselines.GSoP)]
    assert blocks == [f"layer{i}.{n}.bn3.deepsquare_gsop" for i, n in ((1, 2), (2, 3), (3, 5), (4, 2))]
    strides = [first.get_submodule(f"{block}.reduce.1").stride for block in blocks]
    assert strides == [(2, 2), (1, 1), (1, 1), (1, 1)]
    assert sum(isinstance(module, baselines.GSoP) for module in second.modules()) == 3
    head = second.get_submodule("avgpool.deepsquare_isqrt_cov")
    assert isinstance(head, baselines.CovariancePooling)
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
    with pytest.raises(ValueError, match="has no module 'nowhere' for the term 'se'"):
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
    assert baselines.CompactBilinearPooling(4, 8)(torch.rand(0, 4, 3, 3)).shape == (0, 8, 1, 1)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("resnet18", "gsop1(size=3)", "gsop1 takes no options; write gsop"),
        ("resnet18", "se(reduction=0)", "the term se.* reduction is 0; expected 1 to 65536"),
        ("resnet18", "ge_theta(extent=3)", "extent is 3; expected 2, 4, 8, or 0"),
        ("resnet18", "se+excitation", "fills the same site twice, by se and excitation"),
        ("resnet18", "isqrt_cov+gem", "fills the same site twice"),
        ("vanilla_cnn", "se", "no branch_end site for the term 'se'.*se\\(after='…'\\) acts after a module"),
        ("vanilla_cnn", "fisher(size=256)", "size is 256; expected at most the map's 128 channels"),
        ("timm/resnet50d", "isqrt_cov", "downsampled by layer4.0.downsample.0, .*dense=False"),
        ("vanilla_cnn", "se(after='fc')", "takes maps with height and width; fc gives 10"),
        ("timm/efficientnet_lite0", "nothing", "unknown term 'nothing'.*gsop1, gsop2"),
    ],
)  # fmt: skip
def test_what_does_not_suit(name: str, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        ds.create_model(name, spec)


@pytest.mark.parametrize(
    ("name", "term"),
    [("shufflenet_v2_x0_5", term) for term in (*BASELINES, *ALIASES)]
    + [("resnet18", term) for term in ("se", "isqrt_cov", "gsop2")],  # a gate, a head, and both
)
def test_every_baseline_trains_saves_and_is_removed(name: str, term: str, tmp_path: Path) -> None:
    small = {"mpn_cov": "(size=16)", "isqrt_cov": "(size=16)", "bilinear": "(size=16)", "compact_bilinear": "(size=64)"}
    spec = term + small.get(term, "")
    model = ds.create_model(name, spec, num_classes=5, input_shape=(3, 64, 64))
    assert own_keys(model) or term == "ge_theta_minus"
    for module in model.modules():
        if isinstance(module, baselines.FisherVector):
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
@pytest.mark.parametrize("term", BASELINES)
def test_compile_and_export(term: str) -> None:
    small = {"mpn_cov": "(size=8)", "isqrt_cov": "(size=8)", "bilinear": "(size=4)", "compact_bilinear": "(size=32)"}
    after = "(after='layer2')" if BASELINES[term].kind == "branch_end" and term != "gsop" else small.get(term, "")
    if term == "gsop":
        model: nn.Module = baselines.GSoP(8, 4).eval()
        x = torch.rand(2, 8, 6, 6)
    else:
        model = ds.create_model("vanilla_cnn", term + after).eval()
        x = torch.rand(2, 3, 32, 32)
    expected = model(x)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.autograd.backward(compiled(x).sum())
