"""The same hyperparameter search for every activation, then training with the best setting on fresh seeds.

The paper gives no optimizer, learning rate, initialization or number of steps. So each activation is trained with
every setting of one grid on a few seeds, and the setting and length with the lowest median loss on *validation* data
is chosen. The reported loss is the *test* loss of networks with other seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

import numpy as np
import torch

from deepsquare.paper.spirals.data import Array, Split
from deepsquare.paper.spirals.networks import Initialization, Networks, Optimizer, Scaling, Setting, Task, train

KINDS: tuple[Initialization, ...] = ("pytorch", "glorot")
LRS: Mapping[Optimizer, tuple[float, ...]] = {"adam": (0.003, 0.01, 0.03, 0.1), "sgd": (0.1, 0.3)}
LENGTHS = (1 / 4, 1 / 2, 1)  # relative to the steps of the task
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
CURVE = 40  # points of a training curve


def grid(task: Task, lrs: Mapping[Optimizer, tuple[float, ...]] = LRS) -> tuple[Setting, ...]:
    """All settings of a task. Only times are standardized: the points of the three arms are already centered."""
    scalings: tuple[Scaling, ...] = ("raw", "standardised") if task.inputs == 1 else ("raw",)
    choices = product(scalings, KINDS, [(optimizer, lr) for optimizer, values in lrs.items() for lr in values])
    return tuple(Setting(optimizer, lr, kind, scaling) for scaling, kind, (optimizer, lr) in choices)


def lengths(steps: int) -> tuple[int, ...]:
    """The numbers of steps to compare."""
    return tuple(max(1, round(steps * length)) for length in LENGTHS)


@dataclass(frozen=True)
class Tuned:
    """One activation on the whole grid: the median losses over the seeds, infinite if most diverged."""

    settings: tuple[Setting, ...]
    steps: tuple[int, ...]
    train: Array  # (lengths, settings)
    validation: Array
    test: Array

    @property
    def best(self) -> tuple[Setting, int]:
        """The setting and the number of steps with the lowest validation loss."""
        length, setting = np.unravel_index(np.argmin(self.validation), self.validation.shape)
        return self.settings[int(setting)], self.steps[int(length)]


def tune(task: Task, activation: str, seeds: Sequence[int], steps: int) -> Tuned:
    """Train with every setting of the grid, all networks of one optimizer in one batch."""
    settings, compared = grid(task), lengths(steps)
    medians = {split: np.empty((len(compared), len(settings))) for split in get_args(Split)}
    for optimizer in LRS:
        chosen = [index for index, setting in enumerate(settings) if setting.optimizer == optimizer]
        networks = Networks(task, activation, [settings[index] for index in chosen], seeds)
        trained = train(networks, steps, compared)
        for split in get_args(Split):
            losses = finite(networks.table(networks.losses_at(trained, compared, split)))
            medians[split][:, chosen] = np.median(losses, axis=2)
    return Tuned(settings, compared, **medians)


def finite(losses: torch.Tensor) -> Array:
    """Losses with NaN replaced by infinity: a diverged network is worse than any other."""
    values: Array = losses.double().numpy()
    return np.where(np.isnan(values), np.inf, values)


@dataclass(frozen=True)
class Trained:
    """One activation with its best setting: its networks, and their metrics during training."""

    networks: Networks
    steps: int  # chosen
    parameters: torch.Tensor  # (seeds, P), at the chosen step
    checkpoints: tuple[int, ...]
    curves: Mapping[str, Array]  # (checkpoints, seeds): test_loss and, of a classification, test_accuracy
    train_loss: Array  # (seeds,), at the chosen step

    @property
    def chosen(self) -> int:
        return self.checkpoints.index(self.steps)

    @property
    def loss(self) -> Array:
        """The test loss of every seed at the chosen step."""
        return np.asarray(self.curves["test_loss"][self.chosen])

    @property
    def median_network(self) -> int:
        """The index of the network with the median test loss, which the figures show."""
        return int(np.argsort(self.loss, kind="stable")[len(self.loss) // 2])

    @property
    def median_data(self) -> tuple[Array, Array]:
        """The inputs (D, N) and targets (K, N) that this network was trained on."""
        inputs, targets = self.networks.task.draw(self.networks.seeds[self.median_network], "train")
        return inputs.numpy(), targets.numpy()


def quantiles(values: Array) -> Array:
    """Quantiles (5, checkpoints) of values (checkpoints, seeds); each is one of the values."""
    return np.quantile(values, QUANTILES, axis=1, method="lower")


def retrain(task: Task, activation: str, tuned: Tuned, seeds: Sequence[int], steps: int) -> Trained:
    """Train with the best setting on other seeds, for all steps of the task to get the whole curve."""
    setting, chosen = tuned.best
    networks = Networks(task, activation, [setting], seeds)
    curve = {round(step) for step in np.linspace(0, steps, CURVE + 1)}
    checkpoints = tuple(sorted(curve | {*lengths(steps), chosen}))
    trained = train(networks, steps, checkpoints)
    curves = {"test_loss": finite(networks.losses_at(trained, checkpoints, "test"))}
    if task.classification:
        test = networks.batch("test")
        accuracies = [networks.accuracies(trained[step], *test).double().numpy() for step in checkpoints]
        curves["test_accuracy"] = np.stack(accuracies)
    train_loss = finite(networks.losses_at(trained, [chosen], "train"))[0]
    return Trained(networks, chosen, trained[chosen], checkpoints, curves, train_loss)
