"""The rule by which claims are judged. The page states it; change both together.

The claims of a family are judged together, at the looks of its plan. Each has two null hypotheses of which at most one
can be true, for example "there is no difference" and "the difference is as large as claimed"; rejecting them decides
the verdict. The probability of any false rejection in a family is at most the alpha of its looks, 5% in all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from deepsquare.paper.statistics import (
    Effect,
    Hits,
    Interval,
    VarianceEstimate,
    contrast,
    image_variance,
    moderated_variances,
    rank_p,
    reject_holm,
    share_interval,
    share_p,
)

ALPHA = 0.05
BAD_RUN = 3.0  # points below the best run of the row
IMAGE_ERROR = 0.1  # points: the standard error of two rows' difference from the choice of 10,000 images, as measured
MARGIN = 0.5  # points: a smaller difference counts as none
MIN_SEEDS = 3  # for a verdict on a difference of means
PENDING = "not at a planned look yet"
DIVERGENCE_SEEDS = 6  # for a verdict on divergence


class Verdict(Enum):
    """Whether the runs agree with a claim."""

    REPRODUCED = "reproduced"
    SMALLER = "smaller than claimed"
    CONTRARY = "contrary"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTED = "not tested here"


@dataclass(frozen=True)
class Sample:
    """The runs of a row by seed: accuracies in per cent, a diverged run at chance; and which test images were right."""

    accuracies: Mapping[int, float]
    diverged: frozenset[int] = frozenset()
    correct: Hits = field(default_factory=dict, hash=False)

    def first(self, seeds: int) -> Sample:
        """The runs with the seeds from 0 to ``seeds`` - 1."""
        taken = range(seeds)
        chosen = {seed: value for seed, value in self.accuracies.items() if seed in taken}
        hits = {seed: value for seed, value in self.correct.items() if seed in taken}
        return Sample(chosen, frozenset(seed for seed in self.diverged if seed in taken), hits)

    @property
    def values(self) -> list[float]:
        return [self.accuracies[seed] for seed in sorted(self.accuracies)]

    @property
    def bad_runs(self) -> int:
        """How many runs diverged or are more than ``BAD_RUN`` points below the best."""
        best = max(self.accuracies.values(), default=0.0)
        return sum(seed in self.diverged or best - value > BAD_RUN for seed, value in self.accuracies.items())


@dataclass(frozen=True)
class Hypothesis:
    """What a claim says about rows: their accuracies times these coefficients, or that a row diverges."""

    coefficients: Mapping[str, float] = field(hash=False)

    @classmethod
    def between(cls, first: str, base: str, *args: float) -> Hypothesis:
        """About the difference of two rows."""
        return cls({first: 1.0, base: -1.0}, *args)


@dataclass(frozen=True)
class Differs(Hypothesis):
    """The difference has the sign of ``size`` and, if ``sized``, is that large."""

    size: float = 1.0
    sized: bool = True


@dataclass(frozen=True)
class NoDifference(Hypothesis):
    """The difference is within ± ``margin``."""

    margin: float = MARGIN


@dataclass(frozen=True)
class NotWorse(Hypothesis):
    """The difference is above − ``margin``."""

    margin: float = MARGIN


@dataclass(frozen=True)
class Diverges(Hypothesis):
    """More than half of the runs of the row diverge."""


@dataclass(frozen=True)
class Finding:
    """What the runs say about a hypothesis at the look reached, with the 95% interval of the difference in points."""

    verdict: Verdict
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: tuple[int, ...] = ()  # seeds of each row
    own_images: bool = False  # the error of the test images is that of these rows
    at_look: bool = False  # its rows have reached a planned look
    note: str = ""

    @property
    def bounded(self) -> bool:
        return self.low is not None and math.isfinite(self.low)


def judge_family(
    samples: Mapping[str, Sample],
    hypotheses: Sequence[Hypothesis],
    looks: Sequence[tuple[int, float]],
    planned: Mapping[str, int] | None = None,
) -> list[Finding]:
    """Judge hypotheses together at every look that was reached; what an earlier look rejected stays rejected.

    Args:
        samples: the runs of each row; one of another schedule is named ``row@schedule``.
        looks: numbers of seeds with the alpha that each spends. A look is reached when the first so many seeds of every
            row of the hypotheses have run, or all that are planned for it; the last look takes all that are planned.
        planned: seeds per row, if not those of the last look.
    """
    counts = {name: (planned or {}).get(name, looks[-1][0]) for name in samples}
    needed = {name for hypothesis in hypotheses for name in hypothesis.coefficients}
    rejected = [[False, False] for _ in hypotheses]
    signs = [0.0] * len(hypotheses)  # of the difference, when it was shown
    findings = [_pending(samples, hypothesis) for hypothesis in hypotheses]
    for seeds, alpha in looks:
        wanted = {name: counts[name] if seeds == looks[-1][0] else min(seeds, counts[name]) for name in samples}
        taken = {name: sample.first(wanted[name]) for name, sample in samples.items()}
        if any(name not in taken or len(taken[name].accuracies) < wanted[name] for name in needed):
            break
        analysis = _Analysis({name: taken[name] for name in taken if len(taken[name].accuracies) > 1})
        tests = [analysis.test(hypothesis) for hypothesis in hypotheses]
        p_values = [(1.0, 1.0) if test is None else test.p_values for test in tests]
        for index, now in enumerate(reject_holm(p_values, alpha)):
            test = tests[index]
            if test is not None:
                if now[0] and not rejected[index][0]:
                    signs[index] = test.sign
                rejected[index] = [a or b for a, b in zip(rejected[index], now, strict=True)]
                hypothesis = hypotheses[index]
                verdict = _verdict(hypothesis, signs[index], rejected[index])
                note = test.finding.note
                if verdict is Verdict.SMALLER and isinstance(hypothesis, Differs) and test.sign * hypothesis.size < 0:
                    note = "the sign is the opposite one, by no more than chance can bring"
                if seeds != looks[-1][0]:
                    note = "; ".join(filter(None, (note, f"the look at {seeds} seeds, of {looks[-1][0]} planned")))
                findings[index] = replace(test.finding, verdict=verdict, at_look=True, note=note)
    return findings


@dataclass(frozen=True)
class _Test:
    """The p values of a hypothesis's two null hypotheses, and its finding without a verdict."""

    p_values: tuple[float, float]
    finding: Finding
    sign: float = 0.0  # of the observed difference


class _Analysis:
    """The samples of a look with their variances."""

    def __init__(self, samples: Mapping[str, Sample]) -> None:
        self.samples = samples
        self.stable = {name: sample for name, sample in samples.items() if not sample.bad_runs}
        self.variances: dict[str, VarianceEstimate] = {}
        for schedule in dict.fromkeys(name.partition("@")[2] for name in self.stable):
            rows = {n: sample.values for n, sample in self.stable.items() if n.partition("@")[2] == schedule}
            self.variances |= moderated_variances(rows)

    def test(self, hypothesis: Hypothesis) -> _Test | None:
        rows = {name: self.samples[name] for name in hypothesis.coefficients if name in self.samples}
        if len(rows) < len(hypothesis.coefficients):
            return None
        if isinstance(hypothesis, Diverges):
            return _test_divergence(*rows.values())
        if not rows.keys() <= self.stable.keys():
            return _test_ranks(hypothesis, rows)
        if min(len(sample.values) for sample in rows.values()) < MIN_SEEDS:
            return None
        images, own = self._image_variance(hypothesis)
        values = {name: sample.values for name, sample in rows.items()}
        effect = contrast(values, hypothesis.coefficients, self.variances, images)
        low, high = effect.interval()
        n = tuple(len(sample.values) for sample in rows.values())
        finding = Finding(Verdict.INCONCLUSIVE, effect.mean, low, high, n, own)
        return _Test(_p_values(hypothesis, effect), finding, math.copysign(1, effect.mean))

    def _image_variance(self, hypothesis: Hypothesis) -> tuple[float, bool]:
        """That of the rows of the hypothesis, or of comparable ones, or the one measured on other rows."""
        correct = {name: sample.correct for name, sample in self.stable.items()}
        own = image_variance(correct, hypothesis.coefficients)
        if own is not None:
            return own, True
        names = [name for name, hits in correct.items() if len(hits) > 1]
        others = [image_variance(correct, {names[0]: 1.0, name: -1.0}) for name in names[1:]]
        known = [value for value in others if value is not None] or [IMAGE_ERROR**2]
        pairs = sum(abs(c) for c in hypothesis.coefficients.values()) / 2
        return pairs * sum(known) / len(known), False


def _p_values(hypothesis: Hypothesis, effect: Effect) -> tuple[float, float]:
    """Of the two null hypotheses; at most one of them is true."""
    match hypothesis:
        case Differs(size=size, sized=sized):
            direction = 2 * min(effect.p_above(0), effect.p_below(0))
            smaller = effect.p_below(size) if size > 0 else effect.p_above(size)
            return min(1.0, direction), smaller if sized else 0.0  # no second hypothesis that could be true
        case NoDifference(margin=margin):
            same = max(effect.p_above(-margin), effect.p_below(margin))
            return same, min(1.0, 2 * min(effect.p_above(margin), effect.p_below(-margin)))
        case NotWorse(margin=margin):
            return effect.p_above(-margin), effect.p_below(-margin)
    raise TypeError(f"no test for {hypothesis!r}")


def _verdict(hypothesis: Hypothesis, sign: float, rejected: Sequence[bool]) -> Verdict:
    if isinstance(hypothesis, Differs):
        if rejected[0] and sign * hypothesis.size < 0:
            return Verdict.CONTRARY
        if rejected[1] and hypothesis.sized:
            return Verdict.SMALLER
        return Verdict.REPRODUCED if rejected[0] else Verdict.INCONCLUSIVE
    return Verdict.REPRODUCED if rejected[0] else Verdict.CONTRARY if rejected[1] else Verdict.INCONCLUSIVE


def _test_divergence(sample: Sample) -> _Test:
    n, count = len(sample.accuracies), len(sample.diverged)
    low, high = (100 * bound for bound in share_interval(count, n))
    note = f"{count} of {n} runs diverged [{low:.0f}%, {high:.0f}%]"
    p_values = share_p(count, n) if n >= DIVERGENCE_SEEDS else (1.0, 1.0)
    return _Test(p_values, Finding(Verdict.INCONCLUSIVE, n=(n,), note=note))


def _test_ranks(hypothesis: Hypothesis, rows: Mapping[str, Sample]) -> _Test:
    """For rows with bad runs, whose mean says little: which of two rows tends to be higher, by ranks."""
    bad = {name: sample.bad_runs for name, sample in rows.items() if sample.bad_runs}
    note = "; ".join(f"{name}: {count} of {len(rows[name].accuracies)} runs are bad" for name, count in bad.items())
    n = tuple(len(sample.values) for sample in rows.values())
    means = {name: sum(sample.values) / len(sample.values) for name, sample in rows.items()}
    mean = sum(c * means[name] for name, c in hypothesis.coefficients.items())
    finding = Finding(Verdict.INCONCLUSIVE, mean, n=n, note=note)
    if len(rows) != 2 or isinstance(hypothesis, NoDifference):
        return _Test((1.0, 1.0), finding)
    upper, lower = (next(name for name, c in hypothesis.coefficients.items() if c * sign > 0) for sign in (1, -1))
    if isinstance(hypothesis, NotWorse):
        return _Test(rank_p([value + hypothesis.margin for value in rows[upper].values], rows[lower].values), finding)
    above, below = rank_p(rows[upper].values, rows[lower].values)
    return _Test((min(1.0, 2 * min(above, below)), 1.0), finding, 1.0 if above < below else -1.0)


def _pending(samples: Mapping[str, Sample], hypothesis: Hypothesis) -> Finding:
    """Before the first look: the seeds so far, and no verdict."""
    rows = [samples[name] for name in hypothesis.coefficients if name in samples]
    if len(rows) < len(hypothesis.coefficients) or not all(row.accuracies for row in rows):
        return Finding(Verdict.NOT_TESTED, note="no runs yet")
    means = {name: sum(samples[name].values) / len(samples[name].values) for name in hypothesis.coefficients}
    mean = sum(c * means[name] for name, c in hypothesis.coefficients.items())
    return Finding(
        Verdict.INCONCLUSIVE, mean, n=tuple(len(row.values) for row in rows), note="not at a planned look yet"
    )


def judge_sign(sign: int, difference: Interval) -> Verdict:
    """Compare the sign of a difference with the paper's claim, if it gives no number."""
    if difference.n < MIN_SEEDS or not difference.bounded or difference.holds(0):
        return Verdict.INCONCLUSIVE
    return Verdict.REPRODUCED if sign * difference.mean > 0 else Verdict.CONTRARY
