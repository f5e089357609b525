"""Means over seeds with 95% intervals, if some networks diverged."""

import numpy as np

from deepsquare.paper.spirals.data import Array
from deepsquare.paper.statistics import interval
from deepsquare.results import round_for_json

BETTER = {"test_loss": -1, "test_accuracy": 1, "roughness": -1, "sharpest_turn": -1}  # the sign of an improvement


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
