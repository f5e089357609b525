"""Batched training of small networks: the two-layer networks of Section 3.2, one per seed and setting.

All networks with the same activation and optimizer are one computation: their parameters are the rows of one
matrix (networks, P), and ``vmap`` maps the gradient of the loss over the rows. They differ in seed (initial weights
and data), learning rate, kind of initialization and scaling of the input.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parameters_to_vector

from deepsquare.functional import relu_square
from deepsquare.paper.spirals import data

Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs (networks, D, N) and targets (networks, K, N)
Optimizer: TypeAlias = Literal["adam", "sgd"]
Initialization: TypeAlias = Literal["pytorch", "glorot"]
Scaling: TypeAlias = Literal["raw", "standardised"]
DrawData: TypeAlias = Callable[[int, data.Split], Batch]  # the data of one seed: (D, N) and (K, N)
Activation: TypeAlias = Callable[[Tensor], Tensor]

HIDDEN = 32
ACTIVATIONS: Mapping[str, Activation] = {
    "relu": F.relu,
    "relu_square": relu_square,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Task:
    """A learning problem: the data of a seed, and the loss between outputs and targets (K, N)."""

    name: str
    inputs: int
    outputs: int
    steps: int
    tuning_seeds: int  # more if the loss varies more between seeds
    draw: DrawData
    loss: Callable[[Tensor, Tensor], Tensor]
    classification: bool = False


@dataclass(frozen=True)
class Setting:
    """Hyperparameters, which the paper does not give."""

    optimizer: Optimizer
    lr: float
    initialization: Initialization
    inputs: Scaling = "raw"
    decay: bool = False  # linear decay to zero over the second half of training

    def scaled(self, inputs: Tensor) -> Tensor:
        """The network's inputs; standardizing gives a time in [0, 1] mean 0 and variance 1."""
        return (inputs - 0.5) * math.sqrt(12) if self.inputs == "standardised" else inputs


class TwoLayers(nn.Module):
    """Two fully connected layers with ``HIDDEN`` units between them.

    Inputs (D, N) and outputs (K, N) are columns: with so few of them the matrix products are about twice as fast
    as those of ``nn.Linear`` on rows.
    """

    def __init__(self, inputs: int, outputs: int, activation: str) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, HIDDEN)
        self.second = nn.Linear(HIDDEN, outputs)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Equation (10), with the bias of both layers."""
        hidden = self.activation(self.first.weight @ x + self.first.bias[:, None])
        return self.second.weight @ hidden + self.second.bias[:, None]

    @torch.no_grad()
    def initialize(self, kind: Initialization, seed: int) -> None:
        """Initialize the parameters: ``pytorch`` as torch does; ``glorot`` as Keras does, with zero biases."""
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.first, self.second):
            if kind == "pytorch":
                bound = 1 / math.sqrt(layer.in_features)
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.uniform_(-bound, bound, generator=generator)
            else:
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                layer.bias.zero_()


class Networks:
    """A stack of networks with one activation: one per setting and seed, seeds innermost."""

    def __init__(self, task: Task, activation: str, settings: Sequence[Setting], seeds: Sequence[int]) -> None:
        self.task, self.settings, self.seeds = task, tuple(settings), tuple(seeds)
        self.network = TwoLayers(task.inputs, task.outputs, activation)
        self.losses = vmap(self._loss)
        self.gradients = vmap(grad(self._loss))
        self.outputs = vmap(self.output)
        self.accuracies = vmap(self._accuracy)

    def initial(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The parameters before training (networks, P)."""
        network, rows = copy.deepcopy(self.network).to(dtype), []
        for setting in self.settings:
            for seed in self.seeds:
                network.initialize(setting.initialization, seed)
                rows.append(parameters_to_vector(network.parameters()).detach())
        return torch.stack(rows)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """Parameters (…, P) by name, with their shapes."""
        shapes = {name: value.shape for name, value in self.network.named_parameters()}
        parts = torch.split(parameters, [shape.numel() for shape in shapes.values()], dim=-1)
        named = zip(shapes.items(), parts, strict=True)
        return {name: part.reshape(*part.shape[:-1], *shape) for (name, shape), part in named}

    def batch(self, split: data.Split, dtype: torch.dtype = torch.float32) -> Batch:
        samples = zip(*(self.task.draw(seed, split) for seed in self.seeds), strict=True)
        inputs, targets = (torch.stack(parts).to(dtype) for parts in samples)
        scaled = torch.cat([setting.scaled(inputs) for setting in self.settings])
        return scaled, targets.repeat(len(self.settings), 1, 1)

    def lrs(self, progress: float) -> Tensor:
        """The learning rate of every network (networks, 1) after a fraction of the training."""
        factor = min(1.0, 2 * (1 - progress))
        lrs = [setting.lr * (factor if setting.decay else 1) for setting in self.settings]
        return torch.tensor(lrs, dtype=torch.float64).repeat_interleave(len(self.seeds))[:, None]

    def losses_at(self, trained: Mapping[int, Tensor], checkpoints: Iterable[int], split: data.Split) -> Tensor:
        """The losses (checkpoints, networks) on a split, from the parameters that ``train`` returns."""
        batch = self.batch(split)
        return torch.stack([self.losses(trained[step], *batch) for step in checkpoints])

    def table(self, values: Tensor) -> Tensor:
        """Values by network (…, networks) as (…, settings, seeds)."""
        return values.reshape(*values.shape[:-1], len(self.settings), len(self.seeds))

    def output(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        """The output of one network with parameters (P,) for inputs (D, N)."""
        outputs: Tensor = functional_call(self.network, self.named(parameters), (inputs,))
        return outputs

    def _loss(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(self.output(parameters, inputs), targets)

    def _accuracy(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        correct = self.output(parameters, inputs).argmax(0) == targets.argmax(0)
        return correct.to(targets.dtype).mean()


def adam(step: int, lrs: Tensor, gradient: Tensor, parameters: Tensor, state: list[Tensor]) -> Tensor:
    """One step of Adam with torch's defaults; ``state`` holds the moments."""
    first, second = state or [torch.zeros_like(gradient)] * 2
    first = first.lerp(gradient, 0.1)
    second = (second * 0.999).addcmul(gradient, gradient, value=0.001)
    state[:] = first, second
    root = second.sqrt() / math.sqrt(1 - 0.999**step) + 1e-8
    return parameters - lrs / (1 - 0.9**step) * first / root


def sgd(step: int, lrs: Tensor, gradient: Tensor, parameters: Tensor, state: list[Tensor]) -> Tensor:
    """One step of gradient descent with momentum 0.9; ``state`` holds the velocity."""
    state[:] = [gradient if step == 1 else state[0] * 0.9 + gradient]
    return parameters - lrs * state[0]


OPTIMIZERS: Mapping[Optimizer, Callable[[int, Tensor, Tensor, Tensor, list[Tensor]], Tensor]] = {
    "adam": adam,
    "sgd": sgd,
}


def train(
    networks: Networks, steps: int, checkpoints: Collection[int], dtype: torch.dtype = torch.float32
) -> dict[int, Tensor]:
    """The parameters after each of the ``checkpoints``, numbers of steps; 0 is before training.

    NOTE not in paper: full batches and a constant learning rate, so a shorter training is a prefix of a longer one.
    """
    (optimizer,) = {setting.optimizer for setting in networks.settings}
    update, state = OPTIMIZERS[optimizer], list[Tensor]()
    inputs, targets = networks.batch("train", dtype)
    parameters = networks.initial(dtype)
    saved = {0: parameters}
    trace = make_fx(lambda *arguments: networks.gradients(*arguments))
    traced = trace(parameters, inputs, targets)  # the same operations, without the overhead of vmap at each step
    for step in range(1, steps + 1):
        lrs = networks.lrs((step - 1) / steps).to(dtype)
        parameters = update(step, lrs, traced(parameters, inputs, targets), parameters, state)
        if step in checkpoints:
            saved[step] = parameters
    return saved


def draw_one_arm(seed: int, split: data.Split, turns: float = data.TURNS, noise: float = data.NOISE) -> Batch:
    """Times (1, N) and points (2, N)."""
    times, points = data.one_arm(seed, split, 64 if split == "train" else 512, turns=turns, noise=noise)
    return torch.from_numpy(times)[None], torch.from_numpy(points).mT


def draw_three_arms(seed: int, split: data.Split) -> Batch:
    """Points (2, N) and one-hot arms (3, N)."""
    points, arms = data.three_arms(seed, split, 100 if split == "train" else 200)
    return torch.from_numpy(points).mT, F.one_hot(torch.from_numpy(arms), data.ARMS).mT


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """SoftmaxCE: outputs and one-hot targets (K, N)."""
    return -(targets * outputs.log_softmax(0)).sum(0).mean()


# NOTE not in paper: 64 times to train on; 100 points of each arm, as in CS231n; the number of steps.
ONE_ARM = Task("one-arm", 1, 2, 3000, 5, draw_one_arm, F.mse_loss)
THREE_ARMS = Task("three-arm", 2, data.ARMS, 600, 10, draw_three_arms, cross_entropy, classification=True)
