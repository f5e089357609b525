"""The report's intervals and medians."""

import math

import pytest
from scipy import stats

from deepsquare.paper.statistics import Median, bounds_label, interval, median, paired


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
