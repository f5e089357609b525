"""The rule by which claims are judged: its statistics against independent computations, and its verdicts."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from deepsquare.paper.statistics import (
    contrast,
    image_variance,
    moderated_variances,
    rank_p,
    reject_holm,
    share_interval,
    share_p,
)
from deepsquare.paper.verdict import (
    Differs,
    Diverges,
    Finding,
    Hypothesis,
    NoDifference,
    NotWorse,
    Sample,
    Verdict,
    judge_family,
)

ONE_LOOK = ((3, 0.05),)


def sample(*values: float, diverged: Sequence[int] = ()) -> Sample:
    return Sample(dict(enumerate(values)), frozenset(diverged))


def judge(hypothesis: Hypothesis, *, looks: Sequence[tuple[int, float]] = ONE_LOOK, **rows: Sample) -> Finding:
    (finding,) = judge_family(rows, [hypothesis], looks)
    return finding


def test_variances_are_moderated_as_by_limma() -> None:
    generator = np.random.default_rng(1)
    scales = np.sqrt(0.04 * 8 / generator.chisquare(8, 3000))  # scattered like 0.04·8/χ²(8)
    samples = {str(k): (scale * generator.normal(size=4)).tolist() for k, scale in enumerate(scales)}
    variances = moderated_variances(samples)
    assert variances["0"].df - 3 == pytest.approx(8, rel=0.2)  # d₀ is found again
    d0 = variances["0"].df - 3
    s2 = np.array([np.var(values, ddof=1) for values in samples.values()])
    e = np.log(s2) - special.digamma(1.5) + np.log(1.5)
    assert special.polygamma(1, d0 / 2) == pytest.approx(np.var(e, ddof=1) - special.polygamma(1, 1.5))
    prior = np.exp(e.mean() + special.digamma(d0 / 2) - np.log(d0 / 2))
    for (name, variance), own in zip(variances.items(), s2, strict=True):
        assert variance.value == pytest.approx(max(own, (d0 * prior + 3 * own) / (d0 + 3))), name


def test_equal_variances_are_pooled_and_few_samples_are_not_moderated() -> None:
    same = {str(k): [0.0, 1.0, 2.0] for k in range(6)}
    assert {(v.value, v.df) for v in moderated_variances(same).values()} == {(1.0, 12)}
    few = {"a": [0.0, 2.0], "b": [0.0, 1.0, 5.0], "c": [1.0]}
    assert {name: (v.value, v.df) for name, v in moderated_variances(few).items()} == {"a": (2.0, 1), "b": (7.0, 2)}


def test_a_contrast_of_two_rows_is_welch_s_test() -> None:
    rows = {"a": [81.3, 82.1, 81.0], "b": [80.0, 81.5, 81.2, 80.4]}
    effect = contrast(rows, {"a": 1.0, "b": -1.0}, moderated_variances(rows))
    welch = stats.ttest_ind(rows["a"], rows["b"], equal_var=False)
    assert 2 * min(effect.p_above(0), effect.p_below(0)) == pytest.approx(welch.pvalue)
    assert effect.interval() == pytest.approx(welch.confidence_interval(0.95))
    wider = contrast(rows, {"a": 1.0, "b": -1.0}, moderated_variances(rows), image_variance=0.5)
    assert wider.se**2 == pytest.approx(effect.se**2 + 0.5)


def test_the_variance_of_the_images_leaves_out_what_the_seeds_explain() -> None:
    generator = np.random.default_rng(2)
    images, seeds = 20_000, 5
    easy = generator.random(images)
    shift = 0.1 * generator.normal(size=images)
    probabilities = {"a": np.clip(easy + shift, 0, 1), "b": easy}
    correct = {row: {s: generator.random(images) < p for s in range(seeds)} for row, p in probabilities.items()}
    true = float(np.var(probabilities["a"] - probabilities["b"])) / images * 100**2
    assert image_variance(correct, {"a": 1.0, "b": -1.0}) == pytest.approx(true, rel=0.1)
    same = {"a": correct["b"], "b": {s + seeds: generator.random(images) < easy for s in range(seeds)}}
    assert image_variance(same, {"a": 1.0, "b": -1.0}) == pytest.approx(0, abs=0.1 * true)
    assert image_variance({"a": correct["a"], "b": {0: correct["b"][0]}}, {"a": 1.0, "b": -1.0}) is None


def test_holm_by_hand_and_by_its_definition() -> None:
    # 0.05/3 rejects 0.01; the claim is closed, 0.05/2 rejects 0.02; 0.06 stays.
    assert reject_holm([[0.01], [0.02], [0.06]], 0.05) == [[True], [True], [False]]
    # Both hypotheses of the first claim fall, which leaves one claim: 0.04 < 0.05. With two claims open it would stay.
    assert reject_holm([[0.001, 0.002], [0.04, 1.0]], 0.05) == [[True, True], [True, False]]
    assert reject_holm([[0.001, 1.0], [0.04, 1.0]], 0.05) == [[True, False], [False, False]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.2))
def test_holm_with_one_hypothesis_a_claim(p_values: list[float], alpha: float) -> None:
    ordered = sorted(p_values)
    stop = next((k for k, p in enumerate(ordered) if p > alpha / (len(ordered) - k)), len(ordered))
    rejected = reject_holm([[p] for p in p_values], alpha)
    assert sum(done for (done,) in rejected) == stop
    assert all(done == (p <= ordered[stop - 1] and stop > 0) for p, (done,) in zip(p_values, rejected, strict=True))


def test_ranks_and_shares_are_exact() -> None:
    orders = list(itertools.combinations(range(7), 4))  # the ranks of 4 of 7 values, all equally likely
    first, second = [7.0, 6.0, 5.0, 2.0], [4.0, 3.0, 1.0]
    rank_sum = sum(int(v) - 1 for v in first)
    expected = np.mean([sum(order) >= rank_sum for order in orders])
    assert rank_p(first, second)[0] == pytest.approx(expected)
    assert share_p(6, 6) == pytest.approx((2**-6, 1))
    low, high = share_interval(2, 9)
    assert stats.binom.sf(1, 9, low) == pytest.approx(0.025)
    assert stats.binom.cdf(2, 9, high) == pytest.approx(0.025)
    assert (share_interval(0, 6)[0], share_interval(6, 6)[1]) == (0, 1)


BASE = sample(80.0, 80.1, 79.9)


@pytest.mark.parametrize(
    ("row", "hypothesis", "expected"),
    [
        (sample(81.0, 81.1, 80.9), Differs.between("row", "base", 1.06), Verdict.REPRODUCED),
        (sample(82.9, 83.1, 83.0), Differs.between("row", "base", 1.06), Verdict.REPRODUCED),  # even more
        (sample(80.5, 80.6, 80.4), Differs.between("row", "base", 2.0), Verdict.SMALLER),
        (sample(80.0, 80.1, 80.0), Differs.between("row", "base", 2.0), Verdict.SMALLER),
        (sample(79.0, 79.1, 78.9), Differs.between("row", "base", 1.06), Verdict.CONTRARY),
        (sample(80.1, 80.2, 80.0), Differs.between("row", "base", 0.2), Verdict.INCONCLUSIVE),
        (sample(79.0, 79.1, 78.9), Differs.between("row", "base", -1.06), Verdict.REPRODUCED),
        (sample(81.0, 81.1, 80.9), Differs.between("row", "base", -1.06), Verdict.CONTRARY),
        (sample(80.1, 80.0, 80.05), NoDifference.between("row", "base"), Verdict.REPRODUCED),
        (sample(81.0, 81.1, 80.9), NoDifference.between("row", "base"), Verdict.CONTRARY),
        (sample(80.4, 80.6, 80.5), NoDifference.between("row", "base"), Verdict.INCONCLUSIVE),
        (sample(80.0, 80.1, 79.9), NotWorse.between("row", "base"), Verdict.REPRODUCED),
        (sample(79.0, 79.1, 78.9), NotWorse.between("row", "base"), Verdict.CONTRARY),
        (sample(81.0, 81.1, 10.0, diverged=[2]), Differs.between("row", "base", 1.06), Verdict.INCONCLUSIVE),
        (sample(81.0, 81.1), Differs.between("row", "base", 1.06), Verdict.INCONCLUSIVE),  # not at the look
    ],
)
def test_verdicts(row: Sample, hypothesis: Hypothesis, expected: Verdict) -> None:
    assert judge(hypothesis, row=row, base=BASE).verdict is expected


def test_rows_that_have_not_run() -> None:
    finding = judge(Differs.between("row", "base", 1.0), base=BASE)
    assert (finding.verdict, finding.mean) == (Verdict.NOT_TESTED, None)
    early = judge(Differs.between("row", "base", 1.0), row=sample(82.0), base=BASE)
    assert early.verdict is Verdict.INCONCLUSIVE
    assert early.mean == pytest.approx(2)
    assert not early.at_look


@pytest.mark.parametrize(
    ("count", "n", "expected"),
    [(6, 6, "reproduced"), (0, 6, "contrary"), (3, 6, "inconclusive"), (5, 6, "inconclusive"), (5, 5, "inconclusive")],
)
def test_divergence(count: int, n: int, expected: str) -> None:
    row = sample(*[10.0] * count, *[70.0] * (n - count), diverged=range(count))
    finding = judge(Diverges({"row": 1.0}), looks=((n, 0.05),), row=row)
    assert finding.verdict.value == expected
    assert finding.note.startswith(f"{count} of {n} runs diverged [")


def test_a_row_with_bad_runs_is_compared_by_ranks() -> None:
    base = sample(*np.linspace(79.8, 80.2, 6))
    worse = sample(76.0, 60.0, *np.linspace(77.0, 78.9, 4))
    finding = judge(Differs.between("row", "base", 1.0), looks=((6, 0.05),), row=worse, base=base)
    assert finding.verdict is Verdict.CONTRARY
    assert finding.note == "row: 1 of 6 runs are bad"
    assert not finding.bounded  # a mean of good and bad runs has no useful interval
    mostly_better = sample(60.0, *np.linspace(81.0, 81.3, 5))
    assert judge(Differs.between("row", "base", 1.0), looks=((6, 0.05),), row=mostly_better, base=base).verdict in (
        Verdict.INCONCLUSIVE,
        Verdict.REPRODUCED,
    )


def test_looks_spend_alpha_and_take_their_first_seeds_only() -> None:
    looks = ((3, 0.001), (5, 0.049))
    base = sample(80.0, 80.3, 79.7, 80.1, 79.9)
    three, five = sample(81.0, 81.2, 80.7), sample(81.0, 81.2, 80.7, 81.1, 80.9)
    hypothesis = Differs.between("row", "base", 1.0)
    assert judge(hypothesis, looks=looks, row=three, base=base).verdict is Verdict.INCONCLUSIVE
    assert judge(hypothesis, looks=((3, 0.05),), row=three, base=base).verdict is Verdict.REPRODUCED
    assert judge(hypothesis, looks=looks, row=five, base=base).verdict is Verdict.REPRODUCED
    four = sample(*five.values[:3], 10.0)  # a fourth seed does not count before the look at five
    assert judge(hypothesis, looks=looks, row=four, base=base).mean == pytest.approx(
        judge(hypothesis, looks=looks, row=three, base=base).mean
    )


def test_an_earlier_rejection_stays() -> None:
    looks = ((3, 0.04), (5, 0.01))
    base = sample(80.0, 80.1, 79.9, 80.0, 80.0)
    fading = sample(81.0, 81.1, 80.9, 79.0, 79.1)
    assert judge(Differs.between("row", "base", 1.0), looks=looks, row=fading, base=base).verdict is Verdict.REPRODUCED


@given(st.lists(st.floats(-1, 1), min_size=6, max_size=6), st.floats(-3, 3), st.floats(0.2, 3))
def test_the_mirror_image_of_a_claim_has_the_same_verdict(noise: list[float], shift: float, size: float) -> None:
    row, base = sample(*(80 + shift + x for x in noise[:3])), sample(*(80 + x for x in noise[3:]))
    claimed = judge(Differs.between("row", "base", size), row=row, base=base)
    mirrored = judge(Differs.between("base", "row", -size), row=row, base=base)
    assert claimed.verdict is mirrored.verdict
    if claimed.bounded and mirrored.mean is not None:
        assert claimed.mean == pytest.approx(-mirrored.mean)


def test_more_claims_make_a_verdict_harder() -> None:
    rows = {"base": sample(80.0, 80.4, 79.6), "row": sample(80.9, 81.2, 80.6)}
    rows |= {f"other {k}": sample(80.0 + k / 10, 80.2 + k / 10, 79.9 + k / 10) for k in range(12)}
    claim = Differs.between("row", "base", 1.0)
    others = [Differs.between(f"other {k}", "base", 1.0) for k in range(12)]
    alphas = np.geomspace(1e-6, 0.05, 30)

    def reproduced(hypotheses: Sequence[Hypothesis]) -> list[bool]:
        return [judge_family(rows, hypotheses, ((3, a),))[0].verdict is Verdict.REPRODUCED for a in alphas]

    alone, together = reproduced([claim]), reproduced([claim, *others])
    assert sum(together) < sum(alone)
    assert all(one >= both for one, both in zip(alone, together, strict=True))
