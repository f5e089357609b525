"""An equipped model's life: it learns from the first step, and survives what people do to models."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.models import (
    SHAPES,
    attached,
    copied_state,
    create,
    dead,
    equip_quietly,
    images,
    own_keys,
    same_state,
    step,
    tuned,
)
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import deepsquare as ds
from deepsquare.models import NETWORKS
from deepsquare.surgery import equip_record
from deepsquare.training.distributed import end_process_group

EVERYTHING = "pooling+excitation+encoding+softmin"
ROWS = [(network.model, network.spec) for network in NETWORKS]


@pytest.mark.parametrize(("name", "spec"), ROWS)
def test_every_parameter_of_the_tables_learns(name: str, spec: str) -> None:
    torch.manual_seed(0)
    model = ds.create_model(f"torchvision/{name}", spec, num_classes=10, dropout=0.2)
    assert len(ROWS) == 20
    assert not dead(step(model, images(4)))


@pytest.mark.parametrize(("name", "spec"), [row for row in ROWS if row[0].startswith("resnet")])
def test_every_parameter_learns_from_a_zero_initialised_residual(name: str, spec: str) -> None:
    """γ = 0 keeps the gradient of the base network's own branches at zero in the very first step; after one step of
    SGD it is not zero any more. With an excitation, γ starts at 1 instead and all learn at once.
    """
    model = equip_quietly(create(name, num_classes=10, zero_init_residual=True), spec)
    gradients = step(model, images(4))
    if "excitation" not in spec:
        assert dead(gradients)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        gradients = step(model, images(4))
    assert not dead(gradients)


# γ = 0 and an excitation keep each other at zero for ever.


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [
        ("resnet18", {"zero_init_residual": True}, 8),
        ("timm/resnet18", {}, 8),
        ("timm/seresnet18", {}, 8),  # here the branch ends in a squeeze-and-excitation, behind the γ
        ("timm/test_byobnet", {}, 4),
        ("inline", {}, 1),
    ],
)
def test_gamma_zero_is_reset_for_an_excitation(name: str, arguments: dict[str, Any], count: int) -> None:
    def zeros(model: nn.Module) -> int:
        return sum(p.ndim == 1 and not p.any() for n, p in model.named_parameters() if n.endswith("weight"))

    model = create(name, **arguments)
    assert zeros(model) == count
    with pytest.warns(UserWarning, match=f"{count} layers .*γ = 0"):
        ds.equip(model, "excitation")
    assert zeros(model) == 0
    assert not dead(step(model, images(4, 64)))
    assert zeros(ds.unequip(model)) == count  # nothing was trained since
    equip_quietly(model := create(name, **arguments), "excitation")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert zeros(ds.unequip(model)) == 0  # these were, and keep what they learned


def test_gamma_zero_stays_where_it_does_no_harm() -> None:
    without = ds.equip(create("resnet18", zero_init_residual=True), "pooling+softmin+encoding")
    assert not without.get_parameter("layer1.0.bn2.weight").any()
    trained = create("resnet18", zero_init_residual=True)
    for block in (
        b for stage in ("layer1", "layer2", "layer3", "layer4") for b in trained.get_submodule(stage).children()
    ):
        nn.init.normal_(
            block.get_parameter("bn2.bias")
        )  # β has moved: the branch is not zero, and a γ of zero is its own
    state = copied_state(trained)
    ds.equip(trained, "excitation")  # without a warning
    assert same_state(ds.unequip(trained), state)


def test_a_small_alpha_hardly_changes_a_trained_network() -> None:
    model, x = ds.recalibrate_batchnorm(create("resnet18"), [images(4)]).eval(), images(4)
    with torch.no_grad():
        before = model(x)
        after = ds.equip(model, "excitation(alpha=0.001)")(x)
    assert 0 < float((after - before).norm() / before.norm()) < 1e-3
    gradients = step(model, x)
    assert len(own_keys(model)) == 8
    assert all(gradients[key].abs() > 0 for key in own_keys(model))


# Copies and conversions.


def equipped(name: str = "resnet18", spec: str = EVERYTHING) -> nn.Module:
    """With sane statistics and parameters away from their start."""
    x = images(4) if name not in SHAPES else torch.randn(4, *SHAPES[name], generator=torch.Generator().manual_seed(0))
    model = equip_quietly(create(name), spec, input_shape=SHAPES.get(name))
    return ds.recalibrate_batchnorm(tuned(model), [x]).eval()


def pickled(model: nn.Module) -> nn.Module:
    clone: nn.Module = pickle.loads(pickle.dumps(model))
    return clone


def reloaded(model: nn.Module) -> nn.Module:
    present = equip_record(model)
    assert present is not None
    clone = ds.equip(create("resnet18"), present.spec).eval()
    clone.load_state_dict(model.state_dict())
    return clone


def synced(model: nn.Module) -> nn.Module:
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


CLONES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "state_dict": reloaded,
    "sync batchnorm": lambda m: synced(copy.deepcopy(m)),
    "sync batchnorm twice": lambda m: synced(synced(copy.deepcopy(m))),
    "EMA": lambda m: AveragedModel(copy.deepcopy(m)).module,
}


@pytest.mark.parametrize("how", CLONES)
def test_clones_compute_the_same(how: str) -> None:
    model, x = equipped(), images(4)
    expected, state = model(x), copied_state(model)
    clone = CLONES[how](model)
    assert attached(clone) == attached(model) == 18  # one pooling, one softmin, eight blocks with two places each
    assert torch.equal(clone(x), expected)
    assert same_state(clone, state)
    assert "sync" not in how or isinstance(clone.get_submodule("layer1.0.bn2"), nn.SyncBatchNorm)
    with torch.no_grad():
        for key in own_keys(clone):
            clone.get_parameter(key).mul_(2)
    assert not torch.allclose(clone(x), expected)  # it is the clone's own module that acts
    assert torch.equal(model(x), expected)
    base = create("resnet18").eval()
    base.load_state_dict({key: value for key, value in state.items() if "deepsquare_" not in key})
    assert torch.equal(ds.unequip(clone)(x), base(x))
    assert torch.equal(model(x), expected)


def test_timms_sync_batchnorm_conversion() -> None:
    model, x = equipped("timm/test_byobnet", "excitation"), images(4)
    count, expected = attached(model), model(x)
    converted = timm.layers.convert_sync_batchnorm(model)
    assert type(converted.stages[0][0].conv2_1x1.bn).__name__ == "SyncBatchNormAct"
    assert attached(converted) == count == 4
    assert torch.equal(converted(x), expected)
    ds.unequip(converted)
    assert attached(converted) == 0
    assert not torch.allclose(converted(x), expected)


def test_collecting_the_modules_in_a_list_does_not_move_them() -> None:
    """As one does to watch every α."""
    model, x = equipped(), images(4)
    expected = model(x)
    watched = nn.ModuleList([m for m in model.modules() if isinstance(m, ds.nn.SquareExcitation)])
    assert len(watched) == 8
    assert torch.equal(model(x), expected)


def test_wrapped_models() -> None:
    model = equipped()
    wrapped = AveragedModel(model)
    expected = wrapped(images(4))
    assert ds.sites(wrapped) == ds.sites(model)
    with pytest.raises(ValueError, match="AveragedModel"):
        ds.equip(AveragedModel(create("cifar")), "pooling")
    with pytest.raises(ValueError, match="AveragedModel"):
        ds.unequip(wrapped)
    assert torch.equal(wrapped(images(4)), expected)


def test_channels_last() -> None:
    model, x = equipped(), images(4)
    expected = model(x)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("convert_first", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision(dtype: torch.dtype, tolerance: float, convert_first: bool) -> None:
    model, x = equipped("cifar", "pooling+excitation+softmin"), images(4, 32)
    expected = model(x)
    if convert_first:
        half = ds.equip(create("cifar").to(dtype), "pooling+excitation+softmin", input_shape=(3, 32, 32)).eval()
        half.load_state_dict(model.state_dict())
    else:
        half = model.to(dtype)
    assert {p.dtype for p in half.parameters()} == {dtype}
    output = half(x.to(dtype))
    assert output.dtype == dtype
    assert (output - expected).norm() < tolerance * expected.norm()


def test_autocast() -> None:
    model, x = equipped("cifar", "pooling+excitation+softmin"), images(4, 32)
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    assert 0 < (output - expected).norm() < 0.1 * expected.norm()


def test_functional_gradients() -> None:
    model, x = equipped("cifar"), images(4, 32)
    torch.autograd.backward(F.cross_entropy(model(x), torch.arange(4)))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), torch.arange(4))

    gradients = torch.func.grad(loss)({key: p.detach() for key, p in model.named_parameters()})
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-5)


def test_feature_extraction() -> None:
    from torchvision.models.feature_extraction import create_feature_extractor

    model, x = equipped(), images(4)
    seen: list[Tensor] = []
    model.get_submodule("layer2").register_forward_hook(lambda _m, _i, y: seen.append(y))
    logits = model(x)
    features = create_feature_extractor(model, {"layer2": "map", "fc": "logits"})(x)
    # Taken apart, the blocks run as plain operations; the model's ran by kernels.
    torch.testing.assert_close(features["map"], seen[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features["logits"], logits, rtol=1e-4, atol=1e-4)


# Compilers.


def check_compiled(model: nn.Module, x: Tensor, training: bool) -> None:
    model.train(training)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-5)
    if training:
        expected = step(model, x)
        for key, gradient in step(compiled, x).items():
            wanted = expected[key.removeprefix("_orig_mod.")]
            torch.testing.assert_close(gradient, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()) + 1e-6)


@pytest.mark.parametrize(
    ("name", "spec", "training"),
    [
        ("cifar", EVERYTHING, False),
        ("cifar", EVERYTHING, True),
        ("timm/test_convnext", "gem+excitation(alpha=0.1)", True),
    ],
)
def test_compiled_without_a_graph_break(name: str, spec: str, training: bool) -> None:
    torch._dynamo.reset()
    check_compiled(equipped(name, spec), images(4, 32), training)


def test_the_base_and_the_equipped_model_compiled_in_one_process() -> None:
    """torch.compile may take one graph for two models of a class, and by default does not look at their hooks."""
    torch._dynamo.reset()
    x = images(4, 32)
    check_compiled(equipped("vanilla_cnn", ""), x, training=False)
    check_compiled(equipped("vanilla_cnn", "pooling"), x, training=False)
    check_compiled(equipped("vanilla_cnn", ""), x, training=False)


def test_equipped_after_it_was_compiled() -> None:
    torch._dynamo.reset()
    model, x = equipped("vanilla_cnn", ""), images(4, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    base = compiled(x)
    ds.equip(model, "pooling")
    torch.testing.assert_close(compiled(x), model(x))
    ds.unequip(model)
    assert torch.equal(compiled(x), base)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    model, x = equipped("vanilla_cnn", "square(after='layer1')+pooling+softmin"), images(4, 32)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "timm/test_convnext"])
def test_exported_with_a_dynamic_batch(name: str) -> None:
    model, x = equipped(name), images(4)
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-3, atol=1e-5)


# Two processes.


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = equipped("cifar")
    ddp = DistributedDataParallel(model)
    logits = ddp(images(4, 32)[2 * rank : 2 * rank + 2])
    torch.autograd.backward(F.cross_entropy(logits, torch.arange(4)[2 * rank : 2 * rank + 2]))
    assert ds.sites(ddp) == ds.sites(model)
    if rank == 0:
        torch.save({key: p.grad for key, p in model.named_parameters()}, f"{folder}/gradients")
    end_process_group()


def test_distributed_data_parallel(tmp_path: Path) -> None:
    spawn(worker, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    gradients = torch.load(tmp_path / "gradients")
    model = equipped("cifar")  # in evaluation mode, so that the halves do not see each other's statistics
    torch.autograd.backward(F.cross_entropy(model(images(4, 32)), torch.arange(4)))
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-5)
