"""Which blocks run their end in one pass, and that they compute what the block written out does."""

import copy
from typing import Any

import pytest
import torch
import torchvision
from helpers.models import create, images, tuned
from test_blocks import fused as fused
from test_blocks import made, relative_errors, step
from torch import Tensor, nn
from torch.nn import functional as F

import deepsquare as ds
from deepsquare import kernels
from deepsquare.kernels import cpu
from deepsquare.surgery.blocks import fuse_plain_blocks

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")


class Written(nn.Module):
    """A residual block of a user's own, between two convolutions; subclasses write its end."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = nn.BatchNorm2d(8)
        self.seen: list[Tensor] = []
        self.factor = 1.0


class Plus(Written):
    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError("expected a tensor")
        y: Tensor = self.norm(self.branch(x))
        return F.relu(torch.add(x if self.shortcut is None else self.shortcut(x), y)) * self.factor


class InPlace(Written):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.branch(x))
        y += x
        return y.relu_() * 2


class ShortcutInPlace(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.branch(x))
        x += y  # the caller's tensor too
        return torch.relu(x)


class ReadTwice(Written):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.branch(x))
        return torch.relu(x + y) + y


class Keeps(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x + self.norm(self.branch(x)))
        self.seen.append(y)
        return y


class Decides(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x + self.norm(self.branch(x)))
        return y if y.shape[-1] > 7 else -y


class Prints(Written):
    def forward(self, x: Tensor) -> Tensor:
        print(f"{x.shape}")
        return torch.relu(x + self.norm(self.branch(x)))


class Switches(Written):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.branch(x)
        return torch.relu(x + self.norm(y))


def around(block: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


@pytest.mark.parametrize("block", [Plus, InPlace, ShortcutInPlace, ReadTwice, Keeps, Decides, Prints, Switches])
def test_blocks_of_a_users_own(block: type[Written], fused: list[Tensor]) -> None:
    model, x = tuned(ds.equip(around(block()), "excitation")), images()
    model = ds.recalibrate_batchnorm(model, [x]).eval()
    fused.clear()
    with torch.no_grad():
        y = model(x)
        assert len(fused) == (block in (Plus, InPlace)), "the others have values, a state or a mode that a graph lacks"
        with kernels.without_kernels():
            torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["resnext50_32x4d", "regnet_x_400mf", "regnet_y_400mf", "timm/resnet10t"])
def test_other_networks_with_such_blocks(name: str, fused: list[Tensor]) -> None:
    x = images()
    model = ds.recalibrate_batchnorm(made(name), [x]).eval()
    blocks = len(ds.sites(model).of_kind("branch_end"))
    fused.clear()
    with torch.no_grad():
        y = model(x)
        assert len(fused) == blocks > 0
        with kernels.without_kernels():
            torch.testing.assert_close(y, model(x), rtol=0, atol=1e-4 * float(y.abs().max()))


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "shufflenet_v2_x1_5"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shuffled_concatenations(name: str, layout: torch.memory_format, fused: list[Tensor]) -> None:
    x = images(3).contiguous(memory_format=layout)
    model: Any = ds.recalibrate_batchnorm(made(name), [x]).eval().to(memory_format=layout)
    for form, ends in ((model, 16), (ds.fold(model), 0)):  # a folded one has no shuffles
        fused.clear()
        with torch.no_grad():
            y = form(x)
            assert len(fused) == ends
            assert all(end.is_contiguous(memory_format=layout) for end in fused)
            with kernels.without_kernels():
                torch.testing.assert_close(y, form(x), rtol=0, atol=1e-4 * float(y.abs().max()))
    model.train()
    fused.clear()
    found = step(copy.deepcopy(model), x)
    with kernels.without_kernels():
        torch.testing.assert_close(found, step(model, x), rtol=1e-2, atol=1e-3)
    assert not fused


def test_another_shuffle_is_left_as_it_is(fused: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.models.shufflenetv2, "channel_shuffle", lambda x, groups: x.flip(1))
    model = made("shufflenet_v2_x0_5").eval()
    with torch.no_grad():
        model(images())
    assert not fused


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "timm/resnet26d", "regnet_x_400mf", "shufflenet_v2_x0_5"])
def test_plain_blocks(name: str, fused: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepsquare.surgery.block_pass.SMALL_PLANE", 0)  # the images are small
    x = images()
    model = ds.recalibrate_batchnorm(create(name, num_classes=5), [x]).eval()
    keys, count = list(model.state_dict()), fuse_plain_blocks(model)
    assert count == len(ds.sites(model).of_kind("branch_end"))
    assert list(model.state_dict()) == keys
    for form in (model, copy.deepcopy(model)):
        fused.clear()
        with torch.no_grad():
            y = form(x)
            assert len(fused) == count
            with kernels.without_kernels():
                torch.testing.assert_close(y, form(x), rtol=0, atol=1e-4 * float(y.abs().max()))
    fused.clear()
    found = step(copy.deepcopy(model.train()), x)
    assert len(fused) == (0 if name.startswith("shufflenet") else count)
    with kernels.without_kernels():
        plain = step(copy.deepcopy(model), x)
        exact = step(model.double(), x.double())
    # Of all gradients together; each rounds as often in the two forms.
    assert relative_errors(found, exact)[0] <= 2 * relative_errors(plain, exact)[0]


@pytest.mark.parametrize(
    "change", ["bfloat16 norm", "frozen norm", "no statistics", "frozen parameters", "one value", "bfloat16 maps"]
)
def test_training_with_a_block_that_was_changed(change: str, fused: list[Tensor]) -> None:
    model, x = made(), images()
    block: Any = model.get_submodule("layer4.1")
    if change == "bfloat16 norm":
        block.bn2.bfloat16()
    elif change == "frozen norm":
        block.bn2.eval()
    elif change == "no statistics":
        block.bn2.running_mean = block.bn2.running_var = block.bn2.num_batches_tracked = None
    elif change == "frozen parameters":
        for parameter in block.parameters():
            parameter.requires_grad_(False)
    elif change == "bfloat16 maps":
        block.bfloat16()
        for norm in (block.bn1, block.bn2):
            norm.float()
    given = torch.randn(1 if change == "one value" else 2, 512, *((1, 1) if change == "one value" else (4, 4)))
    given = given.to(block.conv1.weight.dtype)
    plain = copy.deepcopy(block)
    fused.clear()
    if change == "one value":
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            block(given)
        return
    if change == "bfloat16 norm":  # PyTorch has no normalization of this kind either
        with pytest.raises(RuntimeError):
            block(given)
        return
    x, again = given.clone().requires_grad_(), given.clone().requires_grad_()
    y = block(x)
    y.float().square().sum().backward()
    with kernels.without_kernels():
        expected = plain(again)
        expected.float().square().sum().backward()
    assert len(fused) == 1
    tolerance = 1e-4 if y.dtype is torch.float32 else 5e-2
    pairs = [(y, expected), (x.grad, again.grad)]
    pairs += [(ours.grad, other.grad) for ours, other in zip(block.parameters(), plain.parameters(), strict=True)]
    pairs += list(zip(block.buffers(), plain.buffers(), strict=True))
    for ours, other in pairs:
        assert (ours is None) == (other is None)
        if ours is not None:
            assert (ours - other).float().norm() <= tolerance * other.float().norm() + 1e-5


def test_writes_over_nothing_that_is_seen(fused: list[Tensor]) -> None:
    """The pass writes over the last convolution's result, unless something observes that."""
    model, x, seen = made().eval(), images(), list[tuple[Tensor, Tensor]]()

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.append((out, out + 0))

    block = model.get_submodule("layer1.0")
    with torch.no_grad():
        y = model(x)
        handle = block.get_submodule("conv2").register_forward_hook(
            lambda module, args, out: seen.append((out, out + 0))
        )
        torch.testing.assert_close(model(x), y)
        handle.remove()
        given = torch.randn(1, 64, 8, 8)
        before = given.clone()
        block(given)
        assert torch.equal(given, before)
    ((out, copied),) = seen
    assert torch.equal(out, copied)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_allocates_nothing_but_what_convolutions_return(layout: torch.memory_format) -> None:
    """Guards against a slower form: another pass over the map needs memory to write to."""
    block: Any = made("resnet18").eval().to(memory_format=layout).get_submodule("layer2.0")
    x = torch.randn(4, 64, 56, 56).contiguous(memory_format=layout)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        y = block(x)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events() or ())
    maps = 3 + 1  # three convolutions, and the batch normalization between two of them
    assert allocated <= 1.05 * maps * y.numel() * y.element_size()


@pytest.mark.parametrize("change", ["half", "frozen", "no_statistics", "wide_alpha", "eps", "in_place", "swapped"])
def test_numbers_that_change_or_cannot_be_read(change: str) -> None:
    model, x = ds.recalibrate_batchnorm(made(), [images()]).eval(), images()
    block: Any = model.get_submodule("layer1.0")
    with torch.no_grad():
        model(x)
        if change == "eps":
            block.bn2.eps = 0.5
        if change == "in_place":
            block.bn2.weight.mul_(2)
        if change == "swapped":
            block.bn2.weight.data = torch.linspace(-1, 1, 64)
            block.bn2.running_var = torch.linspace(1, 2, 64)
    if change == "half":
        model, x = model.bfloat16(), x.bfloat16()
    if change == "frozen":
        block.bn2.requires_grad_(False)
    if change == "no_statistics":
        block.bn2.running_mean = block.bn2.running_var = None
    if change == "wide_alpha":
        block.bn2.deepsquare_excitation.double()
    with torch.no_grad():
        y = model(x)
        with kernels.without_kernels():
            bound = 0.1 if change == "half" else 1e-5
            torch.testing.assert_close(y, model(x), rtol=bound, atol=bound)


def test_follows_changes_of_the_block(fused: list[Tensor]) -> None:
    block = Plus()
    model, x = tuned(ds.equip(around(block), "excitation")).eval(), images()
    dropped = nn.Dropout(1.0)

    def no_shortcut() -> None:
        block.shortcut = None

    def another_factor() -> None:
        block.factor = 3.0

    def more_layers() -> None:
        block.branch.append(nn.BatchNorm2d(8))

    def no_branch() -> None:
        block.branch[3] = dropped.train()

    with torch.no_grad():
        for change in (no_shortcut, another_factor, more_layers, no_branch):
            change()
            fused.clear()
            y = model(x)
            assert len(fused) == 1
            with kernels.without_kernels():
                torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)
