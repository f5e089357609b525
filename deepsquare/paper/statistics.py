"""Means with 95% confidence intervals by Student's t distribution, and medians with rank-based intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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


@dataclass(frozen=True)
class VarianceEstimate:
    """A variance and the degrees of freedom of its estimate."""

    value: float
    df: float


def moderated_variances(samples: Mapping[str, Sequence[float]]) -> dict[str, VarianceEstimate]:
    """The variance within each sample, moderated by that of the others (Smyth 2004, as in limma).

    The true variances are taken to be scattered like s₀²·d₀/χ²(d₀). s₀² and d₀ are estimated from all samples, and each
    variance becomes (d₀·s₀² + d·s²)/(d₀ + d) with d₀ + d degrees of freedom, at most those of all samples together.
    With fewer than four samples of two values or more nothing is moderated. A sample's own variance counts where it is
    larger: with few samples d₀ is uncertain, and a row that scatters more would otherwise be judged by the others.
    """
    degrees = {name: len(values) - 1 for name, values in samples.items() if len(values) > 1}
    own = {name: float(np.var(samples[name], ddof=1)) for name in degrees}
    if len(own) < 4:
        return {name: VarianceEstimate(value, degrees[name]) for name, value in own.items()}
    total = sum(degrees.values())
    prior, prior_df = _prior_variance([value for value in own.values() if value > 0], degrees, own)
    moderated = {}
    for name, value in own.items():
        d = degrees[name]
        pooled = prior if math.isinf(prior_df) else (prior_df * prior + d * value) / (prior_df + d)
        moderated[name] = VarianceEstimate(max(pooled, value), min(prior_df + d, total))
    return moderated


def _prior_variance(
    positive: Sequence[float], degrees: Mapping[str, int], own: Mapping[str, float]
) -> tuple[float, float]:
    """s₀² and d₀ from the mean and the variance of log s²; d₀ is infinite if they scatter no more than by chance."""
    from scipy.special import digamma, polygamma

    d = np.array([degrees[name] for name, value in own.items() if value > 0], dtype=float)
    if len(positive) < 2:
        return float(np.mean(list(own.values()))), 0.0
    e = np.log(positive) - digamma(d / 2) + np.log(d / 2)
    excess = float(np.var(e, ddof=1) - polygamma(1, d / 2).mean())
    if excess <= 0:
        pooled = sum(degrees[name] * value for name, value in own.items()) / sum(degrees.values())
        return float(pooled), math.inf
    prior_df = 2 * _inverse_trigamma(excess)
    return float(np.exp(e.mean() + digamma(prior_df / 2) - math.log(prior_df / 2))), prior_df


def _inverse_trigamma(value: float) -> float:
    """The y with trigamma(y) = value."""
    from scipy.optimize import brentq
    from scipy.special import polygamma

    return float(brentq(lambda y: polygamma(1, y) - value, 1e-8, 1e8))


@dataclass(frozen=True)
class Effect:
    """An estimated difference in points with its standard error."""

    mean: float
    se: float
    df: float

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        from scipy import stats

        half = float(stats.t.ppf((1 + confidence) / 2, self.df)) * self.se
        return self.mean - half, self.mean + half

    def p_above(self, value: float) -> float:
        """The p value of H₀: the difference is at most ``value``."""
        from scipy import stats

        return float(stats.t.sf((self.mean - value) / self.se, self.df))

    def p_below(self, value: float) -> float:
        """The p value of H₀: the difference is at least ``value``."""
        from scipy import stats

        return float(stats.t.cdf((self.mean - value) / self.se, self.df))


def contrast(
    samples: Mapping[str, Sequence[float]],
    coefficients: Mapping[str, float],
    variances: Mapping[str, VarianceEstimate],
    image_variance: float = 0.0,
) -> Effect:
    """Σ cᵣ·(mean of sample r), with the error of the seeds and of the test images; df by Welch and Satterthwaite."""
    parts = {name: c * c * variances[name].value / len(samples[name]) for name, c in coefficients.items()}
    squared = sum(parts.values()) + image_variance
    mean = sum(c * float(np.mean(samples[name])) for name, c in coefficients.items())
    spread = sum(part**2 / variances[name].df for name, part in parts.items())
    most = max(variance.df for variance in variances.values())  # the moderated ones share their prior
    df = min(squared**2 / spread, max(most, sum(len(samples[name]) - 1 for name in parts))) if spread else math.inf
    return Effect(mean, max(math.sqrt(squared), 1e-12), df)


Hits: TypeAlias = Mapping[int, npt.NDArray[np.bool_]]  # which test images were right, by seed


def image_variance(correct: Mapping[str, Hits], coefficients: Mapping[str, float]) -> float | None:
    """The variance of a contrast, in points², that comes from the choice of the test images.

    It is the variance over the images of Σ cᵣ·(the probability that a network of row r is right), divided by their
    number. What one network gets right by chance is left out, since the scatter of the seeds holds it: only products of
    different seeds enter. None if a row has fewer than two seeds whose images are known.
    """
    if any(len(correct.get(name, ())) < 2 for name in coefficients):
        return None
    second = sum(
        coefficients[one] * coefficients[other] * _mean_product(correct[one], correct[other])
        for one in coefficients
        for other in coefficients
    )
    first = sum(c * float(np.mean(list(correct[name].values()))) for name, c in coefficients.items())
    images = len(next(iter(correct[next(iter(coefficients))].values())))
    return max(0.0, 100**2 * (second - first**2) / images)


def _mean_product(first: Hits, second: Hits) -> float:
    """The mean over images of the product of two rows' hits, over all pairs of different seeds."""
    totals = [np.sum(list(hits.values()), axis=0, dtype=float) for hits in (first, second)]
    shared = first.keys() & second.keys()
    same = sum((first[seed] & second[seed]).astype(float) for seed in shared)
    return float(np.mean(totals[0] * totals[1] - same)) / (len(first) * len(second) - len(shared))


def rank_p(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """One-sided p values of the exact Mann–Whitney test: that ``first`` tends to be above, and below, ``second``."""
    from scipy import stats

    above, below = (
        float(stats.mannwhitneyu(first, second, alternative=side, method="exact").pvalue)
        for side in ("greater", "less")
    )
    return above, below


def share_p(count: int, n: int, share: float = 0.5) -> tuple[float, float]:
    """Exact one-sided p values: that a share is above, and below, ``share``."""
    from scipy import stats

    return float(stats.binom.sf(count - 1, n, share)), float(stats.binom.cdf(count, n, share))


def share_interval(count: int, n: int) -> tuple[float, float]:
    """The 95% interval of a share (Clopper and Pearson)."""
    from scipy import stats

    tail = (1 - CONFIDENCE) / 2
    low = float(stats.beta.ppf(tail, count, n - count + 1)) if count else 0.0
    return low, float(stats.beta.ppf(1 - tail, count + 1, n - count)) if count < n else 1.0


def reject_holm(p_values: Sequence[Sequence[float]], alpha: float) -> list[list[bool]]:
    """Holm's procedure where each claim has hypotheses of which at most one is true (Shaffer 1986).

    ``p_values`` are by claim; the probability of any false rejection is at most ``alpha``. The next smallest p value is
    compared with alpha divided by the number of claims that can still hold a true hypothesis.
    """
    rejected = [[False] * len(claim) for claim in p_values]
    for p, index, k in sorted((p, c, k) for c, claim in enumerate(p_values) for k, p in enumerate(claim)):
        open_claims = sum(not all(done) for done in rejected)
        if p > alpha / open_claims:
            break
        rejected[index][k] = True
    return rejected
