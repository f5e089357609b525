"""Modules that are replaced after equip: what was inserted moves to the new module, or the replacement is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.utils
import torch
from helpers.models import attached, copied_state, create, equip_quietly, images, same_state, tuned
from torch import nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

import deepsquare as ds
from deepsquare.batchnorm import recalibrate_batchnorm
from deepsquare.surgery import equip_record

CHANNEL = "pooling+softmin(scale='channel')"


def parts(model: Any) -> Any:
    """For the attributes of modules, which ``nn.Module`` does not know by type."""
    return model


def test_a_new_classifier_keeps_softmin_and_dropout(tmp_path: Path) -> None:
    model = parts(ds.equip(create("vanilla_cnn"), CHANNEL + "+square(after='layer1')", dropout=0.5))
    kept = model.fc.deepsquare_dropout
    fc: Any = nn.Linear(128, 7)
    model.fc = fc
    assert model.fc is fc
    assert fc.deepsquare_dropout is kept
    x = images(2, 32)
    model.eval()
    with torch.no_grad():
        root = fc.deepsquare_softmin.root_scale
        assert torch.equal(root, torch.ones(7))
        root.copy_(torch.linspace(0.5, 2, 7))
        pooled = model.layer3(model.layer2(model.layer1(x))).square().mean((2, 3))
        expected = -((root * F.linear(pooled, fc.weight, fc.bias)) ** 2)
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(ds.fold(model)(x), expected)
    assert [site.shape for site in ds.sites(model) if site.kind == "logits"] == [(7,)]
    ds.save(model, tmp_path / "m")
    other = parts(ds.equip(create("vanilla_cnn"), CHANNEL + "+square(after='layer1')", dropout=0.5))
    other.fc = nn.Linear(128, 7)
    assert ds.load_weights(other, tmp_path / "m") == []
    assert torch.equal(other.eval()(x), model(x))
    state = {key: value for key, value in copied_state(model).items() if "deepsquare_" not in key}
    assert ds.unequip(model).fc is fc
    assert type(fc) is nn.Linear
    assert same_state(model, state)
    assert attached(model) == 0


def test_the_scales_of_as_many_classes_stay() -> None:
    model = parts(tuned(ds.equip(create("vanilla_cnn"), CHANNEL, init="identity")))
    softmin, old = model.fc.deepsquare_softmin, model.fc
    scale, beta = softmin.root_scale, softmin.beta
    model.fc = nn.Linear(128, 10, bias=False)
    assert model.fc.deepsquare_softmin is softmin
    assert softmin.root_scale is scale
    assert softmin.beta is beta
    assert type(old) is nn.Linear  # and plain again
    model.fc = nn.Linear(128, 3)
    assert softmin.root_scale.shape == (3,)
    assert softmin.beta is beta


def test_a_layer_of_a_container_is_replaced() -> None:
    model = parts(ds.equip(create("mobilenet_v2"), "softmin"))
    model.classifier[1] = nn.Linear(1280, 3)
    assert list(model.classifier[1]._modules) == ["deepsquare_softmin"]
    model.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(1280, 4))
    assert list(model.classifier[1]._modules) == ["deepsquare_softmin"]
    model.eval()
    pooled = model.features(images()).mean((2, 3))
    torch.testing.assert_close(model(images()), -F.linear(pooled, *model.classifier[1].parameters(False)).square())
    with pytest.raises(ValueError, match=r"classifier.1 has an inserted SquareSoftmin, which the new Sequential"):
        model.classifier = nn.Sequential(nn.Linear(1280, 8), nn.ReLU(), nn.Linear(8, 3))
    assert len(model.classifier) == 2


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_efficientnet", "test_byobnet"])
def test_timms_reset_classifier(name: str) -> None:
    model = parts(equip_quietly(create(f"timm/{name}", num_classes=10), CHANNEL))
    x = images(2, 64)
    model.reset_classifier(5, "avg")
    model.reset_classifier(6)
    fc = model.get_classifier()
    inserted = fc.deepsquare_softmin
    assert inserted.root_scale.shape == (6,)
    assert attached(model) == 2
    assert [site.channels for site in ds.sites(model) if site.kind == "logits"] == [6]
    seen = []
    fc.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output = model.eval()(x)
    maps = model.forward_features(x)
    if name in ("test_resnet", "test_efficientnet", "test_byobnet"):  # ConvNeXt normalizes after the pooling
        torch.testing.assert_close(seen[0].flatten(1), maps.square().mean((2, 3)))
    torch.testing.assert_close(output, -F.linear(seen[0], fc.weight, fc.bias).square())
    for pool in ("max", ""):
        with pytest.raises(ValueError, match=r"has an inserted SquarePooling, which the new .* not a global average"):
            model.reset_classifier(5, pool)
    with pytest.raises(ValueError, match=r"SquareSoftmin, which the new Identity .* its number of classes"):
        model.reset_classifier(0)
    assert torch.equal(model(x), output)
    plain = create(f"timm/{name}", num_classes=6)
    assert list(ds.unequip(model).state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", ["squeezenet1_1", "timm/dla34", "timm/resnetv2_18"])
def test_a_classifier_with_layers_behind_it(name: str) -> None:
    """A convolution, behind which the logits are pooled or flattened: there the softmin is."""
    with torch.device("meta"):
        model = parts(ds.equip(create(name), "softmin(scale='channel')"))
    if name == "squeezenet1_1":
        model.classifier[1] = nn.Conv2d(512, 5, 1, device="meta")
    else:
        model.reset_classifier(5)
    assert [p.shape for k, p in model.named_parameters() if "root_scale" in k] == [(5,)]
    assert model.eval()(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 5)
    clone = copy.deepcopy(model)
    if name != "squeezenet1_1":
        with pytest.raises(ValueError, match="an inserted SquareSoftmin, which the new Identity cannot take over"):
            model.reset_classifier(0)
        clone.reset_classifier(7)
        assert [p.shape for k, p in clone.named_parameters() if "root_scale" in k] == [(7,)]
    assert [p.shape for k, p in model.named_parameters() if "root_scale" in k] == [(5,)]
    assert [site.channels for site in ds.sites(model) if site.kind == "logits"] == [5]
    assert not [v for m in ds.unequip(model).modules() for v in vars(m) if v.startswith("deepsquare")]


def test_frozen_batch_normalization_keeps_the_excitation(tmp_path: Path) -> None:
    model = create("resnet18", zero_init_residual=True)
    parts(model).fc = nn.Linear(512, 3)
    x = images(2, 32)
    tuned(recalibrate_batchnorm(equip_quietly(model, "excitation"), [images(4, 32)])).eval()
    expected, state = model(x), copied_state(model)
    timm.utils.freeze(model)
    assert isinstance(model.get_submodule("layer1.0.bn2"), FrozenBatchNorm2d)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    frozen = copied_state(model)
    assert {key for key in state if "num_batches_tracked" not in key} == set(frozen)
    torch.testing.assert_close(ds.fold(model.eval())(x), expected, rtol=1e-4, atol=1e-5)
    ds.save(model, tmp_path / "m")
    thawed = copy.deepcopy(model)
    timm.utils.unfreeze(thawed)
    assert torch.equal(thawed.eval()(x), expected)
    assert len(ds.sites(thawed)) == len(ds.sites(model))
    base = ds.unequip(model)
    assert attached(base) == 0
    assert type(base.get_submodule("layer1.0.bn2")) is FrozenBatchNorm2d
    assert not base.get_buffer("layer1.0.bn2.weight").any()  # γ = 0 again, as before equip


REFUSED: dict[str, tuple[str, str, Callable[[], nn.Module | None], str]] = {
    "no classes": (
        "softmin",
        "fc",
        nn.Identity,
        "fc has .* SquareSoftmin, .* Identity .*: it does not say",
    ),
    "none": ("softmin", "fc", lambda: None, "SquareSoftmin, which None cannot take over"),
    "a container": ("softmin", "fc", lambda: nn.Sequential(nn.Linear(128, 2)), "its children are other layers"),
    "another pooling": ("pooling", "pool", lambda: nn.AdaptiveMaxPool2d(1), "pool has .* not a global average"),
    "what contains it": ("square(after='layer2.conv')", "layer2", nn.ReLU, "EleSquare, which the new ReLU cannot"),
    "too narrow": ("bilinear(size=8)", "fc", lambda: nn.Linear(128, 2), "returns 64 values.* reads 128"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    spec, name, new, message = REFUSED[case]
    model = ds.equip(create("vanilla_cnn"), spec, input_shape=(3, 32, 32)).eval()
    x = images(2, 32)
    expected, modules = model(x), dict(model.named_modules())
    with pytest.raises(ValueError, match=message) as error:
        setattr(model, name, new())
    assert "deepsquare.unequip(model) before you replace" in str(error.value)
    assert dict(model.named_modules()) == modules
    assert torch.equal(model(x), expected)
    setattr(ds.unequip(model), name, new())


def test_a_wider_classifier_for_other_classes() -> None:
    model = parts(ds.equip(create("vanilla_cnn"), "bilinear(size=8)"))
    model.fc = nn.Linear(model.fc.in_features, 7)
    assert model(images(2, 32)).shape == (2, 7)
    with pytest.raises(ValueError, match="returns 64 values"):
        model.fc = nn.Linear(128, 7)
    ds.unequip(model).fc = nn.Linear(128, 2)


def test_what_is_not_a_loss() -> None:
    """A layer wrapped by another one, the same layer again, and equipped models that change places."""
    model = parts(ds.equip(create("vanilla_cnn"), "pooling+softmin").eval())
    x = images(2, 32)
    expected, fc, pool = model(x), model.fc, model.pool
    model.fc = nn.Sequential(fc, nn.Identity())
    assert torch.equal(model(x), expected)
    model.fc = fc
    model.pool = nn.AdaptiveAvgPool2d(1)
    model.pool = pool
    assert torch.equal(model(x), expected)
    assert len(ds.sites(model)) == 2
    holder = nn.Module()
    holder.model = model
    holder.model = create("vanilla_cnn")
    holder.model = nn.Sequential(model)
    holder.model = nn.Identity()
    assert torch.equal(model(x), expected)


def test_a_new_classifier_where_nothing_is_inserted_is_in_the_sites() -> None:
    model = parts(ds.equip(create("vanilla_cnn"), "pooling"))
    model.fc = nn.Linear(128, 4)
    assert [site.shape for site in ds.sites(model) if site.kind == "logits"] == [(4,)]
    record = equip_record(model)
    assert record is not None
    assert record.sites == ds.sites(model)
