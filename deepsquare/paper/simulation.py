"""How often the rule of verdict.py errs, and what it can decide: simulated runs of CIFAR-10, judged as planned.

Each image has a probability to be classified correctly, with Beta(0.55, 0.14): a mean of 80%, and networks of the same
row that disagree on 13% of the images, as they do here. A row shifts the log-odds of the images, each by another
amount, so that two rows differ on the images by as much as measured (a standard error of 0.1 points from the choice of
10,000 images). A run draws which images are right. So the scatter of runs (0.25 points) follows; with ``scatter`` it
differs by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import rich
from rich.progress import track
from rich.table import Table

from deepsquare.paper.claims import describe, hypotheses_of
from deepsquare.paper.options import OUT, OutputFolders
from deepsquare.paper.regimes import LONG, SHORT_SUFFIX, TEST_IMAGES, Regime, regimes
from deepsquare.paper.tables import TABLE_2, TABLE_3, stored_labels
from deepsquare.paper.verdict import (
    Differs,
    Diverges,
    Hypothesis,
    NoDifference,
    NotWorse,
    Sample,
    Verdict,
    judge_family,
)
from deepsquare.results import Row, Store, conditions

Array = npt.NDArray[np.float64]
EASE = (0.547, 0.137)  # of the Beta distribution
SPREAD = 0.75  # standard deviation of a row's shifts of the log-odds
EXPERIMENT, AS_CLAIMED = "error_rates", "every row as the paper states"
POWER = 0.8  # what a claim needs to be decidable


@dataclass(frozen=True)
class Truth:
    """A state of the world: the true improvement of each row in points, and what scatters the runs further."""

    name: str
    effect: Callable[[float], float]  # of a row, from the improvement that the paper states
    scatter: tuple[float, ...] = (0.0,)  # further standard deviations of the runs in points, row by row


TRUTHS = (
    Truth("no row differs from the original", lambda claimed: 0.0),
    Truth(AS_CLAIMED, lambda claimed: claimed),
    Truth("every row half of what the paper states", lambda claimed: claimed / 2),
    Truth("no row differs, rows scatter unequally", lambda claimed: 0.0, (0.0, 0.1, 0.2, 0.4)),
    Truth("as the paper states, rows scatter unequally", lambda claimed: claimed, (0.0, 0.1, 0.2, 0.4)),
)


@dataclass
class Outcome:
    """What the rule said over the simulated studies of one truth."""

    studies: int = 0
    with_false_verdict: int = 0
    verdicts: dict[str, dict[Verdict, int]] = field(default_factory=dict)


def improvements() -> dict[str, float]:
    """The improvements that the paper states, by the label under which a row is stored; divergence counts as 0."""
    labels, base = stored_labels(), TABLE_2.entries[0].top1 or 0.0
    entries = (*TABLE_2.entries, *TABLE_3.entries)
    return {labels[entry.spec]: round(entry.top1 - base, 2) if entry.top1 else 0.0 for entry in entries}


def simulate(truth: Truth, studies: int, seed: int, regime: Regime, hypotheses: Sequence[Hypothesis]) -> Outcome:
    """Judge simulated studies of a regime."""
    generator, outcome = np.random.default_rng(seed), Outcome()
    effects = {label: truth.effect(claimed) for label, claimed in improvements().items()}
    for _ in range(studies):
        samples = draw_study(effects, regime, truth.scatter, generator)
        findings = judge_family(samples, hypotheses, regime.looks, regime.planned)
        outcome.studies += 1
        false = [is_false(h, f.verdict, effects) for h, f in zip(hypotheses, findings, strict=True)]
        outcome.with_false_verdict += any(false)
        for hypothesis, finding in zip(hypotheses, findings, strict=True):
            counted = outcome.verdicts.setdefault(describe(hypothesis), {})
            counted[finding.verdict] = counted.get(finding.verdict, 0) + 1
    return outcome


def draw_study(
    effects: Mapping[str, float], regime: Regime, scatter: Sequence[float], generator: np.random.Generator
) -> dict[str, Sample]:
    """The planned runs of every row, on one set of test images."""
    ease = _log_odds(generator.beta(*EASE, TEST_IMAGES))
    samples = {}
    for index, (label, effect) in enumerate(effects.items()):
        shifts = generator.normal(shift_for(effect), SPREAD, TEST_IMAGES)
        probability = 1 / (1 + np.exp(-ease - shifts))
        seeds = range(regime.planned.get(label, regime.looks[-1][0]))
        correct = {s: generator.random(TEST_IMAGES) < probability for s in seeds}
        extra = generator.normal(0, scatter[index % len(scatter)], len(seeds))
        accuracies = {s: 100 * float(hits.mean()) + extra[s] for s, hits in correct.items()}
        samples[label] = Sample(accuracies, correct=correct)
    return samples


def _log_odds(probability: Array) -> Array:
    clipped = np.clip(probability, 1e-9, 1 - 1e-9)
    return np.asarray(np.log(clipped / (1 - clipped)))


@cache
def shift_for(points: float) -> float:
    """The mean shift of the log-odds that raises the accuracy over all possible images by so many points."""
    from scipy.optimize import brentq

    generator = np.random.default_rng(0)
    ease, z = _log_odds(generator.beta(*EASE, 400_000)), generator.normal(0, SPREAD, 400_000)

    def accuracy(shift: float) -> float:
        return float((1 / (1 + np.exp(-ease - z - shift))).mean())

    target = accuracy(0.0) + points / 100
    return 0.0 if points == 0 else float(brentq(lambda shift: accuracy(shift) - target, -20, 20, xtol=1e-6))


def is_false(hypothesis: Hypothesis, verdict: Verdict, effects: Mapping[str, float]) -> bool:
    """Whether a verdict contradicts the true effects."""
    if verdict in (Verdict.INCONCLUSIVE, Verdict.NOT_TESTED):
        return False
    if isinstance(hypothesis, Diverges):  # no simulated run diverges
        return verdict is Verdict.REPRODUCED
    true = sum(c * effects[label] for label, c in hypothesis.coefficients.items())
    match hypothesis:
        case Differs(size=size):
            same, as_large = true * size > 0, abs(true) >= abs(size) - 1e-9
            return {
                Verdict.REPRODUCED: not same,
                Verdict.CONTRARY: same or true == 0,
                Verdict.SMALLER: same and as_large,
            }[verdict]
        case NoDifference(margin=margin):
            return (verdict is Verdict.REPRODUCED) is not (abs(true) < margin)
        case NotWorse(margin=margin):
            return (verdict is Verdict.REPRODUCED) is not (true > -margin)
    raise TypeError(f"no truth for {hypothesis!r}")


def undecidable(rows: Sequence[Row]) -> dict[str, float]:
    """The claims that the plan is unlikely to confirm even if the paper's numbers are true, with its chance."""
    as_claimed = [row for row in rows if (row.experiment, row.row) == (EXPERIMENT, AS_CLAIMED)]
    if not as_claimed:
        return {}
    verdicts = as_claimed[-1].metrics["verdicts"]
    divergence = {describe(h) for h in hypotheses_of(LONG) if isinstance(h, Diverges)}  # not simulated
    power = {claim: counted.get(Verdict.REPRODUCED.value, 0.0) for claim, counted in verdicts.items()}
    return {claim: share for claim, share in power.items() if share < POWER and claim not in divergence}


def run_rule(*, studies: int = 1000, seed: int = 0, output: OutputFolders = OUT) -> None:
    """The error rates and the power of the rule by which claims are judged, on simulated runs.

    Args:
        studies: How many studies are simulated for each state of the world.
        seed: Seed of the simulation.
    """
    if studies < 1:
        raise ValueError(f"studies is {studies}; expected at least 1")
    regime = regimes()[LONG]
    hypotheses = [h for h in hypotheses_of(LONG) if not any(name.endswith(SHORT_SUFFIX) for name in h.coefficients)]
    rows = []
    table = Table(
        "true effects", "false verdicts", title="The rule of verdicts, simulated", caption=f"{studies} studies each"
    )
    for truth in track(TRUTHS, "simulating", transient=True):
        outcome = simulate(truth, studies, seed, regime, hypotheses)
        share = outcome.with_false_verdict / studies
        verdicts = {
            claim: {kind.value: count / studies for kind, count in counted.items()}
            for claim, counted in outcome.verdicts.items()
        }
        recipe = {"regime": regime.name, "looks": [list(look) for look in regime.looks], "studies": studies}
        metrics = {"false_verdict": share, "verdicts": verdicts}
        rows.append(Row(EXPERIMENT, truth.name, seed, recipe, metrics, 0.0, **conditions()))
        table.add_row(truth.name, f"{100 * share:.1f}%")
    Store(output.results / "error_rates.jsonl").replace(rows)
    rich.print(table)
