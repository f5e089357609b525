"""Variants of the vanilla CNN that test why a row of Tables 2 and 3 comes out as it does; not in the paper.

They are built here and not by options of the library, since each serves one question.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare import nn as dsnn
from deepsquare.models import ConvLayer, VanillaCNN, vanilla_cnn
from deepsquare.paper.cifar10.experiment import RECIPE
from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.surgery import equip
from deepsquare.training import CifarRecipe
from deepsquare.training.recipe import Check

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "relu_square": dsnn.ReLUSquare, "square": dsnn.EleSquare}
WIDTHS = {"layer1": 32, "layer2": 64, "layer3": 128}


@dataclass(frozen=True)
class AblationRecipe(CifarRecipe):
    """The recipe of Tables 2 and 3 for 10 epochs, with changes to the network.

    Attributes:
        pool_factor: Constant factor behind the pooling.
        activation: Replaces every ReLU.
        depth: Number of convolutions. More than the three of Table 1 have stride 1 and follow its layers in turn.
        fc_bias: Initial bias of the fully connected layer, the same for all classes; random if None. Square-Softmin
            needs no random signs: (w, b) and (-w, -b) give the same logits, and the distribution of w is symmetric.
    """

    epochs: int = RECIPE.epochs
    lr: float = RECIPE.lr
    weight_decay: float = RECIPE.weight_decay
    pad: int = RECIPE.pad
    pool_factor: float = 1.0
    activation: Literal["relu", "relu_square", "square"] = "relu"
    depth: int = 3
    fc_bias: float | None = None

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "pool_factor", 0 < self.pool_factor < math.inf, "above 0"
        yield "depth", 3 <= self.depth <= 30, "3 to 30"
        yield "fc_bias", self.fc_bias is None or math.isfinite(self.fc_bias), "a finite number"


class Factor(nn.Module):
    """A constant factor."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x

    def extra_repr(self) -> str:
        return f"{self.value:g}"


def build_network(spec: str, recipe: AblationRecipe) -> VanillaCNN:
    """The vanilla CNN with the recipe's changes, equipped; parts that it shares with Table 1 start alike."""
    model = vanilla_cnn()
    for (name, width), extra in zip(WIDTHS.items(), _extra_layers(recipe.depth), strict=True):
        if extra:
            layers = (ConvLayer(width, width, stride=1) for _ in range(extra))
            model.set_submodule(name, nn.Sequential(model.get_submodule(name), *layers))
    if recipe.activation != "relu":
        for layer in (module for module in model.modules() if isinstance(module, ConvLayer)):
            layer.set_submodule("relu", ACTIVATIONS[recipe.activation]())
    if recipe.pool_factor != 1:
        model.set_submodule("pool", nn.Sequential(model.pool, Factor(recipe.pool_factor)))
    if recipe.fc_bias is not None:
        nn.init.constant_(model.fc.bias, recipe.fc_bias)
    return equip(model, spec)


def _extra_layers(depth: int) -> list[int]:
    """The number of layers of stride 1 behind each layer of Table 1, which get one in turn."""
    more = depth - len(WIDTHS)
    return [(more + len(WIDTHS) - 1 - number) // len(WIDTHS) for number in range(len(WIDTHS))]


def build_model(run: TrainingRun) -> nn.Module:
    """The run's model."""
    assert isinstance(run.recipe, AblationRecipe)
    return build_network(run.spec, run.recipe)


def first_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The norm of the first gradient of all convolutions."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    gradients = torch.autograd.grad(F.cross_entropy(model.train()(images), labels), weights)
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def gradient_ratio(spec: str, factor: float, images: Tensor, labels: Tensor, seed: int = 0) -> float:
    """The first gradient of the convolutions with a spec and a factor behind the pooling, over the plain network's."""
    norms = []
    for one, recipe in (spec, AblationRecipe(pool_factor=factor)), ("", AblationRecipe()):
        torch.manual_seed(seed)
        norms.append(first_gradient(build_network(one, recipe), images, labels))
    return norms[0] / norms[1]


def matched_factor(spec: str, batches: Sequence[tuple[Tensor, Tensor]], iterations: int = 6) -> float:
    """The factor behind a pooling that makes the first gradient of the convolutions equal the plain network's.

    It is the geometric mean over the batches, the number of each being the seed of its network.
    """
    logs = []
    for seed, (images, labels) in enumerate(batches):
        factor = 1.0
        for _ in range(iterations):  # the ratio is nearly proportional to the factor, but the softmax is not linear
            factor /= gradient_ratio(spec, factor, images, labels, seed)
        logs.append(math.log(factor))
    return math.exp(sum(logs) / len(logs))
