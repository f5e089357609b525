"""Models by name: both libraries, the vanilla CNN of Table 1, the rows of Tables 2 to 7, and timm's own factory."""

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepsquare as ds
import deepsquare.timm_models
from deepsquare.models import NETWORKS, ModelConfig, VanillaCNN, create_model


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def build(name: str, spec: str = "", **kwargs: Any) -> nn.Module:
    """Without memory or initialisation: for tests that look at keys and shapes."""
    with torch.device("meta"):
        return create_model(name, spec, **kwargs)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_prefix_selects_the_library(library: str) -> None:
    model = build(f"{library}/resnet18", num_classes=3)
    assert type(model).__module__.split(".")[0] == library
    assert shapes(model)["fc.weight"] == (3, 512)
    assert model.deepsquare_config == ModelConfig(f"{library}/resnet18", {"num_classes": 3})


def test_the_same_network_may_come_from_either_library() -> None:
    both = [shapes(build(f"{library}/resnet50")) for library in ("torchvision", "timm")]
    assert both[0] == both[1] == shapes(build("resnet50"))
    assert len(both[0]) == 320


def test_different_networks_of_one_name_are_an_error() -> None:
    assert shapes(build("torchvision/vgg16")) != shapes(build("timm/vgg16"))
    with pytest.raises(ValueError, match=r"vgg16.*different networks.*'torchvision/vgg16' or 'timm/vgg16'"):
        create_model("vgg16")


def test_a_name_with_a_weight_tag_is_timms() -> None:
    model = build("resnet18.a1_in1k")
    assert type(model).__module__ == "timm.models.resnet"
    with pytest.raises(ValueError, match=r"no model named 'torchvision/resnet18\.a1_in1k'"):
        create_model("torchvision/resnet18.a1_in1k")


def test_unknown_names_get_close_matches() -> None:
    with pytest.raises(ValueError, match="no model named 'resnet5'; the nearest names are") as caught:
        create_model("resnet5")
    names = str(caught.value).split(" are ")[1].split(", ")
    assert "resnet50" in names
    assert len(names) == len(set(names)) == 4
    with pytest.raises(ValueError, match="nearest names are vanilla_cnn"):
        create_model("vanila_cnn")
    with pytest.raises(ValueError, match="unknown library 'hub' in 'hub/resnet18'; expected torchvision or timm"):
        create_model("hub/resnet18")
    with pytest.raises(TypeError, match=r"use deepsquare\.equip"):
        create_model(nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/resnet18", "vanilla_cnn"])
def test_wrong_arguments_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} could not be built with {{'bogus': 1}}: .*'bogus'"):
        create_model(name, bogus=1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet18", "timm's network takes other arguments: 'timm/resnet18'"),
        ("squeezenet1_1", "Build the model without in_chans, replace its first convolution, then call deep.*"),
    ],
)
def test_input_channels_for_torchvision(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^torchvision's {name} could not be built .*'in_chans'\. {hint}$"):
        create_model(name, "pooling", in_chans=1)


def test_input_channels_for_timm() -> None:
    model = create_model("timm/test_resnet", "pooling", in_chans=1, num_classes=3)
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 3)


@pytest.mark.parametrize("name", ["resnet18", "torchvision/resnet18"])
def test_unknown_weights_are_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} has no weights 'NOPE'; torchvision has IMAGENET1K_V1, DEFAULT$"):
        create_model(name, weights="NOPE")


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "timm" else real(name, *rest))
    with pytest.raises(ValueError, match=r"timm/resnet10t.*timm is not installed: pip install 'deepsquare\[timm\]'"):
        create_model("timm/resnet10t")
    assert type(build("vgg11")).__module__ == "torchvision.models.vgg"  # in both libraries otherwise, and different


def test_table_1() -> None:
    model = ds.vanilla_cnn()
    seen: list[tuple[int, ...]] = []
    layers = (model.layer1, model.layer2, model.layer3, model.pool, model.fc)
    for layer in layers:
        layer.register_forward_hook(lambda m, i, output: seen.append(tuple(output.shape[1:])))
    model(torch.zeros(2, 3, 32, 32))
    assert seen == [(32, 16, 16), (64, 8, 8), (128, 4, 4), (128, 1, 1), (10,)]
    convolutions = 3 * 9 * 32 + 32 * 9 * 64 + 64 * 9 * 128
    normalisations = 2 * (32 + 64 + 128)
    assert sum(p.numel() for p in model.parameters()) == convolutions + normalisations + 128 * 10 + 10 == 94_762
    assert create_model("vanilla_cnn", num_classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


Pool = Callable[[Tensor], Tensor]


def by_hand(model: nn.Module, x: Tensor, squares: str, sign: int, pool: Pool) -> Tensor:
    """Table 1 with EleSquare after the layers in ``squares``, and ``sign`` · s · FC² at the end unless it is 0."""
    s = model.state_dict()
    for layer in "123":
        x = F.conv2d(x, s[f"layer{layer}.conv.weight"], stride=2, padding=1)
        x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        gamma, beta = s[f"layer{layer}.bn.weight"], s[f"layer{layer}.bn.bias"]
        x = (x * gamma[:, None, None] + beta[:, None, None]).clamp(min=0)
        x = x**2 if layer in squares else x
    x = pool(x.flatten(2))
    x = x**2 if "4" in squares else x
    x = x @ s["fc.weight"].T + s["fc.bias"]
    root = s.get("fc.deepsquare_softmin.root_scale", torch.ones(()))
    return sign * root**2 * x**2 if sign else x


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


SQUARES = "square(after='layer1')+square(after='layer2')+pooling"
ROWS: dict[str, tuple[str, str, int, Pool]] = {
    "Original": ("", "", 0, mean),
    "DeepSquare1": ("square(after='layer1')", "1", 0, mean),
    "DeepSquare2": ("square(after='layer2')", "2", 0, mean),
    "DeepSquare3": ("pooling", "3", 0, mean),
    "DeepSquare4": ("square(after='pool')", "4", 0, mean),
    "DeepSquare5+": ("softmin(scale='none', sign=1)", "", 1, mean),
    "DeepSquare5-": ("softmin(scale='none')", "", -1, mean),
    "DeepSquare5s+": ("softmin(sign=1)", "", 1, mean),
    "DeepSquare5s-": ("softmin", "", -1, mean),
    "DeepSquare5s- by channel": ("softmin(scale='channel')", "", -1, mean),
    "DeepSquare6": (f"{SQUARES}+softmin", "123", -1, mean),
    "DeepSquare7": (SQUARES, "123", 0, mean),
    "DeepSquare8": ("pooling+softmin", "3", -1, mean),
    "GeM": ("gem(p=2, learnable=False)", "", 0, lambda x: mean(x.clamp(min=1e-6) ** 2).sqrt()),
    "Variant1": ("moment3", "", 0, lambda x: mean(x**3)),
    "Variant2": ("moment4", "", 0, lambda x: mean(x**4)),
    "Variant3": ("moment5", "", 0, lambda x: mean(x**5)),
    "Variant4": ("moment6", "", 0, lambda x: mean(x**6)),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_rows_of_tables_2_and_3_are_specs(row: str) -> None:
    spec, squares, sign, pool = ROWS[row]
    torch.manual_seed(0)
    model = create_model("vanilla_cnn", spec).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter) + 0.5)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    logits = model(x)
    torch.testing.assert_close(logits, by_hand(model, x, squares, sign, pool), rtol=1e-9, atol=1e-12)
    F.cross_entropy(logits, torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    assert isinstance(model, VanillaCNN)
    assert model.layer1.conv.weight.grad is not None
    assert float(model.layer1.conv.weight.grad.norm()) > 0
    scales = {"none": 0, "channel": 10}.get(spec.partition("scale='")[2].partition("'")[0], 1) if sign else 0
    assert sum(p.numel() for p in model.parameters()) == 94_762 + scales


TERMS = {"SP": "pooling", "SS": "softmin", "SEx": "excitation", "SEn": "encoding", "base": ""}
PAPER = {  # the method column; a row printed twice for other epochs or from another source is one network
    ("Table 4", "resnet18"): "base, SP, SS, SEx, SEn, SP & SEx, SP & SEn, SP & SEx & SEn",
    ("Table 5", "resnet50"): "base, SP, SS, SEn, SP & SEx",
    ("Table 7", "shufflenet_v2_x1_0"): "base, SP, SS, SEn, SP & SEx",
    ("Table 7", "shufflenet_v2_x0_5"): "base, SP",
}


def spec_of(label: str) -> str:
    return "+".join(TERMS[part] for part in label.split(" & "))


def test_tables_hold_the_rows_of_the_paper() -> None:
    written = {key: tuple(spec_of(label) for label in labels.split(", ")) for key, labels in PAPER.items()}
    held = {
        (table, name): tuple(network.spec for network in NETWORKS if network.model == name) for table, name in PAPER
    }
    assert held == written
    assert len(NETWORKS) == sum(map(len, written.values()))


def test_the_tables_are_timm_models() -> None:
    names = ["_".join(["deepsquare", name, *filter(None, spec_of(label).split("+"))])
             for (_, name), labels in PAPER.items() for label in labels.split(", ")]  # fmt: skip
    assert sorted(timm.list_models("deepsquare_*")) == sorted(names)
    assert len(names) == 20


def test_a_registered_name_is_known_here_too() -> None:
    named = create_model("deepsquare_resnet18_pooling", num_classes=3)
    spelled = create_model("timm/resnet18", "pooling", num_classes=3)
    assert shapes(named) == shapes(spelled)
    assert str(ds.sites(named)) == str(ds.sites(spelled))


def test_running_the_registration_again_changes_nothing() -> None:
    before = timm.list_models("deepsquare_*")
    importlib.reload(deepsquare.timm_models)  # warnings are errors
    assert timm.list_models("deepsquare_*") == before


def test_unknown_terms_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=re.escape("unknown term 'squares'") + ".*pooling, softmin, excitation"):
        create_model("vanilla_cnn", "squares")
