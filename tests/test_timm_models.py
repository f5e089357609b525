"""The registered networks under timm's API, against torchvision's networks with the same weights and the equations."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.optim
import timm.utils
import torch
from helpers.models import images, square_pooled, tuned
from timm.models import PretrainedCfg
from torch import Tensor, nn
from torch.nn import functional as F

import deepsquare as ds
from deepsquare.models import NETWORKS, Network
from deepsquare.surgery import EquipRecord, equip_record, is_spec_key
from deepsquare.timm_models import timm_name

IDS = [network.name for network in NETWORKS]
BASES = ["resnet18", "resnet50", "shufflenet_v2_x1_0", "shufflenet_v2_x0_5"]
STAGES = {  # of torchvision's networks, in the order of timm's feature_info
    "resnet": ("relu", "layer1", "layer2", "layer3", "layer4"),
    "shufflenet": ("conv1", "maxpool", "stage2", "stage3", "stage4"),
}
FEW = ["resnet18_softmin", "resnet18_pooling_excitation", "resnet50_pooling_excitation",
       "shufflenet_v2_x0_5_pooling", "shufflenet_v2_x1_0_softmin", "shufflenet_v2_x1_0_pooling_excitation"]  # fmt: skip


def create(name: str, **kwargs: Any) -> Any:
    return timm.create_model(name, **kwargs)


def record_of(model: nn.Module) -> EquipRecord:
    record = equip_record(model)
    assert record is not None
    return record


def ready(model: nn.Module) -> Any:
    """In float64, and with batch statistics: with running ones the squares of an untrained model overflow."""
    return tuned(model).double().train()


def made(name: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return ready(create(f"deepsquare_{name}", **kwargs))


def inputs() -> Tensor:
    return images(2, seed=1).double()


def pooled(spec: str, features: Tensor) -> Tensor:
    return square_pooled(features) if "pooling" in spec else features.mean((2, 3))


def classified(model: Any, spec: str, x: Tensor) -> Tensor:
    """The equations of the head: its linear layer, and Square-Softmin with the model's scale."""
    logits = F.linear(x, model.fc.weight, model.fc.bias)
    return -((model.fc.deepsquare_softmin.root_scale * logits) ** 2) if "softmin" in spec else logits


@pytest.mark.parametrize("network", NETWORKS, ids=IDS)
@torch.no_grad()
def test_every_network_is_torchvisions_with_the_same_weights(network: Network) -> None:
    reference = ready(ds.create_model(f"torchvision/{network.model}", network.spec, num_classes=5))
    model = create(timm_name(network.model, network.spec), num_classes=5).double()
    assert list(model.load_state_dict(reference.state_dict())) == [[], []]
    torch.testing.assert_close(model(inputs()), reference(inputs()))
    maps: list[Tensor] = []
    for name in next(names for kind, names in STAGES.items() if network.model.startswith(kind)):
        reference.get_submodule(name).register_forward_hook(lambda module, args, out: maps.append(out.clone()))
    reference(inputs())
    final, intermediates = model.forward_intermediates(inputs())
    for ours, theirs, info in zip(intermediates, maps, model.feature_info, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert (info["num_chs"], 64 // info["reduction"]) == theirs.shape[1:3]
    torch.testing.assert_close(final, model.forward_features(inputs()))


@pytest.mark.parametrize("network", NETWORKS, ids=IDS)
@torch.no_grad()
def test_the_methods_agree_with_each_other_and_with_the_equations(network: Network) -> None:
    model, spec = made(timm_name(network.model, network.spec).removeprefix("deepsquare_"), num_classes=5), network.spec
    out, features = model(inputs()), model.forward_features(inputs())
    embedding = model.forward_head(features, pre_logits=True)
    assert embedding.shape == (2, model.num_features)
    assert model.num_features == model.head_hidden_size
    torch.testing.assert_close(embedding, pooled(spec, features))
    torch.testing.assert_close(out, classified(model, spec, embedding))
    torch.testing.assert_close(model.forward_head(features), out)
    assert model.get_classifier() is model.get_submodule(model.get_classifier(name_only=True))

    model.reset_classifier(0)
    torch.testing.assert_close(model(inputs()), embedding)
    if spec:
        assert not ds.sites(model).of_kind("logits")
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(inputs()), features)
    model.reset_classifier(7)
    assert model.num_classes == 7
    torch.testing.assert_close(model(inputs()), classified(model, spec, embedding))
    record = equip_record(model)
    assert (record.spec if record else "") == spec
    assert type(record).__name__ in ("EquipRecord", "NoneType")
    assert [site.shape for site in ds.sites(model) if site.kind == "logits"] == [(7,)]


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_a_model_built_without_a_classifier_or_pooling(name: str) -> None:
    whole, embeds, maps = made(name), made(name, num_classes=0), made(name, num_classes=0, global_pool="")
    shared = {k: value for k, value in whole.state_dict().items() if not k.startswith("fc.") and not is_spec_key(k)}
    for model in (embeds, maps):
        assert set(model.state_dict()) == set(shared)
        model.load_state_dict(shared)
    features = whole.forward_features(inputs())
    torch.testing.assert_close(maps(inputs()), features)
    torch.testing.assert_close(embeds(inputs()), pooled(name, features))


def test_a_new_head_keeps_the_parameters_of_the_blocks_and_can_be_unequipped() -> None:
    model = made("resnet18_pooling_excitation")
    alphas = [p for key, p in model.named_parameters() if "deepsquare_" in key]
    model.reset_classifier(3)
    model.reset_classifier(0)
    model.reset_classifier(4)
    assert [id(p) for key, p in model.named_parameters() if "deepsquare_" in key] == list(map(id, alphas))
    model.eval().reset_classifier(4, "")
    model.reset_classifier(4)
    assert not any(module.training for module in model.modules())
    x, features = inputs(), model.forward_features(inputs())
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same.reset_classifier(0)
        torch.testing.assert_close(same(x), square_pooled(features))
        same.reset_classifier(0, "")
        assert record_of(same).spec == "excitation"
        same.reset_classifier(4)
        assert str(ds.sites(same)) == str(ds.sites(model))
    ds.unequip(model)
    assert not [key for key in model.state_dict() if "deepsquare_" in key]
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), model.forward_features(x).mean((2, 3)))


@torch.no_grad()
def test_terms_that_wait_for_a_head() -> None:
    model = create("deepsquare_shufflenet_v2_x0_5", num_classes=5)
    ds.equip(model, "gem(p=2)+softmin(scale='channel')", init="identity", dropout=0.2)
    learned = ready(model).eval().global_pool.pool.deepsquare_gem.p
    model.reset_classifier(4)
    assert model.global_pool.pool.deepsquare_gem.p is learned
    model.reset_classifier(0, "")
    record = record_of(model)
    assert (record.spec, record.dropout) == ("", None)
    assert record.sites.missing == {"logits": "fc is removed", "pooling": "global_pool='' is no average"}
    ds.unequip(copy.deepcopy(model))
    model.reset_classifier(7)
    record = record_of(model)
    assert (record.spec, record.dropout) == ("gem(p=2)+softmin(scale='channel')", 0.2)
    assert ds.sites(model).classifier == "fc"
    assert model.fc.deepsquare_softmin.root_scale.shape == (7,)
    assert model.fc.deepsquare_dropout.p == 0.2
    assert {key for key in model.state_dict() if key.endswith(".beta")} == {
        "global_pool.pool.deepsquare_gem.beta",
        "fc.deepsquare_softmin.beta",
    }
    embedding = model.forward_features(inputs()).mean((2, 3))  # β = 0: the base model
    torch.testing.assert_close(model(inputs()), F.linear(embedding, model.fc.weight, model.fc.bias))


def test_other_poolings() -> None:
    with pytest.raises(ValueError, match=r"global_pool='max' has no average for the term pooling.*'avg', or ''"):
        create("deepsquare_resnet18_pooling", global_pool="max")
    model = made("shufflenet_v2_x0_5_pooling")
    with pytest.raises(ValueError, match="global_pool='catavgmax'"):
        model.reset_classifier(5, "catavgmax")
    ds.sites(model)
    model = made("resnet18_excitation", global_pool="max")
    features = model.forward_features(inputs())
    torch.testing.assert_close(model(inputs()), model.fc(features.amax((2, 3))))
    assert "global_pool='max'" in ds.sites(model).missing["pooling"]


def test_a_pooling_that_widens_the_classifier_is_refused() -> None:
    model = ds.equip(create("deepsquare_shufflenet_v2_x0_5", num_classes=3), "bilinear(size=8)")
    with pytest.raises(ValueError, match=r"cannot keep the term bilinear\(size=8\).*call unequip\(model\)"):
        model.reset_classifier(5)


@pytest.mark.parametrize("name", FEW)
def test_features_only(name: str) -> None:
    whole = made(name)
    expected = whole.forward_intermediates(inputs(), intermediates_only=True)
    for indices, kind in [(range(5), "list"), ((1, 3), "list"), ((1, 3), "getter")]:
        model = create(f"deepsquare_{name}", features_only=True, out_indices=tuple(indices), feature_cls=kind).double()
        inner = model.model if kind == "getter" else model
        assert not inner.load_state_dict(whole.state_dict(), strict=False).missing_keys
        for ours, i in zip(model(inputs()), indices, strict=True):
            torch.testing.assert_close(ours, expected[i])
        assert model.feature_info.channels() == [expected[i].shape[1] for i in indices]
        assert model.feature_info.reduction() == [2 ** (i + 1) for i in indices]
        acting = {key.split("deepsquare_")[1].split(".")[0] for key in model.state_dict() if "deepsquare_" in key}
        assert acting == ({"excitation"} if "excitation" in name else set())
    stages = {site.path.split(".")[0] for site in ds.sites(inner)}  # of the last one, which is pruned
    assert stages == ({"layer1", "layer2", "layer3"} if "resnet" in name else {"stage2", "stage3"})
    early = whole.forward_intermediates(inputs(), indices=[1], stop_early=True)
    torch.testing.assert_close(early, (expected[1], [expected[1]]))


@pytest.mark.parametrize("name", ["resnet18_pooling", "shufflenet_v2_x0_5_pooling"])
def test_input_channels_and_weights_from_a_file(name: str, tmp_path: Path) -> None:
    path, first = tmp_path / "weights.safetensors", "conv1" if name.startswith("resnet") else "conv1.0"
    assert made(name, in_chans=6)(images(2).double().repeat(1, 2, 1, 1)).shape == (2, 1000)
    whole = create(f"deepsquare_{name}")
    ds.save(whole, path)
    overlay = {"file": str(path)}
    model = create(f"deepsquare_{name}", pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, num_classes=5)
    gray = model.get_submodule(first).weight
    torch.testing.assert_close(gray, whole.get_submodule(first).weight.sum(1, keepdim=True))
    assert tuple(model.fc.weight.shape) == (5, whole.num_features)
    assert record_of(model).sites.input_shape == (1, 224, 224)


@pytest.mark.parametrize("name", ["resnet18_softmin", "shufflenet_v2_x0_5_pooling"])
def test_dropout_before_the_classifier(name: str) -> None:
    model = made(name, drop_rate=0.25).eval()
    features = torch.rand(4, model.num_features, 2, 2, dtype=torch.float64)
    kept = model.forward_head(features, pre_logits=True)
    dropped = model.train().forward_head(features, pre_logits=True)
    zero = dropped == 0
    torch.testing.assert_close(dropped[~zero], kept[~zero] / 0.75)
    assert 0.2 < zero.double().mean() < 0.3


def test_drop_path() -> None:
    model, plain = made("resnet18_excitation", drop_path_rate=0.7).eval(), made("resnet18_excitation").eval()
    rates = [
        getattr(block.drop_path, "drop_prob", 0) for i in range(1, 5) for block in model.get_submodule(f"layer{i}")
    ]
    assert rates == pytest.approx([0.1 * i for i in range(8)])
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(inputs()), plain(inputs()))
    block = model.layer4[1].train()
    block.drop_path.drop_prob = 1.0
    x = torch.rand(2, 512, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(block(x), x)  # the branch is dropped, with its excitation
    with pytest.raises(TypeError, match="drop_path_rate"):
        create("deepsquare_shufflenet_v2_x0_5_pooling", drop_path_rate=0.1)


@pytest.mark.parametrize("name", FEW)
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    gradients = []
    for enable in (False, True):
        model = made(name)
        model.set_grad_checkpointing(enable)
        assert model.grad_checkpointing == enable
        model(inputs()).square().sum().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["resnet18_pooling_excitation", "shufflenet_v2_x1_0_pooling_excitation"])
def test_layer_decay_groups_a_block_with_its_excitation(name: str) -> None:
    model = create(f"deepsquare_{name}")
    groups = timm.optim.param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {key: scale[id(p)] for key, p in model.named_parameters()}
    sites = ds.sites(model).of_kind("branch_end")
    found = [scales[f"{site.path}.deepsquare_excitation.alpha"] for site in sites]
    assert found == [next(s for key, s in scales.items() if key.startswith(f"{site.block}.")) for site in sites]
    assert found == sorted(set(found)), "each block is a layer"
    assert scales["fc.weight"] == 1
    assert scales.get("conv5.0.weight", found[-1]) == found[-1]
    assert min(scales.values()) == scales[next(iter(scales))] < found[0]


@pytest.mark.parametrize("name", ["resnet18", "resnet18_excitation"])
def test_every_branch_of_a_resnet_starts_with_gamma_1(name: str) -> None:
    model = create(f"deepsquare_{name}")
    assert all(bool((m.weight == 1).all()) for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert name == "resnet18" or record_of(model).reset_gammas == ()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["deepsquare_resnet18", "deepsquare_shufflenet_v2_x0_5"])
def test_the_base_networks_can_be_scripted(name: str) -> None:
    model = create(name, num_classes=3).eval()
    torch.testing.assert_close(torch.jit.script(model)(images()), model(images()))


def test_timms_moving_average_follows_the_parameters_of_the_techniques() -> None:
    model = made("shufflenet_v2_x1_0_pooling_excitation", num_classes=3)
    ema = timm.utils.ModelEmaV3(model, decay=0.75)
    optimizer = timm.optim.create_optimizer_v2(model, "sgd", lr=0.1, layer_decay=0.9)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    model(inputs()).logsumexp(1).sum().backward()
    optimizer.step()
    ema.update(model)
    averages = dict(ema.module.named_parameters())
    moved = [key for key, p in model.named_parameters() if "deepsquare_" in key and not torch.equal(p, before[key])]
    assert len(moved) == 16
    for key, p in model.named_parameters():
        torch.testing.assert_close(averages[key], 0.75 * before[key] + 0.25 * p)
    assert str(ds.sites(ema)) == str(ds.sites(model))


def test_the_configuration_is_timms() -> None:
    for network in NETWORKS:
        name = timm_name(network.model, network.spec)
        assert timm.get_pretrained_cfg_value(name, "architecture") == name
        with torch.device("meta"):
            model = create(name, num_classes=7)
        cfg = PretrainedCfg(**model.pretrained_cfg)
        assert model.default_cfg is model.pretrained_cfg
        assert (cfg.architecture, cfg.num_classes, cfg.pool_size, cfg.has_weights) == (name, 1000, (7, 7), None)
        assert {f"{cfg.first_conv}.weight", f"{cfg.classifier}.weight"} <= model.state_dict().keys()
    config = timm.data.resolve_data_config({}, model=model)
    assert config["input_size"] == (3, 224, 224)
    assert config["mean"] == (0.485, 0.456, 0.406)
    assert config["std"] == (0.229, 0.224, 0.225)
    assert round(224 / config["crop_pct"]) == 256
    with pytest.raises(RuntimeError, match=r"No pretrained weights exist for deepsquare_resnet18_pooling"):
        create("deepsquare_resnet18_pooling", pretrained=True)


@pytest.mark.parametrize("name", ["resnet18_pooling_excitation", "shufflenet_v2_x0_5_pooling"])
@torch.no_grad()
def test_files_of_timm_and_of_deepsquare(name: str, tmp_path: Path) -> None:
    name = f"deepsquare_{name}"
    model = ready(create(name, num_classes=5, in_chans=1)).float().eval()
    timm.models.save_for_hf(model, str(tmp_path / "hub"), model_args={"num_classes": 5, "in_chans": 1})
    ds.save(model, tmp_path / "model.safetensors")
    weights = tmp_path / "hub" / "pytorch_model.bin"
    x = images(2)[:, :1]
    for loaded in (
        create(name, num_classes=5, in_chans=1, checkpoint_path=str(weights)),
        create(f"local-dir:{tmp_path / 'hub'}", pretrained=True),
        ds.load(tmp_path / "model.safetensors"),
    ):
        torch.testing.assert_close(loaded.eval()(x), model(x))
        assert str(ds.sites(loaded)) == str(ds.sites(model))
    model.reset_classifier(3)
    ds.save(model, tmp_path / "model.safetensors")
    torch.testing.assert_close(ds.load(tmp_path / "model.safetensors").eval()(x), model(x))


def test_load_registers_the_networks_itself(tmp_path: Path) -> None:
    ds.save(create("deepsquare_shufflenet_v2_x0_5_pooling", num_classes=3), tmp_path / "model.safetensors")
    code = "import sys, deepsquare; print(type(deepsquare.load(sys.argv[1])).__module__)"
    command = [sys.executable, "-c", code, str(tmp_path / "model.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "deepsquare.timm_models"
