"""The ledger: every claim of the paper with the verdict that the rows allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepsquare.paper.claim_types import (
    Accuracy,
    ActivationCost,
    CheckedBy,
    Claim,
    GemCost,
    LeastTime,
    NotTested,
    Overhead,
    Parameters,
    Probe,
    Regions,
    SignShares,
    SpiralRegimes,
    Spirals,
    Test,
)
from deepsquare.paper.claims import CLAIMS, describe, hypotheses_of
from deepsquare.paper.fig2.experiment import CaseSummary
from deepsquare.paper.regimes import LONG, SHORT, SHORT_SUFFIX, TEST_IMAGES, Regime, regimes
from deepsquare.paper.report import bench, measured
from deepsquare.paper.report.evidence import RunResult, latest_recipes
from deepsquare.paper.report.measured import Judged
from deepsquare.paper.study.plan import VANILLA
from deepsquare.paper.table_claims import ORIGINAL, SHUFFLENET, signed
from deepsquare.paper.tables import stored_labels
from deepsquare.paper.verdict import Differs, Finding, Hypothesis, Sample, Verdict, judge_family
from deepsquare.results import Row, unpack_bits

PLAIN = (ORIGINAL, SHUFFLENET, "ResNet10")
CLASSES = {"cifar10": 10, "cifar10_ablation": 10, "tiny_imagenet": 200}


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
    backbones: Mapping[str, Sequence[Mapping[str, Any]]]
    table_6: Mapping[str, Any] | None
    activations: Mapping[str, Any] | None

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

    def against_plain(self) -> dict[tuple[str, str], Finding]:
        """The findings on the difference of a row and a plain network, by regime and row."""
        return {
            (regime, row): finding
            for (regime, hypothesis), finding in self.findings.items()
            for row, base in [(*hypothesis.coefficients, "")[:2]]
            if isinstance(hypothesis, Differs) and base in PLAIN
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
    samples = samples_of(rows, regime)
    planned = dict(regime.planned)
    if any(name.endswith(SHORT_SUFFIX) for hypothesis in hypotheses for name in hypothesis.coefficients):
        short = regimes()[SHORT]
        for label, sample in samples_of(rows, short).items():
            samples[label + SHORT_SUFFIX] = sample
            planned[label + SHORT_SUFFIX] = short.looks[-1][0]
    return judge_family(samples, hypotheses, regime.looks, planned)


def samples_of(rows: Sequence[Row], regime: Regime) -> dict[str, Sample]:
    """The runs of a regime by label, each once: those that the plan has, or of CIFAR-10's recipes the latest."""
    of_regime = [
        row
        for row in rows
        if (row.experiment, row.recipe.get("schedule")) == (regime.experiment, regime.schedule)
        and "accuracy" in row.metrics
    ]
    if regime.keys:
        chosen = [(row.row, row) for row in of_regime if row.key in regime.keys]
    else:
        labels = stored_labels()
        runs, _ = latest_recipes([run for row in of_regime if (run := RunResult.from_row(row))], set())
        chosen = [(labels[run.spec], run.row) for run in runs if run.spec in labels and run.model == VANILLA]
    return to_samples(chosen, CLASSES[regime.experiment], TEST_IMAGES)


def to_samples(rows: Iterable[tuple[str, Row]], classes: int, images: int) -> dict[str, Sample]:
    """Labeled rows of networks for so many classes, evaluated on so many images; of a seed's rows the first."""
    accuracies: dict[str, dict[int, float]] = {}
    diverged: dict[str, set[int]] = {}
    correct: dict[str, dict[int, Any]] = {}
    for label, row in rows:
        metrics, fraction = row.metrics, row.metrics["accuracy"]
        if row.seed in accuracies.setdefault(label, {}):
            continue
        failed = bool(metrics.get("diverged")) or fraction is None
        accuracies[label][row.seed] = 100 / classes if failed else 100 * fraction
        if failed:
            diverged.setdefault(label, set()).add(row.seed)
        elif metrics.get("correct"):
            correct.setdefault(label, {})[row.seed] = unpack_bits(metrics["correct"], images).numpy()
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
        case SpiralRegimes():
            return measured.spiral_regimes(test, evidence.rows)
        case Spirals():
            return measured.spirals(test, evidence.spirals)
        case Regions():
            return measured.regions(test, evidence.regions)
        case Parameters():
            return measured.parameters(test)
        case Overhead():
            return measured.overhead(test, evidence.backbones)
        case LeastTime():
            return measured.least_time(test, evidence.table_6)
        case ActivationCost():
            return measured.activation_cost(test, evidence.activations)
        case GemCost():
            return measured.gem_cost(bench.op_times(evidence.rows))
        case SignShares():
            return measured.sign_shares(evidence.rows)
        case Probe():
            return measured.probe(evidence.rows)
        case CheckedBy():
            return Judged(Verdict.REPRODUCED, note=f"checked by {test.test}")
        case NotTested():
            return Judged(Verdict.NOT_TESTED, note=f"needs {test.needs}")


def _accuracy(test: Accuracy, evidence: Evidence) -> Judged:
    regime = regimes()[test.regime]
    findings = [evidence.findings[test.regime, hypothesis] for hypothesis in test.hypotheses]
    seeds = _seeds([n for finding in findings for n in finding.n])
    store, final = f"{regime.experiment}.jsonl", all(finding.at_look for finding in findings)
    if len(findings) > 1:
        verdict = (_any if test.any else _all)([finding.verdict for finding in findings])
        pairs = zip(test.hypotheses, findings, strict=True)
        effect = "; ".join(f"{describe(h)} {_effect(f) if f.mean is not None else f.note}" for h, f in pairs)
        notes = dict.fromkeys(f.note for f in findings if f.note and f.mean is not None)
        given = [evidence.findings[test.regime, hypothesis].verdict for hypothesis in test.given]
        if verdict is Verdict.REPRODUCED and set(given) - {Verdict.REPRODUCED}:
            verdict = Verdict.INCONCLUSIVE
            notes["the others are not all better than the plain network here"] = None
        return Judged(verdict, effect, seeds, regime.title, store, "; ".join(notes), final)
    finding = findings[0]
    effect = "" if finding.mean is None else _effect(finding)
    if len(test.hypotheses[0].coefficients) > 2:
        effect = f"{describe(test.hypotheses[0])}: {effect}"
    elsewhere = finding.bounded and not finding.own_images
    note = "; ".join(filter(None, (finding.note, "error of the test images from other rows" if elsewhere else "")))
    return Judged(finding.verdict, effect, seeds, regime.title, store, note, final)


def _all(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim that needs all of its hypotheses."""
    if Verdict.CONTRARY in verdicts:
        return Verdict.CONTRARY
    for kind in (Verdict.REPRODUCED, Verdict.NOT_TESTED):
        if set(verdicts) == {kind}:
            return kind
    return Verdict.INCONCLUSIVE


def _any(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim for which one of its hypotheses is enough."""
    if Verdict.REPRODUCED in verdicts:
        return Verdict.REPRODUCED
    return verdicts[0] if len(set(verdicts)) == 1 else Verdict.INCONCLUSIVE


def _effect(finding: Finding) -> str:
    assert finding.mean is not None
    low, high = finding.low, finding.high
    interval = "" if low is None or high is None else f" [{signed(low)}, {signed(high)}]"
    return signed(finding.mean) + interval


def _seeds(n: Sequence[int]) -> str:
    return "–".join(map(str, sorted({min(n), max(n)}))) if n else ""


def counts(entries: Sequence[Entry]) -> dict[Verdict, list[Entry]]:
    """The claims by verdict."""
    return {kind: [entry for entry in entries if entry.decisive.verdict is kind] for kind in Verdict}
