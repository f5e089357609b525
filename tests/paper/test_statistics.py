"""The report's intervals, medians and verdicts."""

import math

import pytest
from scipy import stats

from deepsquare.paper.statistics import Interval, Median, bounds_label, interval, median, paired
from deepsquare.paper.verdict import Verdict, judge

REPRODUCED, CONTRARY, INCONCLUSIVE = Verdict


def test_intervals_are_those_of_scipy() -> None:
    hand = interval([1.0, 2.0, 3.0])
    assert hand is not None
    assert (hand.mean, hand.n) == (2.0, 3)
    assert hand.half == pytest.approx(4.302652729911275 / math.sqrt(3))  # t of 97.5% and 2 degrees of freedom
    values, base = (81.3, 82.1, 81.0, 83.2, 80.9), (80.0, 81.5, 81.2, 82.0, 80.1)
    mean = interval(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean is not None
    assert (mean.low, mean.high) == pytest.approx((low, high))
    difference = paired({**dict(enumerate(values)), 9: 0.0}, {**dict(enumerate(base)), 7: 50.0})
    low, high = stats.ttest_rel(values, base).confidence_interval(0.95)
    assert difference is not None
    assert (difference.low, difference.high) == pytest.approx((low, high))
    assert difference.n == 5
    assert interval([]) is None
    assert paired({0: 1.0}, {1: 1.0}) is None
    one = interval([7.0])
    assert one is not None
    assert one.holds(1e9)
    assert not one.bounded


def test_medians_by_ranks() -> None:
    assert median(list(range(1, 10))) == Median(5, 2, 8)  # of 9 the second and the eighth: 96%
    assert median([3.0, 1.0, 2.0]) == Median(2, 1, 3)
    assert bounds_label(6) == "95% interval"  # the range of 6 values covers the median with 97%, that of 5 with 94%
    assert bounds_label(5, "iterations") == "range of 5 iterations"


@pytest.mark.parametrize(
    ("claim", "ends", "seeds", "diverged", "expected"),
    [
        (1.06, (0.2, 1.5), 3, 0, REPRODUCED),
        (1.06, (-0.1, 1.5), 5, 0, INCONCLUSIVE),
        (1.06, (-1.5, -0.2), 5, 0, CONTRARY),
        (1.06, (0.0, 1.0), 5, 0, INCONCLUSIVE),  # 0 is not excluded
        (-1.39, (-2.0, -0.5), 5, 0, REPRODUCED),
        (-1.39, (0.5, 2.0), 5, 0, CONTRARY),
        (1.06, (0.2, 1.5), 2, 0, INCONCLUSIVE),  # too few seeds
        (1.06, None, 0, 0, INCONCLUSIVE),
        (-0.02, (-0.49, 0.3), 5, 0, REPRODUCED),  # no difference
        (-0.02, (-0.6, 0.3), 5, 0, INCONCLUSIVE),
        (-0.02, (0.4, 0.8), 5, 0, INCONCLUSIVE),
        (-0.02, (0.51, 0.8), 5, 0, CONTRARY),
        (-0.02, (-2.0, -0.51), 5, 0, CONTRARY),
        (0.1, (0.2, 0.3), 5, 0, REPRODUCED),  # a difference again
        (1.06, (0.2, 1.5), 3, 2, REPRODUCED),  # 2 of 5 diverged
        (1.06, (0.2, 1.5), 3, 4, CONTRARY),  # 4 of 7 diverged
        (1.06, None, 0, 2, INCONCLUSIVE),
        (None, None, 0, 3, REPRODUCED),
        (None, None, 0, 2, INCONCLUSIVE),
        (None, (-9.0, -8.0), 2, 2, INCONCLUSIVE),  # half of them is no majority
        (None, (-9.0, -8.0), 2, 3, REPRODUCED),
        (None, (-9.0, -8.0), 3, 0, CONTRARY),
        (None, (-9.0, -8.0), 2, 0, INCONCLUSIVE),
    ],
)
def test_verdicts(
    claim: float | None, ends: tuple[float, float] | None, seeds: int, diverged: int, expected: Verdict
) -> None:
    ours = None if ends is None else Interval((ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2, seeds)
    assert judge(claim, ours, seeds + diverged, diverged) is expected
