"""The ledger's verdicts on the committed rows, recomputed from the rows without any code of the report.

What the paper states is written again here, and the statistics come from scipy: moderated variances by solving limma's
equations, Holm's procedure in Shaffer's form by its definition, ranks and shares by their exact distributions.
"""

import base64
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from scipy import optimize, special, stats

from deepsquare.paper.claims import CLAIMS, hypotheses_of
from deepsquare.paper.regimes import regimes

ROOT = Path(__file__).parents[2]
SUMMARY = (ROOT / "docs/results.md").read_text(encoding="utf-8")
KINDS = ("reproduced", "smaller than claimed", "contrary", "inconclusive", "not tested here")
TABLE = {  # by label: the spec and the paper's improvement; None is divergence
    "DeepSquare1": ("square(after='layer1')", -1.39),
    "DeepSquare2": ("square(after='layer2')", -0.02),
    "DeepSquare3": ("pooling", 1.06),
    "DeepSquare4": ("square(after='pool')", -0.32),
    "DeepSquare5+": ("softmin(scale='none', sign=1)", -4.83),
    "DeepSquare5-": ("softmin(scale='none')", 0.53),
    "DeepSquare5s+": ("softmin(scale='channel', sign=1)", 0.22),
    "DeepSquare5s-": ("softmin(scale='channel')", 1.05),
    "DeepSquare6": ("square(after='layer1')+square(after='layer2')+pooling+softmin(scale='channel')", None),
    "DeepSquare7": ("square(after='layer1')+square(after='layer2')+pooling", -1.96),
    "DeepSquare8": ("pooling+softmin(scale='channel')", 0.97),
    "GeM (p=2)": ("gem(p=2, learnable=False)", 0.80),
    "Variant1": ("moment3", 0.52),
    "Variant2": ("moment4", -2.87),
    "Variant3": ("moment5", -1.37),
    "Variant4": ("moment6", -8.71),
}
SPECS = {"": "Original"} | {spec: label for label, (spec, _) in TABLE.items()}
RIVALS = ("SE", "GE-θ⁻", "Bilinear (C=32)", "iSQRT-COV (C=64), stride 2", "iSQRT-COV (C=64)")
LONG_PLAN = {"Original": 12, "DeepSquare8": 12}  # seeds at the last look, else 6
Kind = tuple[str, float]  # the sort of claim, and its size, sign or margin
Claims = Mapping[str, tuple[Mapping[str, float], Kind]]  # coefficients of the rows' means


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()]


class Runs:
    """Accuracies in per cent and hits by row and seed, of one schedule of CIFAR-10."""

    def __init__(self, schedule: str, suffix: str = "") -> None:
        self.accuracies: dict[str, dict[int, float]] = defaultdict(dict)
        self.hits: dict[str, dict[int, Any]] = defaultdict(dict)
        self.diverged: set[tuple[str, int]] = set()
        for row in read("cifar10.jsonl"):
            if row["recipe"]["schedule"] != schedule:
                continue
            label, metrics = SPECS.get(row["recipe"]["spec"], row["row"]) + suffix, row["metrics"]
            lost = bool(metrics.get("diverged")) or metrics["accuracy"] is None
            self.accuracies[label][row["seed"]] = 10.0 if lost else 100 * metrics["accuracy"]
            if lost:
                self.diverged.add((label, row["seed"]))
            elif "correct" in metrics:
                packed = np.frombuffer(base64.b64decode(metrics["correct"]), np.uint8)
                self.hits[label][row["seed"]] = np.unpackbits(packed)[:10_000].astype(float)


def moderated(samples: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Variance and degrees of freedom by row."""
    d = np.array([len(values) - 1 for values in samples.values()], dtype=float)
    s2 = np.array([np.var(values, ddof=1) for values in samples.values()])
    e = np.log(s2) - special.digamma(d / 2) + np.log(d / 2)
    excess = np.var(e, ddof=1) - special.polygamma(1, d / 2).mean()
    if excess <= 0:
        pooled = float((d * s2).sum() / d.sum())
        return {name: (max(pooled, float(own)), float(d.sum())) for name, own in zip(samples, s2, strict=True)}
    log_d0 = optimize.minimize_scalar(
        lambda x: (special.polygamma(1, math.exp(x) / 2) - excess) ** 2, bounds=(-5, 15), method="bounded",
        options={"xatol": 1e-12},
    ).x  # fmt: skip
    d0 = math.exp(log_d0)
    prior = math.exp(e.mean() + special.digamma(d0 / 2) - math.log(d0 / 2))
    both = (d0 * prior + d * s2) / (d0 + d)
    larger = np.maximum(both, s2)  # the row's own variance where it is larger
    return {name: (float(v), min(d0 + n, d.sum())) for name, v, n in zip(samples, larger, d, strict=True)}


def by_images(first: Mapping[int, Any], second: Mapping[int, Any]) -> float | None:
    """The variance of the difference of two rows over the choice of images, from all pairs of different seeds."""
    if min(len(first), len(second)) < 2:
        return None

    def product(a: Mapping[int, Any], b: Mapping[int, Any]) -> float:
        return float(np.mean([np.mean(a[s] * b[t]) for s, t in itertools.product(a, b) if s != t]))

    mean = np.mean(list(first.values())) - np.mean(list(second.values()))
    spread = product(first, first) + product(second, second) - 2 * product(first, second) - mean**2
    return max(0.0, float(spread)) * 100**2 / 10_000


def judge(kind: Kind, mean: float, se: float, df: float) -> tuple[float, float]:
    """The p values of the two null hypotheses."""
    sort, value = kind
    distribution = stats.t(df, mean, se)  # of the true difference, as far as the p values need it

    def above(x: float) -> float:
        return float(distribution.cdf(x))

    def below(x: float) -> float:
        return float(distribution.sf(x))

    if sort == "same":
        return max(above(-value), below(value)), min(1.0, 2 * min(above(value), below(-value)))
    if sort == "not worse":
        return above(-value), below(-value)
    smaller = 0.0 if sort == "sign" else below(value) if value > 0 else above(value)
    return min(1.0, 2 * min(above(0), below(0))), smaller


def shaffer(p_values: Sequence[tuple[float, float]], alpha: float) -> list[list[bool]]:
    rejected = [[False, False] for _ in p_values]
    while True:
        left = [(p, c, k) for c, pair in enumerate(p_values) for k, p in enumerate(pair) if not rejected[c][k]]
        most_true = sum(not (one and two) for one, two in rejected)
        if not left or min(left)[0] > alpha / most_true:
            return rejected
        _, c, k = min(left)
        rejected[c][k] = True


def verdicts(runs: Runs, claims: Claims, seeds: int, plan: Mapping[str, int]) -> dict[str, str]:
    """The verdict of each claim at the one look, when all rows have all their planned seeds."""
    rows = {row for coefficients, _ in claims.values() for row in coefficients}
    count = {row: plan.get(row, seeds) for row in runs.accuracies}
    taken = {row: {s: a for s, a in values.items() if s < count[row]} for row, values in runs.accuracies.items()}
    if any(len(taken.get(row, ())) < count.get(row, seeds) for row in rows):
        return dict.fromkeys(claims, KINDS[3])
    stable = {
        row: list(values.values())
        for row, values in taken.items()
        if len(values) > 1 and not any((row, s) in runs.diverged for s in values)
        if max(values.values()) - min(values.values()) <= 3
    }
    short = {row: values for row, values in stable.items() if "@" in row}
    variances = moderated({row: values for row, values in stable.items() if row not in short})
    variances |= moderated(short) if short else {}
    images = {row: {s: h for s, h in runs.hits[row].items() if s < count[row]} for row in stable}
    known = [row for row in stable if len(images[row]) > 1]
    typical = [by_images(images[known[0]], images[row]) or 0.0 for row in known[1:]] or [0.1**2]
    pairs, signs = [], []
    for coefficients, kind in claims.values():
        values = {row: list(taken[row].values()) for row in coefficients}
        signs.append(float(sum(c * np.mean(values[row]) for row, c in coefficients.items())))
        if not coefficients.keys() <= stable.keys():
            one, other = values.values()
            one = [value + kind[1] for value in one] if kind[0] == "not worse" else one
            above, below = (
                float(stats.mannwhitneyu(one, other, alternative=side, method="exact").pvalue)
                for side in ("greater", "less")
            )
            signs[-1] = 1.0 if above < below else -1.0
            pairs.append((above, below) if kind[0] == "not worse" else (min(1.0, 2 * min(above, below)), 1.0))
            continue
        parts = {row: c * c * variances[row][0] / len(values[row]) for row, c in coefficients.items()}
        of_images = by_images(*(images[row] for row in coefficients)) if len(coefficients) == 2 else None
        if of_images is None:
            of_images = float(np.mean(typical)) * len(coefficients) / 2
        total = sum(parts.values()) + of_images
        df = total**2 / sum(part**2 / variances[row][1] for row, part in parts.items())
        df = min(df, max(max(v[1] for v in variances.values()), sum(len(values[row]) - 1 for row in values)))
        pairs.append(judge(kind, signs[-1], math.sqrt(total), df))
    found = {}
    for name, (first, second), sign in zip(claims, shaffer(pairs, 0.05), signs, strict=True):
        sort, value = claims[name][1]
        if sort == "size" and second and not (first and sign * value < 0):
            found[name] = KINDS[1]
        elif sort in ("size", "sign"):
            found[name] = KINDS[3] if not first else KINDS[2] if sign * value < 0 else KINDS[0]
        else:
            found[name] = KINDS[0] if first else KINDS[2] if second else KINDS[3]
    return found


def pair(row: str, base: str, sort: str, value: float) -> tuple[Mapping[str, float], Kind]:
    return {row: 1.0, base: -1.0}, (sort, value)


def table_claims() -> dict[str, tuple[Mapping[str, float], Kind]]:
    claims: dict[str, tuple[Mapping[str, float], Kind]] = {}
    for label, (_, size) in TABLE.items():
        if size is not None:
            same = abs(size) < 0.1
            claims[label] = pair(label, "Original", "same" if same else "size", 0.5 if same else size)
    claims["GeM"] = pair("DeepSquare3", "GeM (p=2)", "not worse", 0.5)
    variants = [f"Variant{k}" for k in (1, 2, 3, 4)]
    return claims | {f"{variant} < SP": pair(variant, "DeepSquare3", "sign", -1.0) for variant in variants}


def shown() -> Iterator[tuple[str, str, str]]:
    """Verdict, statement and regime of each line of the ledger in docs/results.md."""
    kind = ""
    for line in SUMMARY.splitlines():
        if line.startswith("## "):
            kind = line[3:].lower()
        elif kind in KINDS and line.startswith("| ") and not line.startswith("| Claim"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield kind, cells[0], cells[5]


@pytest.fixture(scope="module")
def recomputed() -> dict[tuple[str, str], str]:
    """By regime and claim, for both schedules of CIFAR-10."""
    at_once = {f"SP ≥ {rival}": pair("DeepSquare3", rival, "not worse", 0.5) for rival in RIVALS}
    at_once |= {f"{rival} > plain": pair(rival, "Original", "sign", 1.0) for rival in RIVALS[:3]}
    found = {
        ("CIFAR-10, 10 epochs", name): verdict
        for name, verdict in verdicts(Runs("short"), table_claims() | at_once, 3, {}).items()
    }
    runs, short = Runs("long"), Runs("short", "@short")
    runs.accuracies |= short.accuracies
    runs.diverged |= short.diverged
    gain = {"DeepSquare3": 1.0, "Original": -1.0, "DeepSquare3@short": -1.0, "Original@short": 1.0}
    more: Claims = {"longer": (gain, ("sign", 1.0))}
    plan = LONG_PLAN | dict.fromkeys(short.accuracies, 3)
    long = verdicts(runs, {**table_claims(), **more}, 6, plan)
    return found | {("CIFAR-10, 60 epochs", name): verdict for name, verdict in long.items()}


@pytest.mark.parametrize("label", [label for label, (_, size) in TABLE.items() if size is not None])
def test_claims_of_tables_2_and_3(label: str, recomputed: Mapping[tuple[str, str], str]) -> None:
    matching = [line for line in shown() if re.search(rf"(^|\(){re.escape(label)}[ ,]", line[1])]
    ((verdict, _, regime),) = [line for line in matching if "ImageNet" not in line[1]]
    assert recomputed[regime, label] == verdict


def test_divergence() -> None:
    """Four forms of DeepSquare6, seven runs of each; one that diverges is enough."""
    (verdict,) = [verdict for verdict, statement, _ in shown() if statement.startswith("DeepSquare6 ")]
    store = ROOT / "results/cifar10_ablation.jsonl"
    forms: dict[str, dict[int, bool]] = defaultdict(dict)
    for row in read(store.name) if store.exists() else []:
        if row["row"].startswith("DeepSquare6") and row["recipe"]["schedule"] == "lr × 1":
            forms[row["row"]][row["seed"]] = bool(row["metrics"]["diverged"])
    if len(forms) < 4:
        assert verdict in ("not tested here", "inconclusive")
    elif min(map(len, forms.values())) < 7:
        assert verdict == "inconclusive"
    else:
        lost = [sum(of_seed.values()) for of_seed in forms.values()]
        tails = [(float(stats.binom.sf(n - 1, 7, 0.5)), float(stats.binom.cdf(n, 7, 0.5))) for n in lost]
        rejected = shaffer(tails, 0.05)
        expected = "reproduced" if any(yes for yes, _ in rejected) else "inconclusive"
        assert verdict == ("contrary" if all(no for _, no in rejected) else expected)


def test_claims_about_pairs_of_rows(recomputed: Mapping[tuple[str, str], str]) -> None:
    lines = {statement: (verdict, regime) for verdict, statement, regime in shown()}
    verdict, regime = lines["Square-Pooling is as good as GeM (p = 2) or better"]
    assert recomputed[regime, "GeM"] == verdict
    verdict, regime = lines["moments of a higher order are inferior to Square-Pooling"]
    each = [recomputed[regime, f"Variant{k} < SP"] for k in (1, 2, 3, 4)]
    assert verdict == (each[0] if len(set(each)) == 1 else "contrary" if "contrary" in each else "inconclusive")
    verdict, regime = lines["the modules are comparable to bilinear pooling, SE and GE in accuracy"]
    if regime == "CIFAR-10, 10 epochs":
        found = {recomputed[regime, f"SP ≥ {rival}"] for rival in RIVALS[:3]}
        given = {recomputed[regime, f"{rival} > plain"] for rival in RIVALS[:3]}
        assert verdict == ("reproduced" if found == given == {"reproduced"} else "inconclusive")
    verdict, regime = lines["the modules are competitive with iSQRT-COV in accuracy"]
    if regime == "CIFAR-10, 10 epochs":
        found = {recomputed[regime, f"SP ≥ {rival}"] for rival in RIVALS[3:]}
        assert verdict == ("contrary" if "contrary" in found else found.pop() if len(found) == 1 else "inconclusive")


def test_claims_on_the_spirals() -> None:
    lines = {statement: verdict for verdict, statement, _ in shown()}
    smooth = {row["row"]: row["metrics"] for row in read("spirals.jsonl")}
    for statement, task, metric in (
        ("ReLU-Square fits the one-arm spiral more smoothly than ReLU", "one-arm", "roughness"),
        ("ReLU-Square has smoother decision boundaries on the three-arm spiral", "three-arm", "sharpest_turn"),
    ):
        square, relu = (np.array(smooth[f"{task}/{name}"][metric]) for name in ("relu_square", "relu"))
        test = stats.ttest_rel(square, relu)
        expected = "inconclusive" if test.pvalue >= 0.05 else "reproduced" if test.statistic < 0 else "contrary"
        assert lines[statement] == expected
    rows = [row for row in read("spirals_regimes.jsonl") if "difference" in row["metrics"]]
    for statement, task, metric, sign in (
        ("ReLU-Square has the lower test loss on the one-arm spiral", "one-arm", "loss", -1),
        ("ReLU-Square has the lower test loss on the three-arm spiral", "three-arm", "loss", -1),
        ("ReLU-Square has the higher test accuracy on the three-arm spiral", "three-arm", "accuracy", 1),
    ):
        figure = [row for row in rows if row["recipe"]["task"] == task]
        tests = {row["row"]: stats.ttest_rel(*_of_seeds(row)) for row in figure}
        ordered = sorted(tests, key=lambda name: tests[name].pvalue)
        kept = [tests[name].pvalue * (len(ordered) - rank) < 0.05 for rank, name in enumerate(ordered)]
        rejected = ordered[: kept.index(False)] if False in kept else ordered
        mine = [row["row"] for row in figure if row["recipe"]["metric"] == metric]
        kinds = {
            "inconclusive" if name not in rejected else "reproduced" if sign * tests[name].statistic > 0 else "contrary"
            for name in mine
        }
        assert lines[statement] == (kinds.pop() if len(kinds) == 1 else "inconclusive")


def _of_seeds(row: Mapping[str, Any]) -> tuple[Any, Any]:
    name = f"test_{row['recipe']['metric']}"
    return row["metrics"]["relu_square"][name], row["metrics"]["relu"][name]


def test_claims_on_parameters_and_time() -> None:
    lines = {statement: verdict for verdict, statement, _ in shown()}
    models = torchvision.models
    plain = sum(p.numel() for p in models.resnet50().parameters())
    # Squeeze-and-Excitation adds 2·C²/16 + C + C/16 to each of 3, 4, 6 and 3 blocks of C channels.
    added = sum(n * (2 * c * c // 16 + c + c // 16) for n, c in ((3, 256), (4, 512), (6, 1024), (3, 2048)))
    assert added / plain == pytest.approx(0.10, abs=0.005)
    assert lines["SP & SEx adds 0% parameters, the others 10 to 130%"] == "reproduced"
    assert lines["Square-Pooling adds no parameter"] == "reproduced"
    rows = [row for row in read("bench.jsonl") if row["row"] == "models/shufflenet_v2_x0_5"]
    row = max((row for row in rows if "pooling" in row["metrics"]), key=lambda row: row["date"])
    times = row["metrics"]["pooling"]["seconds"]["inference, batch 1"]
    ratios = sorted(np.divide(times["own"], times["base"]))
    rank = int(stats.binom.ppf(0.025, len(ratios), 0.5)) - 1
    expected = "reproduced" if ratios[-1 - rank] < 1.02 else "contrary" if ratios[rank] > 1.02 else "inconclusive"
    assert lines["Square-Pooling adds negligible inference time to ShuffleNetV2-0.5×"] == expected


def test_what_is_not_tested_says_what_it_would_take() -> None:
    text = [line for line in SUMMARY.partition("## Not tested here")[2].partition("\n## ")[0].splitlines() if line]
    rows = [line for line in text if line.startswith("| ") and not line.startswith("| Claim")]
    assert rows
    assert all(re.search(r"needs |no rows yet|no runs yet", row) for row in rows)


def test_the_ledger_is_complete_and_consistent() -> None:
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS) >= 40
    assert len({claim.statement for claim in CLAIMS}) == len(CLAIMS)
    assert all(claim.tests and claim.evidence and claim.place for claim in CLAIMS)
    assert len(list(shown())) == len(CLAIMS)
    known = {name: set(regime.planned) for name, regime in regimes().items() if regime.planned}
    for name, rows in known.items():
        for hypothesis in hypotheses_of(name):
            assert {label for label in hypothesis.coefficients if "@" not in label} <= rows, name
