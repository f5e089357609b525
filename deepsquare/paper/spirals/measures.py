"""The smoothness of the networks of Section 3.2, and means over seeds with intervals."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from deepsquare.paper.spirals.data import ARMS, Array, trajectory
from deepsquare.paper.spirals.networks import Networks
from deepsquare.paper.statistics import interval
from deepsquare.results import round_for_json

BETTER = {"test_loss": -1, "test_accuracy": 1, "roughness": -1, "sharpest_turn": -1}  # the sign of an improvement
TIMES = np.linspace(0, 1, 1001)
SPACING = 0.02  # of the points along a decision boundary, whose arms are about 2.3 long


def paths(networks: Networks, parameters: Tensor) -> Array:
    """The regressed trajectory of every network at ``TIMES`` (networks, 1001, 2), for a single setting."""
    (setting,) = networks.settings
    times = setting.scaled(torch.from_numpy(TIMES).float()[None]).repeat(len(networks.seeds), 1, 1)
    return networks.outputs(parameters, times).mT.double().numpy()


def roughness(path: Array) -> float:
    """The sum of squared second differences of a path (1001, 2), relative to that of the true spiral.

    With finer times the contribution of a smooth curve vanishes but not that of a kink: only valid for ``TIMES``.
    """
    bends, true = (np.square(np.diff(points, 2, axis=0)).sum() for points in (path, trajectory(TIMES)))
    return float(bends / true)


def largest_turn(path: Array) -> float:
    """The largest angle, in degrees, between a step of a path (N, 2) and the step after the next.

    A kink between two points is spread over two neighboring angles, so adjacent steps would see only a part of it.
    """
    steps = np.diff(path, axis=0)
    headings = np.arctan2(steps[:, 1], steps[:, 0])
    turns = (headings[2:] - headings[:-2] + np.pi) % (2 * np.pi) - np.pi
    return float(np.degrees(np.abs(turns).max()))


def units(networks: Networks, parameters: Tensor, inputs: Tensor) -> dict[str, Array]:
    """Per network, how many hidden units switch within the inputs (networks, 1, N), and how many are never active."""
    named = networks.named(parameters)
    slopes, offsets = named["first.weight"][..., 0], named["first.bias"]
    low, high = slopes * inputs.amin(2) + offsets, slopes * inputs.amax(2) + offsets
    counts = {"with_kink": low * high < 0, "dead": (low <= 0) & (high <= 0)}
    return {name: mask.sum(1).double().numpy() for name, mask in counts.items()}


def on_grid(networks: Networks, parameters: Tensor, chosen: Sequence[int]) -> tuple[Array, Array]:
    """The ticks of a square grid (P,), and the outputs of the chosen networks on it (chosen, 3, P, P)."""
    ticks = torch.linspace(-1.2, 1.2, 241)
    x2, x1 = torch.meshgrid(ticks, ticks, indexing="ij")
    inputs = torch.stack([x1.flatten(), x2.flatten()]).repeat(len(chosen), 1, 1)
    outputs = networks.outputs(parameters[list(chosen)], inputs).reshape(len(chosen), ARMS, len(ticks), len(ticks))
    return ticks.double().numpy(), outputs.double().numpy()


def boundary_turn(ticks: Array, outputs: Array) -> float:
    """The mean over the decision boundaries of their largest turn, in degrees, within three times ``SPACING``.

    ``outputs`` (3, P, P) are those of one network. A boundary is where the two largest outputs are equal; points
    outside the radius of the data, 1, are ignored.
    """
    axes, largest = Figure().subplots(), []
    for arm in range(ARMS):
        others = [outputs[(arm + 1) % ARMS], outputs[(arm + 2) % ARMS]]
        margin = np.where(others[0] > others[1], outputs[arm] - others[0], np.nan)  # NaN where the third wins
        if (margin > 0).any() and (margin < 0).any():
            for points in axes.contour(ticks, ticks, margin, levels=[0]).allsegs[0]:
                largest += _turns(np.asarray(points))
    return float(np.mean(largest)) if largest else 0.0


def _turns(points: Array) -> list[float]:
    points = points[np.hypot(points[:, 0], points[:, 1]) < 1]
    lengths = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    if lengths[-1] < 10 * SPACING:
        return []
    even = np.arange(0, lengths[-1], SPACING)
    return [largest_turn(np.stack([np.interp(even, lengths, column) for column in points.T], axis=1))]


def settled(values: Array, worst: float | None = None) -> Array:
    """The values, with non-finite ones replaced by the worst finite one."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise ValueError("every network of the chosen setting diverged; widen the grid of settings in tuning.py")
    return np.where(np.isfinite(values), values, finite.max() if worst is None else worst)


def mean(values: Array) -> dict[str, float]:
    """The mean and its 95% interval by Student's t distribution."""
    result = interval(values)
    assert result is not None
    rounded = round_for_json([result.mean, result.low, result.high], 5)
    return {name: value for name, value in zip(("mean", "low", "high"), rounded, strict=True) if value is not None}


def difference(values: Array, base: Array, sign: int) -> dict[str, float]:
    """The mean difference, paired by seed, with its interval, and the share of seeds for which ``values`` is better."""
    worst = max(settled(values).max(), settled(base).max())
    values, base = settled(values, worst), settled(base, worst)
    return {**mean(values - base), "share_better": float(np.mean(sign * (values - base) > 0))}
