"""The verdicts on claims that are not about accuracies under a schedule: figures, costs, and measured networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from deepsquare.models import create_model
from deepsquare.paper.bench.activations import FORWARD, STEP
from deepsquare.paper.claim_types import (
    ActivationCost,
    LeastTime,
    Overhead,
    Parameters,
    Regions,
    SpiralRegimes,
    Spirals,
)
from deepsquare.paper.fig2.experiment import CaseSummary
from deepsquare.paper.regimes import regimes
from deepsquare.paper.report.after_training import two_sided
from deepsquare.paper.report.bench import on_cpu_in_float32, spec_title
from deepsquare.paper.report.figures import LABELS, spiral_results
from deepsquare.paper.spirals.regimes import judgements
from deepsquare.paper.statistics import Median, paired, share_interval, share_p
from deepsquare.paper.verdict import ALPHA, PENDING, Verdict, judge_sign
from deepsquare.results import Row

ABLATION = "Square-Softmin start"  # the family with the networks that are probed, and those with Square-Softmin
SQUARE_SOFTMIN = ("DeepSquare5s-",)
ONE_IMAGE = "inference, batch 1"


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


def spirals(test: Spirals, metrics: Mapping[str, Mapping[str, Any]]) -> Judged:
    """The difference of ReLU-Square and ReLU in one metric."""
    task = "one-arm" if test.figure in (3, 4) else "three-arm"
    results = spiral_results(metrics, task, smoothness=test.figure in (3, 5))
    difference = results["differences"].get(test.metric) if results else None
    if results is None or difference is None:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare reproduce fig3")
    means = " → ".join(f"{results['networks'][name][test.metric].mean:.3g}" for name in ("relu", "relu_square"))
    effect = f"{LABELS.get(test.metric, test.metric)}: {means}, {difference['interval'].format(signed=True)}"
    regime = "both activations tuned, constant learning rate"
    return Judged(difference["verdict"], effect, str(results["seeds"]), regime, "spirals.jsonl")


def spiral_regimes(test: SpiralRegimes, rows: Sequence[Row]) -> Judged:
    """In how many regimes of training ReLU-Square is better; the claim names none, so all count."""
    judged = judgements(rows).get((test.task, test.metric), [])
    if not judged:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare reproduce regimes")
    by_kind = {
        kind: [f"{found['schedule']} {found['steps']:,}" for found in judged if found["verdict"] is kind]
        for kind in (Verdict.REPRODUCED, Verdict.CONTRARY, Verdict.INCONCLUSIVE)
    }
    kinds = [kind for kind, names in by_kind.items() if names]
    verdict = kinds[0] if len(kinds) == 1 else Verdict.INCONCLUSIVE
    words = {Verdict.REPRODUCED: "better in", Verdict.CONTRARY: "worse in", Verdict.INCONCLUSIVE: "undecided in"}
    effect = "; ".join(f"{words[kind]} {len(by_kind[kind])} ({', '.join(by_kind[kind])})" for kind in kinds)
    n = judged[0]["difference"].n
    note = "depends on the length and the learning rate of training, which the paper does not state"
    regime = f"{len(judged)} kinds of training: both activations tuned in each, or Adam at its default rate"
    return Judged(verdict, effect, str(n), regime, "spirals_regimes.jsonl", "" if len(kinds) == 1 else note)


def regions(test: Regions, cases: Sequence[CaseSummary]) -> Judged:
    """The exact count of pieces over random networks."""
    of_kind = [case for case in cases if case.holds is not None and ("ReLU" in case.case.name) is not test.squares]
    if not of_kind:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare reproduce fig2")
    holds = all(case.holds for case in of_kind)
    networks = sum(case.networks for case in of_kind)
    note = "if the first layer has full rank, which the paper does not say"
    effect = f"{'all' if holds else 'not all'} of {networks:,} networks"
    return Judged(Verdict.REPRODUCED if holds else Verdict.CONTRARY, effect, rows="fig2.jsonl", note=note)


def parameters(test: Parameters) -> Judged:
    """Counted parameters beside those of the paper, to a tenth of them, or above a limit where it states none."""
    base = count_parameters(test.model, "")
    added = {spec: 100 * (count_parameters(test.model, spec) / base - 1) for spec in test.specs}
    agree = all(
        added[spec] > test.more_than if percent is None else abs(added[spec] - percent) <= max(0.1, 0.1 * percent)
        for spec, percent in test.specs.items()
    )
    effect = ", ".join(
        f"{spec_title(spec)} +{percent:.{0 if percent > 1 or percent == 0 else 4}f}%" for spec, percent in added.items()
    )
    return Judged(Verdict.REPRODUCED if agree else Verdict.CONTRARY, effect, regime=test.model)


@cache
def count_parameters(model: str, spec: str) -> int:
    """The parameters of a model by name with a spec."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(model, spec).parameters())


def overhead(test: Overhead, backbones: Mapping[str, Sequence[Mapping[str, Any]]]) -> Judged:
    """The time of one image relative to the plain network, against a limit; all specs from one run."""
    tables = backbones.get(test.backbone, ())
    table = next((table for table in tables if {test.spec, *test.heavier_than} <= table["specs"].keys()), None)
    if table is None:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare bench models")

    def time(spec: str) -> Median:
        measured = table["specs"][spec]
        return Median(*(measured["without_kernels"] or measured["times"])[ONE_IMAGE])

    own = Median(*table["specs"][test.spec]["times"][ONE_IMAGE])
    effect = f"{own.value:.3f} [{own.low:.3f}, {own.high:.3f}] of the plain network's time"
    regime = f"{test.backbone}, one image, CPU"
    others = {spec: time(spec) for spec in test.heavier_than}
    above = own.low > test.limit and all(own.low > other.high for other in others.values())
    below = own.high < test.limit or any(own.high < other.low for other in others.values())
    effect += "".join(f"; {spec_title(spec)} in plain operations {t.value:.3f}" for spec, t in others.items())
    if test.reverse:
        above, below = below, above
    verdict = Verdict.REPRODUCED if below else Verdict.CONTRARY if above else Verdict.INCONCLUSIVE
    return Judged(verdict, effect, regime=regime, rows="bench.jsonl")


def least_time(test: LeastTime, table_6: Mapping[str, Any] | None) -> Judged:
    """Whether every other method of Table 6 takes longer than SP & SEx."""
    form = "with our kernels" if test.kernels else "in plain operations"
    claims = table_6["claims"] if table_6 else []
    claim = next((c for c in claims if (c["form"], c["workload"]) == (form, ONE_IMAGE)), None)
    if table_6 is None or claim is None:
        return Judged(Verdict.NOT_TESTED, note="no run has measured them all: deepsquare bench models")
    times = ", ".join(f"{label} {t.value:.3f} [{t.low:.2f}, {t.high:.2f}]" for label, t in claim["others"].items())
    verdict = Verdict.CONTRARY if claim["faster"] else Verdict.REPRODUCED
    verdict = Verdict.INCONCLUSIVE if claim["undecided"] and not claim["faster"] else verdict
    note = f"undecided: {', '.join(claim['undecided'])}" if claim["undecided"] else ""
    return Judged(
        verdict, f"relative to SP & SEx: {times}", "", f"resnet50, one image, CPU, {form}", "bench.jsonl", note
    )


def activation_cost(test: ActivationCost, costs: Mapping[str, Any] | None) -> Judged:
    """Whether softplus, tanh and sigmoid take longer than ReLU-Square, in one form and pass."""
    kind = STEP if test.backward else FORWARD
    found = [s for s in costs["statements"] if (s["form"], s["pass"]) == (test.form, kind)] if costs else []
    if costs is None or not found:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare bench activations")
    statement = found[0]
    effect = ", ".join(f"{name} {_range(*ends)} ×" for name, ends in statement["ranges"].items())
    verdict = Verdict.INCONCLUSIVE if statement["unclear"] or not costs["decided"] else Verdict.REPRODUCED
    if statement["cheaper"] and costs["decided"]:
        verdict = Verdict.CONTRARY
    note = "" if costs["decided"] else "a measurement without intervals"
    return Judged(verdict, effect, "", f"CPU, one thread, {test.form}", "bench.jsonl", note)


def _range(low: float, high: float) -> str:
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}–{high:.1f}"


def gem_cost(functions: Sequence[Mapping[str, Any]]) -> Judged:
    """Whether GeM with p = 2 takes longer than Square-Pooling on every map, by the bounds of both."""
    op = next((op for op in on_cpu_in_float32(functions) if op["function"] == "square_pooling"), None)
    if op is None or "GeM, plain" not in op["alternatives"]:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare bench ops")
    forward = [times[op["passes"][0]] for times in op["maps"].values()]
    pairs = [(Median(*t["GeM, plain / ours"]), Median(*t["formula / ours"])) for t in forward]
    ratios = [gem.value / square.value for gem, square in pairs]
    slower = [gem.low > square.high for gem, square in pairs]
    faster = [gem.high < square.low for gem, square in pairs]
    verdict = Verdict.REPRODUCED if all(slower) else Verdict.CONTRARY if any(faster) else Verdict.INCONCLUSIVE
    effect = f"{min(ratios):.2f} to {max(ratios):.2f} times, slower on {sum(slower)} of {len(pairs)} maps"
    return Judged(verdict, effect, regime="CPU, float32, contiguous", rows="bench.jsonl")


def _ablation_rows(rows: Sequence[Row], metric: str) -> list[Row]:
    """The ablation's rows at the usual learning rate with a measurement after training."""
    regime = regimes()[ABLATION]
    of_regime = [
        row for row in rows if (row.experiment, row.recipe.get("schedule")) == (regime.experiment, regime.schedule)
    ]
    return [row for row in of_regime if metric in row.metrics]


def sign_shares(rows: Sequence[Row]) -> Judged:
    """Whether more than half of the networks with −s·x² have a class on both sides of x = 0."""
    seeds = regimes()[ABLATION].looks[-1][0]
    measured = {
        (row.row, row.seed): row
        for row in _ablation_rows(rows, "softmin_signs")
        if row.row in SQUARE_SOFTMIN and row.seed < seeds
    }
    if not measured:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare reproduce study")
    used, n = sum(two_sided(row) > 0 for row in measured.values()), len(measured)
    above, below = share_p(used, n)
    low, high = (100 * bound for bound in share_interval(used, n))
    verdict = (
        Verdict.REPRODUCED if above < ALPHA / 2 else Verdict.CONTRARY if below < ALPHA / 2 else Verdict.INCONCLUSIVE
    )
    effect = f"in {used} of {n} networks [{low:.0f}%, {high:.0f}%] a class lies on both sides of x = 0"
    regime, store = "CIFAR-10, 10 epochs", "cifar10_ablation.jsonl"
    if n < seeds * len(SQUARE_SOFTMIN):
        return Judged(Verdict.INCONCLUSIVE, effect, "", regime, store, PENDING, final=False)
    return Judged(verdict, effect, str(seeds), regime, store)


def probe(rows: Sequence[Row]) -> Judged:
    """Whether a linear classifier on G = M² + S² is better than one on M, for the plain network."""
    planned = regimes()[ABLATION].looks[-1][0]
    plain = [row for row in _ablation_rows(rows, "linear_probe") if row.row == "Original" and row.seed < planned]
    pooled, mean = ({row.seed: 100 * row.metrics["linear_probe"][name] for row in plain} for name in ("G", "M"))
    difference = paired(pooled, mean)
    if difference is None:
        return Judged(Verdict.NOT_TESTED, note="no rows yet: deepsquare reproduce study")
    final = difference.n == planned
    verdict = judge_sign(1, difference) if final else Verdict.INCONCLUSIVE
    effect = difference.format(signed=True)
    note = "" if final else PENDING
    regime = "CIFAR-10, probe of the plain network"
    return Judged(verdict, effect, str(difference.n), regime, "cifar10_ablation.jsonl", note, final)
