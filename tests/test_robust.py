"""What models and programs of one's own do, and the surgery must survive or refuse."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepsquare as ds
import deepsquare.functional as DF


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn(self.conv2(input=self.act(self.conv1(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Keeps a grid from call to call, counts its calls two ways, and calls a convolution by keyword."""

    calls: Tensor
    more_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = Residual(8)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)
        self.grid: Tensor | None = None
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("more_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None or self.grid.shape[-1] != x.shape[-1]:
            self.grid = torch.linspace(-1, 1, x.shape[-1])
        self.calls += 1
        self.more_calls = self.more_calls + 1
        return self.fc(self.pool(self.block(self.stem(x + self.grid))).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("look", [ds.sites, ds.cost, lambda net: ds.equip(net, "pooling"), lambda net: ds.fold(net)])
def test_looking_at_a_model_leaves_nothing_in_it(look: Any) -> None:
    net = Net().eval()
    look(net)
    assert net.grid is None
    assert type(net.calls) is type(net.more_calls) is Tensor
    assert float(net.calls) == float(net.more_calls) == 0
    assert type(net(torch.randn(2, 3, 16, 16))) is Tensor


def test_networks_for_small_images_are_looked_at_in_their_own_size(capfd: pytest.CaptureFixture[str]) -> None:
    class Small(Net):
        def forward(self, x: Tensor) -> Tensor:
            maps = nn.functional.avg_pool2d(self.block(self.stem(x)), 32)
            return self.fc(maps.view(maps.shape[0], -1))  # type: ignore[no-any-return]

    net, x = Small().eval(), torch.randn(2, 3, 32, 32)
    assert ds.sites(net).input_shape == (3, 32, 32)
    ds.equip(net, "pooling+excitation")
    maps = net.block(net.stem(x))
    assert maps.std((2, 3)).max() == 0  # pooled already, and spread over the map for the pooling of fixed size
    assert ds.cost(net).parameters == sum(p.numel() for p in Small().parameters()) + 1
    torch.testing.assert_close(ds.fold(net)(x), net(x))
    assert capfd.readouterr().err == ""


def test_lazy_modules_are_refused_unharmed() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match="lazy modules; run it once"):
        ds.equip(net, "pooling", input_shape=(3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    net(x)
    expected = net[4](net[1](net[0](x)).square().mean((2, 3)))
    torch.testing.assert_close(ds.equip(net, "pooling", input_shape=(3, 8, 8))(x), expected)


def test_threads_do_not_disturb_each_other() -> None:
    errors: list[BaseException] = []
    stop = threading.Event()
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def serve() -> None:
        try:
            while not stop.is_set():
                other(torch.randn(2, 4))
        except BaseException as error:
            errors.append(error)

    def look() -> None:
        try:
            for _ in range(5):
                assert ds.sites(Net()).summary() == "1 pooling, 1 logits, 1 branch_end, 1 last_spatial_conv"
        except BaseException as error:
            errors.append(error)

    server = threading.Thread(target=serve)
    lookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in (server, *lookers):
        thread.start()
    for thread in lookers:
        thread.join()
    stop.set()
    server.join()
    assert errors == []


def test_modules_called_by_keyword() -> None:
    net, x = Net().eval(), torch.randn(2, 3, 16, 16)
    ds.equip(net, "encoding+excitation")
    block = net.block
    squared = nn.functional.conv2d(
        block.act(block.conv1(x[:, :1].expand(-1, 8, -1, -1))).square(), block.conv2.weight, block.conv2.bias, padding=1
    )
    branch = nn.functional.batch_norm(squared, block.bn.running_mean, block.bn.running_var, eps=block.bn.eps)
    g = branch.square().mean((2, 3), keepdim=True)
    expected = x[:, :1].expand(-1, 8, -1, -1) + branch * g / (g + 1)
    torch.testing.assert_close(block(x[:, :1].expand(-1, 8, -1, -1)), expected)


def test_a_replaced_head_is_noticed() -> None:
    net = ds.equip(Net().eval(), "pooling+softmin", input_shape=(3, 32, 32))
    net._modules["fc"] = nn.Linear(8, 2)  # unlike net.fc = …, unknown to nn.Module
    for use in (ds.sites, ds.fold, lambda m: ds.equip(m, "pooling+softmin")):
        with pytest.raises(ValueError, match="fc has lost its softmin"):
            use(net)


def test_an_equipped_model_inside_another_is_noticed(tmp_path: Path) -> None:
    outer = nn.Sequential(nn.Identity(), ds.equip(Net(), "excitation"))
    for use in (lambda m: ds.equip(m, "excitation"), ds.sites, lambda m: ds.save(m, tmp_path / "m.safetensors")):
        with pytest.raises(ValueError, match=r"has an equipped model inside \(1.block.bn"):
            use(outer)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_takes_no_attributes_is_left_as_it_was() -> None:
    class Frozen(Net):
        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("deepsquare"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    net = Frozen()
    keys = list(net.state_dict())
    with pytest.raises(AttributeError, match="deepsquare_record"):
        ds.equip(net, "pooling+excitation")
    assert list(net.state_dict()) == keys
    assert [type(m) for m in net.modules()] == [type(m) for m in Frozen().modules()]


@pytest.mark.parametrize("wrong", ["resnet18", None, Net])
def test_only_models_are_equipped(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a model"):
        ds.equip(wrong, "pooling")


def test_fold_leaves_shared_weights_and_hooked_layers_alone() -> None:
    net = ds.equip(Net().eval(), "softmin")
    net.stem2 = nn.Linear(8, 5)
    net.stem2.weight = net.fc.weight
    net.block.bn.register_forward_hook(lambda m, i, y: y + 5)
    with torch.no_grad():
        net.get_parameter("fc.deepsquare_softmin.root_scale").fill_(1.7)
    x = torch.randn(2, 3, 16, 16)
    folded = ds.fold(net)
    torch.testing.assert_close(folded(x), net(x))
    assert isinstance(folded.block.bn, nn.BatchNorm2d)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("side", [224, 257, 512])
def test_large_maps_keep_their_digits(side: int, memory_format: torch.memory_format) -> None:
    x = (torch.rand(1, 4, side, side) + 1).contiguous(memory_format=memory_format)
    exact = x.double().square().mean((2, 3))
    torch.testing.assert_close(DF.square_pooling(x).double(), exact, rtol=5e-7, atol=0)
