"""Means with 95% confidence intervals by Student's t distribution, and medians with rank-based intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` seeds and the half-width of its interval, infinite for one seed."""

    mean: float
    half: float
    n: int

    @classmethod
    def read(cls, stored: Mapping[str, float], n: int, unit: float = 1) -> Interval:
        """The interval stored in a row as mean, low and high, times ``unit``."""
        return cls(unit * stored["mean"], unit * (stored["high"] - stored["low"]) / 2, n)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.half)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def format(self, signed: bool = False) -> str:
        """``mean ± half``, rounded to the second significant digit of ``half``."""
        sign = "+" if signed else ""
        if not self.bounded or self.half == 0:
            return f"{self.mean:{sign}.4g}".replace("-", "−")
        digits = max(0, 1 - int(f"{self.half:.1e}".partition("e")[2]))
        return f"{self.mean:{sign}.{digits}f} ± {self.half:.{digits}f}".replace("-", "−")


def interval(values: Sequence[float] | npt.NDArray[np.float64], confidence: float = CONFIDENCE) -> Interval | None:
    """Mean ± t·s/√n with n − 1 degrees of freedom; None without values."""
    from scipy import stats  # of the extra paper

    n = len(values)
    if n == 0:
        return None
    mean = float(np.mean(values))
    if n == 1:
        return Interval(mean, math.inf, 1)
    t = float(stats.t.ppf((1 + confidence) / 2, n - 1))
    return Interval(mean, t * float(np.std(values, ddof=1)) / math.sqrt(n), n)


def paired(values: Mapping[int, float], base: Mapping[int, float], confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the differences ``values − base`` over the seeds that both have."""
    return interval([values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())], confidence)


class Median(NamedTuple):
    """A median and the bounds of its interval, as rows store it."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> Median:
    """For times, which have outliers: a rank-based interval, which is the range for fewer than 9 values.

    ``bounds_label`` names it: the range of fewer than 6 values covers the median with less than 95%.
    """
    from scipy import stats

    ordered = sorted(values)
    rank = max(0, int(stats.binom.ppf((1 - CONFIDENCE) / 2, len(ordered), 0.5)) - 1)
    return Median(float(np.median(ordered)), ordered[rank], ordered[-1 - rank])


def has_interval(n: int) -> bool:
    """Whether ``n`` values are enough for a 95% interval of their median; the range covers it with 1 - 2·0.5ⁿ."""
    return 1 - 2 * 0.5**n >= CONFIDENCE


def bounds_label(n: int, values: str = "rounds") -> str:
    """What the bounds of the median of ``n`` values are."""
    return f"{CONFIDENCE:.0%} interval" if has_interval(n) else f"range of {n} {values}"


def median_ratio(values: Sequence[float], base: Sequence[float]) -> Median:
    """The median of the ratios to ``base``, paired by round."""
    return median([value / other for value, other in zip(values, base, strict=True)])
