"""Fused blocks act as their block is written: whatever it reads, draws, refuses or is given later."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import create, images, tuned
from test_block_ends import Plus, Written, around
from test_blocks import fused as fused
from test_blocks import made, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepsquare as ds
from deepsquare import kernels
from deepsquare.kernels import cpu
from deepsquare.surgery.blocks import fuse_plain_blocks

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")
TWICE = False


def doubled(x: Tensor) -> Tensor:
    return 2 * x if TWICE else x


class ReadsGlobals(Written):
    power = 1

    def last(self, x: Tensor) -> Tensor:
        return doubled(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(x + self.norm(self.branch(x)))) * self.power


class ReadsMore(ReadsGlobals):
    pass


class Drops(Written):
    """Stochastic depth, by one generator or another."""

    draw = staticmethod(random.random)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.draw() < 0.5:
            return torch.relu(x)
        return torch.relu(x + self.norm(self.branch(x)))


class DropsByTorch(Drops):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1) < 0.5:
            return torch.relu(x)
        return torch.relu(x + self.norm(self.branch(x)))


@pytest.mark.parametrize("block", [Drops, DropsByTorch])
def test_random_numbers_are_drawn_at_every_call(block: type[Written], fused: list[Tensor]) -> None:
    model, x = tuned(ds.equip(around(block()).eval(), "excitation")).train(), images()
    random.seed(0)
    torch.manual_seed(0)
    norm: Any = model.get_submodule("1.norm")
    before = int(norm.num_batches_tracked)
    for _ in range(100):
        model(x)
    assert 25 < int(norm.num_batches_tracked) - before < 75
    fused.clear()
    with torch.no_grad():
        model.eval()(x)
    assert len(fused) == 1  # in inference it draws none


def test_globals_and_values_of_the_class_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tuned(ds.equip(around(ReadsMore()), "excitation")).eval(), images()
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setitem(globals(), "TWICE", True),
        lambda: monkeypatch.setattr(ReadsGlobals, "power", 3),
        lambda: monkeypatch.setattr(ReadsMore, "power", 5, raising=False),
        lambda: monkeypatch.setattr(ReadsGlobals, "last", lambda self, x: x + 1),
        lambda: monkeypatch.setitem(globals(), "doubled", lambda x: x - 1),
    ]
    with torch.no_grad():
        for change in (lambda: None, *changes):
            change()
            y = model(x)
            with kernels.without_kernels():
                torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_a_parametrization_after_equip(training: bool) -> None:
    """Its class is a subclass by PyTorch, in which the excitation must not act twice."""
    model, x = made(), images()
    model(x)
    nn.utils.parametrize.register_parametrization(model.get_submodule("layer1.0.bn2"), "weight", nn.Identity())
    found = step(copy.deepcopy(model.train(training)), x)
    with kernels.without_kernels():
        expected = step(model, x)
    for ours, plain in zip(found, expected, strict=True):
        assert (ours - plain).norm() <= 1e-3 * plain.norm() + 1e-6


def test_other_defaults_of_dtype_and_device(fused: list[Tensor]) -> None:
    model, x = made(), images()
    expected = step(copy.deepcopy(model), x)
    for dtype, device in ((torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")):
        copied = copy.deepcopy(model)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                assert all(map(torch.equal, step(copied, x), expected))
        finally:
            torch.set_default_dtype(torch.float32)
    shuffled = made("shufflenet_v2_x0_5").eval()
    fused.clear()
    with torch.no_grad():
        y = shuffled(x)
        with torch.device("meta"):
            assert torch.equal(shuffled(x), y)
    assert len(fused) == 32


def test_a_weight_that_is_no_parameter() -> None:
    model, x = ds.recalibrate_batchnorm(made(), [images()]).eval(), images()
    norm: Any = model.get_submodule("layer1.0.bn2")
    for register in (True, False):
        del norm.weight
        if register:
            norm.register_buffer("weight", torch.rand(64) + 0.5)
        else:
            norm.weight = torch.rand(64) + 0.5
        with torch.no_grad():
            y = model(x)
            with kernels.without_kernels():
                torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)


def test_a_shortcut_of_another_type_under_autocast() -> None:
    model, x = tuned(ds.equip(around(Plus()), "excitation")), images()
    model.get_submodule("1").shortcut = None  # type: ignore[assignment]
    model[0] = nn.Identity()  # type: ignore[operator]
    x = torch.randn(2, 8, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        with kernels.without_kernels():
            torch.testing.assert_close(y, model(x), rtol=0.05, atol=0.05)
    y.float().sum().backward()


def test_two_modes_in_one_graph() -> None:
    """The running statistics keep their version, as by PyTorch's normalization."""
    model, x = made(), images()
    (model.eval()(x).sum() + model.train()(x + 1).sum() + model.eval()(x).sum()).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_updates_its_statistics_as_the_others(reentrant: bool) -> None:
    block: Any = made().get_submodule("layer1.0")
    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    plain = copy.deepcopy(block)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    with kernels.without_kernels():
        checkpoint(plain, x, use_reentrant=reentrant).sum().backward()
    for ours, other in zip(block.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, other)
    assert block.bn1.num_batches_tracked == block.bn2.num_batches_tracked


def test_what_the_normalization_refuses_is_refused() -> None:
    block = Plus()
    block.branch, block.shortcut = nn.Sequential(nn.Conv2d(8, 8, 1)), None
    assert fuse_plain_blocks(nn.Sequential(block)) == 1
    for training in (True, False):
        block.train(training)
        with pytest.raises(ValueError, match="expected 4D input"):
            block(torch.randn(8, 8, 8))
        with torch.no_grad(), pytest.raises(ValueError, match="expected 4D input"):
            block(torch.randn(8, 8, 8))
    block.train().norm.eps = 0
    with pytest.raises((ValueError, RuntimeError), match="eps"):
        block(torch.randn(2, 8, 8, 8))


def test_equip_after_fuse_plain_blocks(fused: list[Tensor]) -> None:
    model, x = create("resnet18", num_classes=5), images()
    assert fuse_plain_blocks(model) == 8
    assert fuse_plain_blocks(model) == 0
    equipped = tuned(ds.equip(model, "excitation")).eval()
    fused.clear()
    with torch.no_grad():
        y = equipped(x)
        assert len(fused) == 8
        with kernels.without_kernels():
            torch.testing.assert_close(y, equipped(x), rtol=1e-4, atol=1e-5)
