"""The ledger: every claim of the paper with the verdict that the rows allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from deepsquare.models import create_model
from deepsquare.paper.claim_tests import (
    Accuracy,
    ActivationCost,
    CheckedBy,
    Claim,
    FewImprove,
    NotTested,
    Overhead,
    Parameters,
    Regions,
    Spirals,
    Test,
)
from deepsquare.paper.claims import CLAIMS, describe, hypotheses_of
from deepsquare.paper.fig2.experiment import CaseSummary
from deepsquare.paper.regimes import LONG, SHORT, SHORT_SUFFIX, TEST_IMAGES, Regime, regimes
from deepsquare.paper.report.bench import spec_title
from deepsquare.paper.report.figures import LABELS, spiral_results
from deepsquare.paper.statistics import Median
from deepsquare.paper.table_claims import signed
from deepsquare.paper.tables import stored_labels
from deepsquare.paper.verdict import PENDING, Finding, Hypothesis, Sample, Verdict, judge_family
from deepsquare.results import Row, unpack_bits

CLASSES = {"cifar10": 10, "tiny_imagenet": 200}
STORES = {"cifar10": "cifar10.jsonl", "tiny_imagenet": "tiny_imagenet.jsonl"}


@dataclass(frozen=True)
class Judged:
    """A test of a claim with its verdict, as the page shows it."""

    verdict: Verdict
    effect: str = ""
    seeds: str = ""
    regime: str = ""
    rows: str = ""  # the file in results/
    note: str = ""
    final: bool = True  # not before a planned look


@dataclass(frozen=True)
class Entry:
    """A claim with the test that decides it, its other tests, and those on other data."""

    anchor: str  # the id on the page
    claim: Claim
    decisive: Judged
    others: tuple[Judged, ...]
    proxies: tuple[Judged, ...]


@dataclass(frozen=True)
class Evidence:
    """What the tests read: the rows, and what other parts of the page make of them."""

    rows: Sequence[Row]
    regions: Sequence[CaseSummary]
    spirals: Mapping[str, Mapping[str, Any]]
    backbones: Mapping[str, Mapping[str, Any]]
    activations: Mapping[str, Mapping[str, float]]

    @cached_property
    def findings(self) -> dict[tuple[str, Hypothesis], Finding]:
        """The findings of every hypothesis, each regime judged as one family."""
        findings: dict[tuple[str, Hypothesis], Finding] = {}
        for name, regime in regimes().items():
            hypotheses = hypotheses_of(name)
            if hypotheses:
                judged = judge_regime(regime, hypotheses, self.rows)
                findings |= {(name, h): f for h, f in zip(hypotheses, judged, strict=True)}
        return findings

    def against_original(self, regime: str) -> dict[str, Finding]:
        """The findings on the claims of Tables 2 and 3, by label."""
        return {
            next(iter(hypothesis.coefficients)): finding
            for (name, hypothesis), finding in self.findings.items()
            if name == regime and hypothesis in _TABLE_HYPOTHESES
        }

    def by_schedule(self) -> dict[tuple[str, str], dict[str, Finding]]:
        """The findings on the claims of Tables 2 and 3 by experiment and schedule, by spec."""
        specs = {label: spec for spec, label in stored_labels().items()}
        return {
            (regime.experiment, regime.schedule): {
                specs[label]: finding for label, finding in self.against_original(name).items()
            }
            for name, regime in regimes().items()
            if name in (SHORT, LONG)
        }


_TABLE_HYPOTHESES = frozenset(
    hypothesis
    for claim in CLAIMS
    if claim.place in ("Table 2", "Table 3")
    for test in claim.tests
    if isinstance(test, Accuracy)
    for hypothesis in test.hypotheses
)


def judge_regime(regime: Regime, hypotheses: Sequence[Hypothesis], rows: Sequence[Row]) -> list[Finding]:
    """Judge the hypotheses of a regime together, on its rows."""
    samples = samples_of(rows, regime.experiment, regime.schedule)
    planned = dict(regime.planned)
    if any(name.endswith(SHORT_SUFFIX) for hypothesis in hypotheses for name in hypothesis.coefficients):
        short = regimes()[SHORT]
        for label, sample in samples_of(rows, short.experiment, short.schedule).items():
            samples[label + SHORT_SUFFIX] = sample
            planned[label + SHORT_SUFFIX] = short.looks[-1][0]
    return judge_family(samples, hypotheses, regime.looks, planned)


def samples_of(rows: Sequence[Row], experiment: str, schedule: str) -> dict[str, Sample]:
    """The runs of an experiment and schedule by label."""
    labels = stored_labels()
    accuracies: dict[str, dict[int, float]] = {}
    diverged: dict[str, set[int]] = {}
    correct: dict[str, dict[int, Any]] = {}
    for row in rows:
        if row.experiment != experiment or row.recipe.get("schedule") != schedule or "accuracy" not in row.metrics:
            continue
        label = labels.get(row.recipe.get("spec", ""), row.row) if experiment == "cifar10" else row.row
        metrics, fraction = row.metrics, row.metrics["accuracy"]
        failed = bool(metrics.get("diverged")) or fraction is None
        accuracies.setdefault(label, {})[row.seed] = 100 / CLASSES[experiment] if failed else 100 * fraction
        if failed:
            diverged.setdefault(label, set()).add(row.seed)
        elif metrics.get("correct"):
            correct.setdefault(label, {})[row.seed] = unpack_bits(metrics["correct"], TEST_IMAGES).numpy()
    return {
        label: Sample(values, frozenset(diverged.get(label, ())), correct.get(label, {}))
        for label, values in accuracies.items()
    }


def ledger(evidence: Evidence) -> list[Entry]:
    """Every claim, judged."""
    return [_entry(f"claim-{number}", claim, evidence) for number, claim in enumerate(CLAIMS, 1)]


def _entry(anchor: str, claim: Claim, evidence: Evidence) -> Entry:
    judged = [_judge(test, evidence) for test in claim.tests]
    proxies = tuple(_judge(test, evidence) for test in claim.proxies)
    reached = [test for test in judged if test.verdict is not Verdict.NOT_TESTED]
    at_look = [test for test in reached if test.final]
    decisive = (*at_look, *reached, *judged)[0]
    others = tuple(test for test in reached if test is not decisive)
    shown = tuple(proxy for proxy in proxies if proxy.verdict is not Verdict.NOT_TESTED)
    return Entry(anchor, claim, decisive, others, shown)


def _judge(test: Test, evidence: Evidence) -> Judged:
    match test:
        case Accuracy():
            return _accuracy(test, evidence)
        case FewImprove():
            return _few_improve(test, evidence)
        case Spirals():
            return _spirals(test, evidence.spirals)
        case Regions():
            return _regions(test, evidence.regions)
        case Parameters():
            return _parameters(test)
        case Overhead():
            return _overhead(test, evidence.backbones)
        case ActivationCost():
            return _activations(test, evidence.activations)
        case CheckedBy():
            return Judged(Verdict.REPRODUCED, note=f"checked by {test.test}")
        case NotTested():
            return Judged(Verdict.NOT_TESTED, note=f"needs {test.needs}")


def _accuracy(test: Accuracy, evidence: Evidence) -> Judged:
    regime = regimes()[test.regime]
    findings = [evidence.findings[test.regime, hypothesis] for hypothesis in test.hypotheses]
    seeds = _seeds([n for finding in findings for n in finding.n])
    store, final = STORES[regime.experiment], all(finding.at_look for finding in findings)
    if len(findings) > 1:
        verdict = _all([finding.verdict for finding in findings])
        pairs = zip(test.hypotheses, findings, strict=True)
        effect = "; ".join(f"{describe(h)} {_effect(f)}" for h, f in pairs if f.mean is not None)
        notes = dict.fromkeys(f.note for f in findings if f.note)
        return Judged(verdict, effect, seeds, regime.title, store, "; ".join(notes), final)
    finding = findings[0]
    effect = "" if finding.mean is None else _effect(finding)
    without = finding.bounded and not finding.both_sources
    note = "; ".join(filter(None, (finding.note, "without the error of the test images" if without else "")))
    return Judged(finding.verdict, effect, seeds, regime.title, store, note, final)


def _all(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim that needs all of its hypotheses."""
    if Verdict.CONTRARY in verdicts:
        return Verdict.CONTRARY
    for kind in (Verdict.REPRODUCED, Verdict.NOT_TESTED):
        if set(verdicts) == {kind}:
            return kind
    return Verdict.INCONCLUSIVE


def _few_improve(test: FewImprove, evidence: Evidence) -> Judged:
    regime, findings = regimes()[test.regime], list(evidence.against_original(test.regime).values())
    better, worse = (sum(finding.direction == sign for finding in findings) for sign in (1, -1))
    final = all(finding.at_look for finding in findings)
    effect = f"of {len(findings)}: {better} better, {worse} worse, the others not told apart"
    verdict = Verdict.INCONCLUSIVE
    if 2 * better >= len(findings):
        verdict = Verdict.CONTRARY
    elif 2 * (len(findings) - worse) < len(findings):
        verdict = Verdict.REPRODUCED
    seeds = _seeds([n for finding in findings for n in finding.n])
    if not any(finding.at_look for finding in findings):
        verdict = Verdict.NOT_TESTED
    return Judged(verdict, effect, seeds, regime.title, STORES[regime.experiment], "" if final else PENDING, final)


def _effect(finding: Finding) -> str:
    assert finding.mean is not None
    low, high = finding.low, finding.high
    interval = "" if low is None or high is None else f" [{signed(low)}, {signed(high)}]"
    return signed(finding.mean) + interval


def _seeds(n: Sequence[int]) -> str:
    return "–".join(map(str, sorted({min(n), max(n)}))) if n else ""


def _spirals(test: Spirals, metrics: Mapping[str, Mapping[str, Any]]) -> Judged:
    task = "one-arm" if test.figure in (3, 4) else "three-arm"
    results = spiral_results(metrics, task, smoothness=test.figure in (3, 5))
    difference = results["differences"].get(test.metric) if results else None
    if results is None or difference is None:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare reproduce fig3")
    effect = f"{LABELS.get(test.metric, test.metric)}: {difference['interval'].format(signed=True)}"
    regime = "both activations tuned, constant learning rate"
    return Judged(difference["verdict"], effect, str(results["seeds"]), regime, "spirals.jsonl")


def _regions(test: Regions, cases: Sequence[CaseSummary]) -> Judged:
    of_kind = [case for case in cases if case.holds is not None and ("ReLU" in case.case.name) is not test.squares]
    if not of_kind:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare reproduce fig2")
    holds = all(case.holds for case in of_kind)
    networks = sum(case.networks for case in of_kind)
    note = "if the first layer has full rank, which the paper does not say"
    effect = f"{'all' if holds else 'not all'} of {networks:,} networks"
    return Judged(Verdict.REPRODUCED if holds else Verdict.CONTRARY, effect, rows="fig2.jsonl", note=note)


def _parameters(test: Parameters) -> Judged:
    base = count_parameters(test.model, "")
    added = {spec: 100 * (count_parameters(test.model, spec) / base - 1) for spec in test.specs}
    agree = all(abs(added[spec] - percent) < max(3.0, 0.05 * percent) for spec, percent in test.specs.items())
    effect = ", ".join(
        f"{spec_title(spec)} +{percent:.{0 if percent > 1 or percent == 0 else 4}f}%" for spec, percent in added.items()
    )
    return Judged(Verdict.REPRODUCED if agree else Verdict.CONTRARY, effect, regime=test.model)


@cache
def count_parameters(model: str, spec: str) -> int:
    """The parameters of a model by name with a spec."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(model, spec).parameters())


def _overhead(test: Overhead, backbones: Mapping[str, Mapping[str, Any]]) -> Judged:
    specs = backbones.get(test.backbone, {}).get("specs", {})
    missing = [spec for spec in (test.spec, *test.rivals) if spec not in specs]
    if missing:
        return Judged(Verdict.NOT_TESTED, note=f"no rows yet of {', '.join(missing)}: deepsquare bench models")

    def time(spec: str) -> Median:
        measured = specs[spec]
        times = measured["times"] if test.kernels or not measured["without_kernels"] else measured["without_kernels"]
        return Median(*times["inference, batch 1"])

    own = time(test.spec)
    limits = [(test.limit, test.limit)] if test.limit else []
    limits += [(time(spec).low, time(spec).high) for spec in test.rivals]
    sign = -1 if test.reverse else 1
    below = [own.high < low if sign > 0 else own.low > high for low, high in limits]
    above = [own.low > high if sign > 0 else own.high < low for low, high in limits]
    verdict = Verdict.REPRODUCED if all(below) else Verdict.CONTRARY if any(above) else Verdict.INCONCLUSIVE
    effect = f"{own.value:.3f} [{own.low:.3f}, {own.high:.3f}] of the plain network's time"
    if test.rivals:
        effect += "; " + ", ".join(f"{spec_title(spec)} {time(spec).value:.3f}" for spec in test.rivals)
    return Judged(verdict, effect, regime=f"{test.backbone}, one image, CPU", rows="bench.jsonl")


def _activations(test: ActivationCost, costs: Mapping[str, Mapping[str, float]]) -> Judged:
    if not {"relu_square", "softplus", "tanh", "sigmoid"} <= costs.keys():
        return Judged(Verdict.NOT_TESTED, note="no rows yet")
    kind = "forward_backward" if test.backward else "forward"
    square = costs["relu_square"][kind]
    ratios = {name: costs[name][kind] / square for name in ("softplus", "tanh", "sigmoid")}
    slower = [ratio > 1 for ratio in ratios.values()]
    effect = ", ".join(f"{name} {ratio:.1f} ×" for name, ratio in ratios.items())
    verdict = Verdict.REPRODUCED if all(slower) else Verdict.CONTRARY
    return Judged(verdict, effect, regime="plain operations, one thread", rows="spirals.jsonl")


def counts(entries: Sequence[Entry]) -> dict[Verdict, list[Entry]]:
    """The claims by verdict."""
    return {kind: [entry for entry in entries if entry.decisive.verdict is kind] for kind in Verdict}
