"""The verdict on a claim of the paper. The page states this rule; change both together."""

from enum import Enum

from deepsquare.paper.statistics import Interval

SEEDS = 3  # with fewer, every verdict is inconclusive
NO_DIFFERENCE = 0.1  # points: a claim below it is a claim of no difference
MARGIN = 0.5  # points: a smaller difference counts as none


class Verdict(Enum):
    """Whether the runs agree with a claim."""

    REPRODUCED = "reproduced"
    CONTRARY = "contrary"
    INCONCLUSIVE = "inconclusive"


def judge(claim: float | None, improvement: Interval | None, runs: int, diverged: int) -> Verdict:
    """Compare the paper's improvement with ours.

    Args:
        claim: the paper's improvement in points; None if it reports divergence.
        improvement: ours, paired by seed, in points; None if there is no pair.
        runs: how many seeds were run.
        diverged: how many of them diverged; they are not in ``improvement``.
    """
    if runs >= SEEDS and 2 * diverged > runs:  # the runs that did not diverge are a biased sample
        return Verdict.REPRODUCED if claim is None else Verdict.CONTRARY
    if claim is None:
        return Verdict.CONTRARY if runs >= SEEDS and diverged == 0 else Verdict.INCONCLUSIVE
    if improvement is None or improvement.n < SEEDS:
        return Verdict.INCONCLUSIVE
    low, high = improvement.low, improvement.high
    if abs(claim) < NO_DIFFERENCE:
        same, other = low >= -MARGIN and high <= MARGIN, high < -MARGIN or low > MARGIN
    else:
        same, other = (low > 0, high < 0) if claim > 0 else (high < 0, low > 0)
    return Verdict.REPRODUCED if same else Verdict.CONTRARY if other else Verdict.INCONCLUSIVE


def judge_sign(sign: int, difference: Interval) -> Verdict:
    """Compare the sign of a difference with the paper's claim, if it gives no number."""
    if difference.n < SEEDS or not difference.bounded or difference.holds(0):
        return Verdict.INCONCLUSIVE
    return Verdict.REPRODUCED if sign * difference.mean > 0 else Verdict.CONTRARY
