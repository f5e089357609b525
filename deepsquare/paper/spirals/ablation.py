"""Why ReLU-Square can be worse on the one-arm spiral: ablations of ReLU against ReLU-Square.

``by_data``: the number of turns and the noise, against the number of steps. ``by_length``: longer training, and a
learning rate that decays to zero. ``by_optimizer``: noiseless data with Adam and with a second-order method, which
is insensitive to conditioning. ``at_start``: the conditioning at initialization, and how many units have their kink
within the range of the times.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import jacrev, vmap

from deepsquare.paper.spirals import data
from deepsquare.paper.spirals.data import Array
from deepsquare.paper.spirals.measures import TIMES, difference, mean, settled, units
from deepsquare.paper.spirals.networks import ONE_ARM, Batch, Networks, Setting, draw_one_arm, train
from deepsquare.results import round_for_json

PAIR = ("relu", "relu_square")
USUAL = Setting("adam", 0.01, "pytorch", "standardised")
CASES = (  # turns and noise; 0.64 turns are the 4 radians of the three arms
    *((turns, data.NOISE) for turns in (0.64, 1.0, data.TURNS, 2.0, 3.0)),
    *((data.TURNS, noise) for noise in (0.0, 0.1)),
)
FREE = (data.TURNS, 2.0)  # turns, without noise
SLOW = 1e-3  # of the largest eigenvalue


def by_data(seeds: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """For each of ``CASES``, the median test loss during training, and the step after which ReLU-Square stays lower."""
    every = max(1, steps // 16)

    def medians(activation: str) -> Tensor:
        networks = _stacked(activation, seeds, len(CASES), lambda case, *of: draw_one_arm(*of, *CASES[case]))
        checkpoints = range(every, steps + 1, every)
        losses = networks.losses_at(train(networks, steps, checkpoints), checkpoints, "test")
        return losses.reshape(-1, len(CASES), len(seeds)).median(2).values

    relu, square = (medians(activation) for activation in PAIR)
    rows = []
    for case, (turns, noise) in enumerate(CASES):
        behind = (square[:, case] >= relu[:, case]).nonzero().flatten().tolist()
        since = behind[-1] + 1 if behind else 0
        ahead_from = every * (since + 1) if since < len(relu) else None
        row: dict[str, Any] = {"turns": turns, "noise": noise, "every": every, "ahead_from": ahead_from}
        row |= {name: round_for_json(loss[:, case].tolist()) for name, loss in zip(PAIR, (relu, square), strict=True)}
        rows.append(row)
    return rows


def by_length(seeds: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """The test loss after thirds of a long training with a constant learning rate, and after one with decay."""
    settings = (USUAL, replace(USUAL, decay=True))
    thirds = [round(steps * third / 3) for third in (1, 2, 3)]

    def ends(activation: str) -> list[Array]:
        networks = Networks(ONE_ARM, activation, settings, seeds)
        losses = networks.losses_at(train(networks, steps, thirds), thirds, "test")
        constant, decayed = networks.table(losses).double().numpy().swapaxes(0, 1)
        return [*constant, decayed[-1]]

    relu, square = (ends(activation) for activation in PAIR)
    rows = []
    for index, (ours, base) in enumerate(zip(square, relu, strict=True)):
        row: dict[str, Any] = {"steps": [*thirds, steps][index], "decay": index == len(thirds)}
        for name, values in zip(PAIR, (base, ours), strict=True):
            middle, slowest = round_for_json(np.quantile(values, (0.5, 0.95)))
            row[name] = {"median": middle, "quantile_95": slowest, **mean(settled(values))}
        rows.append(row | {"difference": difference(ours, base, -1)})
    return rows


def by_optimizer(seeds: Sequence[int], steps: int, iterations: int) -> list[dict[str, Any]]:
    """The median squared error on noiseless trajectories with Adam and with Levenberg–Marquardt."""

    def medians(activation: str) -> Tensor:
        networks = _stacked(activation, seeds, len(FREE), lambda case, _, split: _noiseless(split, FREE[case]))
        adam = networks.losses_at(train(networks, steps, [steps]), [steps], "test")[0]
        batch = networks.batch("test", torch.float64)
        second_order = networks.losses(levenberg_marquardt(networks, iterations), *batch)
        return torch.stack([adam, second_order]).reshape(2, len(FREE), len(seeds)).median(2).values

    rows: list[dict[str, Any]] = [{"turns": turns} for turns in FREE]
    for activation in PAIR:
        for row, errors in zip(rows, medians(activation).mT, strict=True):
            row[activation] = dict(zip(("adam", "levenberg_marquardt"), round_for_json(errors.tolist()), strict=True))
    return rows


def _stacked(
    activation: str, seeds: Sequence[int], cases: int, draw: Callable[[int, int, data.Split], Batch]
) -> Networks:
    """The networks of all cases as one stack; the seed of a network encodes its case."""
    span = max(seeds) + 1
    task = replace(ONE_ARM, draw=lambda seed, split: draw(*divmod(seed, span), split))
    return Networks(task, activation, [USUAL], [case * span + seed for case in range(cases) for seed in seeds])


def _noiseless(split: data.Split, turns: float) -> Batch:
    times = np.linspace(0, 1, 128) if split == "train" else TIMES
    return torch.from_numpy(times)[None], torch.from_numpy(data.trajectory(times, turns)).mT


def levenberg_marquardt(networks: Networks, iterations: int) -> Tensor:
    """Least squares by damped Gauss–Newton steps, in float64: each network accepts a step only if the loss falls."""
    inputs, targets = networks.batch("train", torch.float64)
    parameters = networks.initial(torch.float64)
    loss = networks.losses(parameters, inputs, targets)
    damping = torch.full_like(loss, 1e-2)
    for _ in range(iterations):
        jacobian = jacobians(networks, parameters, inputs)
        residual = (networks.outputs(parameters, inputs) - targets).mT.flatten(1)
        curvature = jacobian.mT @ jacobian
        scale = damping * curvature.diagonal(dim1=1, dim2=2).mean(1)
        damped = curvature + scale[:, None, None] * torch.eye(curvature.shape[1], dtype=torch.float64)
        candidate = parameters - torch.linalg.solve(damped, jacobian.mT @ residual[..., None])[..., 0]
        candidate_loss = networks.losses(candidate, inputs, targets)
        better = candidate_loss < loss
        parameters = torch.where(better[:, None], candidate, parameters)
        loss = torch.where(better, candidate_loss, loss)
        damping = torch.where(better, damping / 3, damping * 2).clamp(1e-12, 1e6)
    return parameters


def jacobians(networks: Networks, parameters: Tensor, inputs: Tensor) -> Tensor:
    """The derivatives of every output by every parameter (networks, N·K, P), with K innermost."""

    def at_point(weights: Tensor, point: Tensor) -> Tensor:
        return networks.output(weights, point[:, None])[:, 0]

    jacobian: Tensor = vmap(vmap(jacrev(at_point), (None, 1)))(parameters, inputs)  # (networks, N, K, P)
    return jacobian.flatten(1, 2)


def at_start(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """At initialization, by input scaling: the spectrum of the tangent kernel, and the units that switch.

    Gradient descent reduces the error along an eigenvector of the kernel J·Jᵀ at the rate of its eigenvalue.
    ``slow_share`` is the share of the spiral along those that are 1,000 times slower than the fastest;
    ``tenth_eigenvalue`` is relative to the first, of the kernel of one output.
    """
    rows = []
    task = replace(ONE_ARM, draw=lambda _, split: _noiseless(split, data.TURNS))
    for activation in PAIR:
        for setting in (replace(USUAL, inputs="raw"), USUAL):
            networks = Networks(task, activation, [setting], seeds)
            inputs, targets = networks.batch("train", torch.float64)
            parameters = networks.initial(torch.float64)
            jacobian = jacobians(networks, parameters, inputs)[:, ::2]  # both outputs have much the same kernel
            values, vectors = torch.linalg.eigh(jacobian @ jacobian.mT)
            along = (vectors.mT @ targets.mT).square().sum(2)
            slow = (along * (values < SLOW * values[:, -1:])).sum(1) / along.sum(1)
            tenth = values[:, -10] / values[:, -1]
            numbers = {"slow_share": slow.median().item(), "tenth_eigenvalue": tenth.median().item()}
            counts = units(networks, parameters, inputs)
            numbers |= {f"units_{name}": float(values.mean()) for name, values in counts.items()}
            row = {"activation": activation, "inputs": setting.inputs}
            rows.append(row | dict(zip(numbers, round_for_json(list(numbers.values())), strict=True)))
    return rows
