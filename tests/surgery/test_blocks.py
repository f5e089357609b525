"""Residual blocks with the end in one pass: the same outputs, gradients and life as the block written out."""

import copy
import io
from typing import Any

import pytest
import torch
from helpers.models import create, equip_quietly, images, tuned
from torch import Tensor, nn

import deepsquare as ds
from deepsquare import kernels
from deepsquare.kernels import cpu
from deepsquare.nn import SquareExcitation
from deepsquare.surgery.blocks import FusedBlock

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")
MODELS = ["resnet18", "resnet50", "timm/resnet18", "timm/resnet26d"]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The results of the ends that ran in one pass."""
    results: list[Tensor] = []
    launch, block_end, block_training = cpu.launch, cpu.block_end, cpu.block_training

    def recorded(kernel: cpu.Kernel, *args: Any, **kwargs: Any) -> None:
        launch(kernel, *args, **kwargs)
        if kernel is cpu.Kernel.EXCITE_ADD_RELU:
            results.append(kwargs["y"])

    def recorded_end(kernel: cpu.Kernel, z: Tensor, shortcut: Tensor, y: Tensor, *args: Any) -> None:
        block_end(kernel, z, shortcut, y, *args)
        results.append(y)

    def recorded_training(z: Tensor, *, y: Tensor, **kwargs: Any) -> bool:
        computed = block_training(z, y=y, **kwargs)
        if computed and kwargs.get("grad") is None:
            results.append(y)
        return computed

    monkeypatch.setattr(cpu, "block_training", recorded_training)
    monkeypatch.setattr(cpu, "launch", recorded)
    monkeypatch.setattr(cpu, "block_end", recorded_end)
    return results


def made(name: str = "resnet18", spec: str = "excitation", **arguments: Any) -> Any:
    return tuned(equip_quietly(create(name, num_classes=5, **arguments), spec))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss and every gradient of a training step."""
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_block_written_out(name: str, fused: list[Tensor]) -> None:
    x = images()
    model = ds.recalibrate_batchnorm(made(name, "pooling+excitation"), [x]).eval()
    blocks = sum(isinstance(module, FusedBlock) for module in model.modules())
    assert blocks == len(ds.sites(model).of_kind("branch_end"))
    with torch.no_grad():
        fused.clear()
        y, ends = model(x), len(fused)
        with kernels.without_kernels():
            torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
    assert ends == blocks == len(fused)
    model.train()
    exact = step(copy.deepcopy(model).double(), x.double())
    fused.clear()
    one_pass = step(copy.deepcopy(model), x)
    assert len(fused) == blocks
    with kernels.without_kernels():
        written_out = step(copy.deepcopy(model), x)
    assert len(exact) == len(one_pass) == len(written_out) == 1 + len(list(model.parameters()))
    # How much the network amplifies rounding: each weight rounded once, all else in float64. A step in float32 also
    # rounds the maps, sums and statistics of every layer, forward and backward. These errors add up as their root mean
    # square: 30 allows for 900 of them per layer.
    tolerance = 30 * relative_errors(step(with_rounded_weights(model), x.double()), exact)[0]
    one_pass_errors, written_out_errors = (relative_errors(values, exact) for values in (one_pass, written_out))
    assert max(one_pass_errors[0], written_out_errors[0]) <= tolerance
    # Every gradient for itself: the two forms round equally often, so that neither is much farther off than the other.
    assert max(one_pass_errors) <= 2 * max(written_out_errors)


def relative_errors(values: list[Tensor], exact: list[Tensor]) -> list[float]:
    """‖value − exact‖ / ‖exact‖, of all together and then of each."""
    pairs = [(torch.cat([v.flatten() for v in values]), torch.cat([e.flatten() for e in exact]))]
    pairs += zip(values, exact, strict=True)
    return [float((value.double() - expected).norm() / expected.norm()) for value, expected in pairs]


def with_rounded_weights(model: nn.Module) -> nn.Module:
    """A copy in float64 whose weights are changed, up or down at random, by half a unit in float32's last place."""
    rounded = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in rounded.parameters():
            weight.mul_(1 + 2**-24 * (2 * torch.randint(2, weight.shape, generator=generator) - 1))
    return rounded


def test_unequip_gives_the_classes_back() -> None:
    model = create("resnet18")
    classes = [type(module) for module in model.modules()]
    ds.unequip(equip_quietly(model, "excitation"))
    assert [type(module) for module in model.modules()] == classes


def test_copies_pickles_and_folds(fused: list[Tensor]) -> None:
    x = images()
    model = ds.recalibrate_batchnorm(made(), [x]).eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # written a moment ago
    with torch.no_grad():
        y = model(x)
        for other in (copy.deepcopy(model), loaded, ds.fold(model)):
            fused.clear()
            torch.testing.assert_close(other(x), y, rtol=1e-4, atol=1e-5)
            assert len(fused) == 8


@pytest.mark.parametrize("which", ["norm", "excitation", "relu", "all"])
def test_hooks_are_called(which: str, fused: list[Tensor]) -> None:
    model = made().eval()
    block: Any = model.get_submodule("layer1.0")
    seen: list[Tensor] = []

    def hook(module: nn.Module, _: Any, output: Tensor) -> None:
        if module in (block.bn2, block.bn2.deepsquare_excitation, block.relu):
            seen.append(output)

    if which == "all":
        handle = nn.modules.module.register_module_forward_hook(hook)
    else:
        at = {"norm": block.bn2, "excitation": block.bn2.deepsquare_excitation, "relu": block.relu}
        handle = at[which].register_forward_hook(hook)
    try:
        with torch.no_grad():
            model(images())
    finally:
        handle.remove()
    assert seen
    assert len(fused) == (0 if which == "all" else 7), "the other blocks go on"


def test_blocks_with_a_drop_path_are_left_as_they_are(fused: list[Tensor]) -> None:
    model = made("timm/resnet18", drop_path_rate=0.1)
    with torch.no_grad():
        model(images())
        assert len(fused) == 1, "the first block has no drop path"
        ds.fold(model.eval())(images())
    assert len(fused) == 1 + 8, "folded, no block has one"


def test_compiled_and_exported_without_it(fused: list[Tensor]) -> None:
    x = images()
    model: nn.Module = ds.recalibrate_batchnorm(made(), [x]).eval()
    with torch.no_grad():
        y = model(x)
        fused.clear()
        program: Any = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(program(x), y, rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), y, rtol=1e-4, atol=1e-5)
    assert not fused


def test_autocast(fused: list[Tensor]) -> None:
    x = images()
    model = ds.recalibrate_batchnorm(made(), [x]).eval()
    with torch.autocast("cpu", torch.bfloat16):
        fused.clear()
        y = model(x)
        assert len(fused) == 8
        with kernels.without_kernels():
            torch.testing.assert_close(y, model(x), rtol=0.1, atol=0.1)


def test_another_excitation_is_called(fused: list[Tensor]) -> None:
    class Silent(SquareExcitation):
        def forward(self, x: Tensor, beta: Tensor | None = None) -> Tensor:
            return x * 0

    model = made().eval()
    model.get_submodule("layer1.0.bn2.deepsquare_excitation").__class__ = Silent
    vars(model.get_submodule("layer1.1.bn2.deepsquare_excitation"))["forward"] = lambda x: x * 0
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    assert len(fused) == 8 - 2
