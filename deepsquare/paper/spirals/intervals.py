"""Means over seeds with 95% intervals, where some networks may have diverged."""

import numpy as np

from deepsquare.paper.spirals.data import Array
from deepsquare.paper.statistics import interval
from deepsquare.results import round_for_json

BETTER = {"test_loss": -1, "test_accuracy": 1, "roughness": -1, "sharpest_turn": -1}  # which way the paper claims


def settled(values: Array, worst: float | None = None) -> Array:
    """The values, with the worst finite one in place of those that are not finite."""
    known = values[np.isfinite(values)]
    if not known.size:
        raise ValueError("every network of the chosen setting diverged; widen the grid of settings in tuning.py")
    return np.where(np.isfinite(values), values, known.max() if worst is None else worst)


def mean(values: Array) -> dict[str, float]:
    """The mean and its 95% interval by Student's t distribution."""
    middle = interval(values)
    assert middle is not None
    found = round_for_json([middle.mean, middle.low, middle.high], 5)
    return {name: value for name, value in zip(("mean", "low", "high"), found, strict=True) if value is not None}


def difference(values: Array, base: Array, sign: int) -> dict[str, float]:
    """The mean difference, paired by seed, with its interval; and in which share of the seeds ``values`` is better."""
    worst = max(settled(values).max(), settled(base).max())
    values, base = settled(values, worst), settled(base, worst)
    return {**mean(values - base), "share_better": float(np.mean(sign * (values - base) > 0))}
