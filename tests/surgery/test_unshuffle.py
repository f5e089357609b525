"""Channel shuffles that ``fold`` takes out: the same outputs with fewer copies, or the model as it was."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.models import create, equip_quietly, images, tuned
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepsquare as ds
from deepsquare.surgery.unshuffle import RoutedBlock


class Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the values that concatenations and copies write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("cat", "clone", "copy_", "contiguous", "index_select", "stack"):
            self.values[name] += result.numel()
        return result


def randomized(model: nn.Module) -> nn.Module:
    """In float64 and eval mode, with statistics and biases by which channels differ."""
    model = tuned(model).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            for tensor in (norm.weight, norm.running_var):
                assert tensor is not None
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
            for tensor in (norm.bias, norm.running_mean):
                assert tensor is not None
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def routed(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, RoutedBlock)]


def assert_same(folded: nn.Module, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-9, atol=1e-9)


SPECS = ["", "pooling+excitation", "se", "ge_theta", "encoding+softmin", "gsop(size=16)"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "name", ["shufflenet_v2_x0_5", "shufflenet_v2_x1_0"]
)  # halves of 24, 48, 96 and of 58, 116, 232
def test_shufflenet_has_no_shuffles(name: str, spec: str) -> None:
    base = create(name)
    model = randomized(equip_quietly(base, spec) if spec else base)
    folded = ds.fold(model)
    assert len(routed(folded)) == 16
    x = torch.randn(2, 3, 224 if spec == "ge_theta" else 96, 224 if spec == "ge_theta" else 96, dtype=torch.float64)
    assert_same(folded, model, x)
    assert_same(folded, model, x.to(memory_format=torch.channels_last))
    assert not routed(model)
    assert set(folded.state_dict()) <= set(model.state_dict()) | {
        key.replace(".weight", ".bias") for key in model.state_dict()
    }


def test_a_quarter_of_the_values_is_copied() -> None:
    """Each unit copied its map twice; now each branch's half once, and the map once behind each of the three stages."""
    model = create("shufflenet_v2_x1_0").eval()
    x = images(1, 224)
    sizes = [(116, 28, 4), (232, 14, 8), (464, 7, 4)]  # channels, height, units
    with torch.no_grad(), Copied() as before:
        model(x)
    assert sum(before.values.values()) == sum(2 * c * h * h * n for c, h, n in sizes)
    with torch.no_grad():
        folded = ds.fold(model)
        with Copied() as after:
            folded(x)
    assert dict(after.values) == {"cat": sum(c * h * h * (n - 1) // 2 + c * h * h for c, h, n in sizes)}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # checks of shapes are constants
def test_compiled_exported_traced_copied_and_pickled() -> None:
    model = randomized(equip_quietly(create("shufflenet_v2_x0_5"), "pooling+excitation"))
    folded, x = ds.fold(model).requires_grad_(False), images(2, 64).double()
    expected = model(x)
    others: list[Any] = [
        torch.compile(folded, fullgraph=True, backend="eager"),
        torch.export.export(folded, (x,)).module(),
        torch.jit.trace(folded, x),  # type: ignore[no-untyped-call]
        copy.deepcopy(folded),
        pickle.loads(pickle.dumps(folded)),
    ]
    for other in others:
        torch.testing.assert_close(other(x), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(TypeError, match=r"torch.jit.trace"):
        torch.jit.script(folded)


def test_the_timm_model_and_its_maps() -> None:
    timm = pytest.importorskip("timm")
    import deepsquare.timm_models  # noqa: F401

    model: Any = randomized(timm.create_model("deepsquare_shufflenet_v2_x0_5_pooling"))
    folded: Any = ds.fold(model)
    x = images(2, 64).double()
    assert len(routed(folded)) == 16
    assert_same(folded, model, x)
    torch.testing.assert_close(folded.forward_features(x), model.forward_features(x), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="folded"):
        folded.forward_intermediates(x)


class Unit(nn.Module):
    """A unit with a shuffle of its own spelling; ``kind`` makes it one that cannot be changed."""

    def __init__(self, channels: int, kind: str = "") -> None:
        super().__init__()
        half = channels // 2
        first: list[nn.Module] = [nn.ReLU(inplace=True)] if kind == "relu first" else []
        groups = 3 if kind == "grouped" else 1
        self.branch = nn.Sequential(*first, nn.Conv2d(half, half, 1, groups=groups), nn.ReLU())
        self.last = nn.Conv2d(half, half, 3, padding=1, groups=half)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        right = self.branch(right)
        if self.kind == "scaled":
            right = right * 1.5
        if self.kind == "flipped":
            right = right.flip(3)
        if self.kind == "depthwise":
            left, right = self.last(left), right
        return torch.stack((left, right), 2).flatten(1, 2)


def chain(*kinds: str, end: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    units = nn.Sequential(*(Unit(12, kind) for kind in kinds))
    return nn.Sequential(nn.Conv2d(3, 12, 3), units, end or nn.Conv2d(12, 5, 1)).double().eval()


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (("", "", ""), 3),
        (("",), 1),
        (("scaled", "", ""), 2),  # arithmetic in the first one's own forward
        (("flipped", "", ""), 2),  # it moves positions, not channels
        (("", "", "relu first"), 0),  # what reads a map is no convolution
        (("", "grouped", ""), 0),
        (("", "", "depthwise"), 0),  # the channels that it returns would be in another order
        (("", "scaled", ""), 1),  # the first one's map is read by a unit that stays
    ],
)
def test_chains_of_other_units(kinds: tuple[str, ...], count: int) -> None:
    model, x = chain(*kinds), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    folded = ds.fold(model, input_shape=(3, 9, 9))
    assert len(routed(folded)) == count
    assert_same(folded, model, x)


class Tapped(nn.Module):
    """Something else reads the map behind the chain."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.body = chain("", "")
        self.other = nn.Conv2d(12, 5, 1) if how == "convolution" else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body[1](self.body[0](x))
        return self.body[2](features), features.relu() if self.how == "relu" else self.other(features)


@pytest.mark.parametrize(("how", "count"), [("convolution", 2), ("relu", 0), ("output", 0)])
def test_other_readers_of_the_last_map(how: str, count: int) -> None:
    model, x = Tapped(how).double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    folded = ds.fold(model, input_shape=(3, 9, 9))
    assert len(routed(folded)) == count
    assert_same(folded, model, x)


@pytest.mark.parametrize("where", ["1", "1.0", "1.1", "1.1.branch", "1.1.branch.0", "2"])
def test_a_hook_sees_what_it_saw(where: str) -> None:
    seen: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.extend((inputs[0].clone(), output.clone()))

    model, x = chain("", ""), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    folded = ds.fold(model, input_shape=(3, 9, 9))
    assert len(routed(folded)) == 2
    model.get_submodule(where).register_forward_hook(note)
    folded = ds.fold(model, input_shape=(3, 9, 9))
    assert len(routed(folded)) == (where == "1.0")  # the second unit alone
    assert_same(folded, model, x)
    torch.testing.assert_close(seen[-4:-2], seen[-2:])  # before them, ``fold`` has run the model on fake tensors


def test_a_convolution_used_twice_is_not_permuted() -> None:
    model, x = chain("", ""), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    first, second = (model.get_submodule(f"1.{i}.branch.0") for i in (0, 1))
    second.weight = first.weight
    folded = ds.fold(model, input_shape=(3, 9, 9))
    assert not routed(folded)
    assert_same(folded, model, x)
