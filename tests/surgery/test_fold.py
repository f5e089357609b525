"""The test-phase form: the same outputs with fewer layers, and the model it was made of left as it is."""

from typing import Any

import pytest
import torch
from helpers.models import (
    SHAPES,
    attached,
    copied_state,
    create,
    equip_quietly,
    excited,
    images,
    own_keys,
    same_state,
    tuned,
)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

import deepsquare as ds
from deepsquare.surgery import equip_record


def norms(model: nn.Module) -> int:
    return sum(isinstance(m, _BatchNorm) for m in model.modules())


def ready(name: str, spec: str) -> tuple[nn.Module, Tensor]:
    """An equipped model in float64, with statistics and parameters that are not those of a fresh one."""
    x = torch.randn(
        (4, *SHAPES.get(name, (3, 64, 64))), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    model = tuned(equip_quietly(create(name).double(), spec, input_shape=SHAPES.get(name)))
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, _BatchNorm)):
            assert norm.bias is not None
            norm.bias.uniform_(-0.5, 0.5)
    return ds.recalibrate_batchnorm(model, [x]).eval(), x


# How many batch normalisations stay: those that do not follow a convolution directly, by the architecture.
# DenseNet121: the first of each dense layer (58) and of each transition (3), and the last one.
FOLDED: list[tuple[str, str, int]] = [
    ("resnet18", "", 0),
    ("resnet18", "pooling+excitation+encoding+softmin", 0),
    ("resnet18", "softmin(scale='channel')", 0),
    ("shufflenet_v2_x0_5", "pooling+excitation+encoding+softmin", 0),
    ("densenet121", "pooling+excitation+softmin", 62),
    ("mobilenet_v2", "gem+excitation", 0),
    ("squeezenet1_1", "softmin", 0),
    ("squeezenet1_1", "softmin(scale='channel', sign=1)", 0),
    ("vanilla_cnn", "square(after='layer1')+pooling+softmin(sign=1)", 0),
    ("vanilla_cnn", "square(after='layer2.conv')", 1),  # a square stands between that convolution and its BN
    ("cifar", "pooling+excitation", 0),
    ("signal", "excitation+encoding+softmin", 0),
    ("volume", "excitation+encoding+softmin", 0),
    ("timm/resnet18", "pooling+excitation", 0),
    ("timm/test_byobnet", "pooling+excitation+encoding+softmin", 0),  # BatchNormAct2d
    ("timm/test_efficientnet", "softmin+moment3", 0),
]


@pytest.mark.parametrize(("name", "spec", "left"), FOLDED)
def test_folding_keeps_the_outputs(name: str, spec: str, left: int) -> None:
    model, x = ready(name, spec)
    expected, state, count = model(x), copied_state(model), attached(model)
    modules = {path: type(m) for path, m in model.named_modules()}
    folded = ds.fold(model, input_shape=SHAPES.get(name))
    torch.testing.assert_close(folded(x), expected, rtol=1e-9, atol=1e-9)
    assert norms(folded) == left
    assert norms(model) > left or name == "squeezenet1_1"
    assert not any("root_scale" in key for key in folded.state_dict())
    assert {key for key in own_keys(model) if "root_scale" not in key} == own_keys(folded)
    assert attached(folded) == count
    # The model itself: bit for bit as it was.
    assert folded is not model
    assert same_state(model, state)
    assert {path: type(m) for path, m in model.named_modules()} == modules
    assert torch.equal(model(x), expected)
    # Nothing is left to fold.
    assert ds.fold(folded) is folded
    assert equip_record(folded) == equip_record(model)


def test_the_scale_goes_into_the_classifier() -> None:
    model: Any = ds.equip(create("vanilla_cnn"), "softmin(scale='channel')").eval()
    roots = torch.linspace(-2, 2.5, 10)  # √s: its sign means nothing
    with torch.no_grad():
        model.fc.deepsquare_softmin.root_scale.copy_(roots)
    folded: Any = ds.fold(model)
    assert torch.equal(folded.fc.weight, model.fc.weight * roots.abs()[:, None])
    assert torch.equal(folded.fc.bias, model.fc.bias * roots.abs())
    assert folded.fc.deepsquare_softmin.root_scale is None
    torch.testing.assert_close(folded(images(2, 32)), model(images(2, 32)), rtol=1e-4, atol=1e-6)


def test_batch_normalisation_goes_into_the_convolution() -> None:
    model, x = ready("vanilla_cnn", "pooling")
    base, folded = model.get_submodule("layer1"), ds.fold(model).get_submodule("layer1")
    bn: Any = base.get_submodule("bn")
    factor = bn.weight / (bn.running_var + bn.eps).sqrt()
    weight, bias = folded.get_parameter("conv.weight"), folded.get_parameter("conv.bias")
    torch.testing.assert_close(weight, base.get_parameter("conv.weight") * factor[:, None, None, None])
    torch.testing.assert_close(bias, bn.bias - bn.running_mean * factor)
    assert type(folded.get_submodule("bn")) is nn.Identity
    torch.testing.assert_close(folded(x), base(x))


def test_an_excitation_on_a_folded_normalisation_still_acts() -> None:
    model, x = ready("cifar", "excitation")
    folded = ds.fold(model, input_shape=(3, 32, 32))
    end, alpha = folded.get_submodule("layer1.0.bn2"), folded.get_parameter("layer1.0.bn2.deepsquare_excitation.alpha")
    assert isinstance(end, nn.Identity)
    features = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(end(features), excited(features, alpha))
    before = folded(x)
    with torch.no_grad():
        alpha.mul_(10)
    assert not torch.allclose(folded(x), before)


def test_an_unfoldable_scale_stays() -> None:
    """Between the classifier and the softmin stands what does not pass a factor through."""
    model = nn.Sequential(*list(create("vanilla_cnn").children())[:4], nn.Flatten(), nn.Linear(128, 5), nn.Sigmoid())
    tuned(ds.equip(model, "softmin", input_shape=(3, 32, 32))).eval()
    folded = ds.fold(model, input_shape=(3, 32, 32))
    x = images(2, 32)
    assert {key for key in folded.state_dict() if "root_scale" in key} == {"6.deepsquare_softmin.root_scale"}
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-6)


def test_a_square_between_the_classifier_and_the_softmin() -> None:
    model = tuned(ds.equip(create("vanilla_cnn"), "square(after='fc')+softmin")).double().eval()
    x = images(2, 32).double()
    torch.testing.assert_close(ds.fold(model)(x), model(x), rtol=1e-9, atol=1e-15)


class Cosine(nn.Linear):
    """A classifier that does not care how long its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight))


@pytest.mark.parametrize("kind", ["parametrised", "cosine"])
def test_a_classifier_that_is_more_than_its_weight(kind: str) -> None:
    model, x = create("vanilla_cnn"), images(2, 32).double()
    if kind == "cosine":
        model.add_module("fc", Cosine(128, 10))
    else:
        parametrizations.weight_norm(model.get_submodule("fc"))
    tuned(ds.equip(model, "softmin")).double().eval()
    torch.testing.assert_close(ds.fold(model)(x), model(x), rtol=1e-9, atol=1e-15)


def test_refusals() -> None:
    model = ds.equip(create("vanilla_cnn"), "pooling")
    with pytest.raises(ValueError, match=r"inference form .*fold\(model.eval\(\)\)"):
        ds.fold(model.train())
    assert norms(model) == 3
    folded = ds.fold(model.eval())
    assert not folded.training
    with pytest.raises(ValueError, match="folded"):
        ds.unequip(folded)
    with pytest.raises(ValueError, match="folded"):
        ds.equip(folded, "softmin")


def test_a_convolution_that_others_read_is_not_folded() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.bn = nn.BatchNorm2d(8)
            self.shared = nn.BatchNorm2d(8)
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            out: Tensor = self.fc((self.bn(y) + y).mean((2, 3)))
            return out

    x = images(4, 32)
    model = ds.recalibrate_batchnorm(Read(), [x]).eval()
    folded = ds.fold(model)
    assert norms(folded) == 2
    assert torch.equal(folded(x), model(x))


def test_what_is_idle_in_the_test_phase_is_gone() -> None:
    folded = ds.fold(ds.create_model("torchvision/efficientnet_b0", "encoding", dropout=0.2).eval())
    names = {type(module).__name__ for module in folded.modules()}
    assert not names & {"Dropout", "StochasticDepth"}


def test_a_relu_that_only_a_square_reads_becomes_part_of_it() -> None:
    model, x = ready("shufflenet_v2_x0_5", "encoding")
    folded = ds.fold(model)
    relus = [sum(type(module) is nn.ReLU for module in some.modules()) for some in (model, folded)]
    assert relus[0] - relus[1] == 16
    assert sum(isinstance(module, ds.nn.ReLUSquare) for module in folded.modules()) == 16
    torch.testing.assert_close(folded(x), model(x))


def test_a_relu_that_others_read_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu, self.square = nn.Conv2d(3, 4, 3), nn.ReLU(), ds.nn.EleSquare()

        def forward(self, x: Tensor) -> Tensor:
            y = self.relu(self.conv(x))
            return torch.cat((self.square(y), y.neg()), 1)

    model, x = Twice().eval(), torch.randn(2, 3, 8, 8)
    folded = ds.fold(model, input_shape=(3, 8, 8))
    assert type(folded.relu) is nn.ReLU
    torch.testing.assert_close(folded(x), model(x))
