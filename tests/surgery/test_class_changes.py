"""What gives modules another class after equip: parametrizations and ``fully_shard``; and pruning."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import attached, create, equip_quietly, images, tuned
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import deepsquare as ds
from deepsquare.training.distributed import end_process_group


def parametrized(model: Any) -> Any:
    """Its classifier and a convolution, which are sites below."""
    torch.manual_seed(1)  # for the power iteration of the spectral norm
    parametrizations.weight_norm(model.fc)
    parametrizations.spectral_norm(model.layer3.conv)
    return model.eval()


def test_parametrized_after_equip(tmp_path: Path) -> None:
    x, spec = images(2, 32), "softmin(scale='channel')+square(after='layer3.conv')"
    base = parametrized(create("vanilla_cnn"))
    model = parametrized(tuned(ds.equip(create("vanilla_cnn"), spec)))
    output = model(x)
    last, root = base.layer3, model.fc.deepsquare_softmin.root_scale
    squared = F.relu(last.bn(last.conv(base.layer2(base.layer1(x))).square()))
    torch.testing.assert_close(output, -(root * base.fc(squared.mean((2, 3)))).square())
    clone = copy.deepcopy(model)
    assert torch.equal(clone(x), output)
    torch.testing.assert_close(ds.fold(model)(x), output)  # √s is not merged into a weight that is computed
    ds.save(model, tmp_path / "m")
    assert ds.load_weights(parametrized(ds.equip(create("vanilla_cnn"), spec)), tmp_path / "m") == []
    plain = ds.unequip(clone)
    assert attached(plain) == 0
    assert parametrize.is_parametrized(plain.fc)
    assert [c.__name__ for c in type(plain.fc).__mro__][:3] == ["ParametrizedLinear", "Linear", "Module"]
    assert torch.equal(plain(x), base(x))
    assert torch.equal(model(x), output)
    for net in (plain, model):
        parametrize.remove_parametrizations(net.fc, "weight")
        assert isinstance(net.fc.weight, nn.Parameter)
    assert type(plain.fc) is nn.Linear
    torch.testing.assert_close(plain(x), base(x))
    torch.testing.assert_close(model(x), output)
    assert type(ds.unequip(model).fc) is nn.Linear


def test_parametrized_and_replaced() -> None:
    model: Any = ds.equip(create("vanilla_cnn"), "softmin")
    parametrizations.weight_norm(model.fc)
    old = model.fc
    model.fc = nn.Linear(128, 3)
    assert list(model.fc._modules) == ["deepsquare_softmin"]
    assert list(old._modules) == ["parametrizations"]
    parametrize.remove_parametrizations(old, "weight")
    assert type(old) is nn.Linear


@pytest.mark.parametrize("how", ["parametrized", "pruned"])
def test_a_wider_layer_without_its_parameter(how: str) -> None:
    model: Any = ds.equip(create("vanilla_cnn"), "bilinear(size=8)").eval()
    x = images(2, 32)
    if how == "parametrized":
        parametrizations.weight_norm(model.fc)
    else:
        prune.l1_unstructured(model.fc, "weight", 0.5)  # type: ignore[no-untyped-call]
    expected = model(x)
    with pytest.raises(ValueError, match=r"fc.weight is no nn.Parameter any more.*prune.remove first"):
        ds.unequip(model)
    assert torch.equal(model(x), expected)
    if how == "parametrized":
        parametrize.remove_parametrizations(model.fc, "weight")
    else:
        prune.remove(model.fc, "weight")  # type: ignore[no-untyped-call]
    assert ds.unequip(model)(x).shape == (2, 10)


def test_pruned(tmp_path: Path) -> None:
    model: Any = ds.equip(create("cifar"), "pooling+excitation+encoding", input_shape=(3, 32, 32)).eval()
    x, block = images(2, 32), model.layer1[0]
    for layer, amount in ((block.conv2, 0.5), (block.bn2, 0.25), (model.linear, 0.5)):
        prune.random_unstructured(layer, "weight", amount)  # type: ignore[no-untyped-call]
    expected = model(x)
    ds.save(model, tmp_path / "m")
    for layer in (block.conv2, block.bn2, model.linear):
        prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert type(ds.unequip(model).layer1[0].bn2) is nn.BatchNorm2d


# Two processes.

SHARDED = "pooling+softmin(scale='channel')+excitation"


def sharded_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole: Any = tuned(equip_quietly(create("timm/test_resnet"), SHARDED, init="identity")).eval()
    model = copy.deepcopy(whole)
    mesh, x = init_device_mesh("cpu", (2,)), images(4, 64)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = slice(2 * rank, 2 * rank + 2)
    labels, logits, expected = torch.arange(4), model(x[own]), whole(x)
    torch.testing.assert_close(logits, expected[own])
    torch.autograd.backward(F.cross_entropy(logits, labels[own]))
    torch.autograd.backward(F.cross_entropy(expected, labels))
    wanted = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[key].grad, rtol=1e-3, atol=1e-6)
    assert "SquareExcitation(alpha=?)" in repr(model)  # a shard of α may be empty
    for use in (ds.unequip, ds.fold, lambda m: ds.save(m, f"{folder}/m"), lambda m: ds.equip(m, "gem")):
        with pytest.raises(ValueError, match=r"needs whole parameters, and those of this FSDPResNet are sharded; call"):
            use(model)
    assert len(ds.sites(model)) == len(ds.sites(whole))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    expected, options = model(x), StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: dict[str, Any] = get_model_state_dict(model, options=options)  # empty in the second process
    if rank == 0:
        whole.load_state_dict(full)
        assert list(full) == list(whole.state_dict())
        torch.testing.assert_close(whole(x), expected)
        ds.save(whole, f"{folder}/m")
        torch.save({"x": x, "logits": whole(x).detach()}, f"{folder}/expected")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    torch.testing.assert_close(model(x), expected)
    end_process_group()


def test_fully_shard(tmp_path: Path) -> None:
    spawn(sharded_worker, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    model = equip_quietly(create("timm/test_resnet"), SHARDED, init="identity").eval()
    assert ds.load_weights(model, tmp_path / "m") == []
    stored: dict[str, Tensor] = torch.load(tmp_path / "expected")
    assert torch.equal(model(stored["x"]), stored["logits"])
