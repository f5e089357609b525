"""What the runs measured on their trained networks: signs, batch statistics and linear probes."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from deepsquare.paper.grid.after_training import PROBE_IMAGES
from deepsquare.paper.report.ablations import format_difference
from deepsquare.paper.report.charts import signed
from deepsquare.paper.statistics import paired
from deepsquare.results import Row

DATA = {"cifar10": "CIFAR-10", "cifar10_ablation": "CIFAR-10", "tiny_imagenet": "Tiny ImageNet"}
ONE_SIDED = 0.05  # a class whose share of x_k > 0 is below it, or above 1 minus it, lies on one side of x_k = 0
SEEDS = 3  # fewer give no interval
FEATURES = ("M", "G", "M, S²", "M, M²")

Groups = dict[tuple[str, str], list[Row]]


def after_training(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The measurements of which rows came in: title, question, table and sentences."""
    sections = []
    for name, (title, question, describe) in _SECTIONS.items():
        groups: Groups = {}
        for row in rows:
            if row.experiment in DATA and name in row.metrics:
                conditions = f"{DATA[row.experiment]}, {row.recipe['schedule']}, {row.recipe['epochs']} epochs"
                groups.setdefault((conditions, row.row), []).append(row)
        if groups:
            sections.append({"title": title, "question": question, **describe(groups)})
    return sections


def _accuracies(rows: Sequence[Row]) -> dict[int, float]:
    return {row.seed: 100 * row.metrics["accuracy"] for row in rows}


def _difference(values: Mapping[int, float], base: Mapping[int, float]) -> str:
    """The paired difference, with its interval if there are enough seeds."""
    difference = paired(values, base)
    if difference is None or difference.n >= SEEDS:
        return format_difference(difference)
    return f"{signed(difference.mean)} (n = {difference.n})"


def two_sided(row: Row) -> int:
    """The number of classes with images on both sides of x_k = 0."""
    shares = row.metrics["softmin_signs"]["all"]
    return sum(ONE_SIDED <= share <= 1 - ONE_SIDED for share in shares)


def _signs(groups: Groups) -> dict[str, Any]:
    table, lower = [], []
    for (conditions, label), rows in groups.items():
        ordered = sorted(rows, key=lambda row: row.seed)
        runs = ", ".join(f"{100 * row.metrics['accuracy']:.1f} ({two_sided(row)})" for row in ordered)
        table.append([label, conditions, runs])
        used, unused = ([row for row in rows if (two_sided(row) > 0) == both] for both in (True, False))
        if used and unused and "sign=1" not in str(rows[0].recipe["spec"]):
            lower.append(fmean(_accuracies(used).values()) - fmean(_accuracies(unused).values()))
    negative = [row for rows in groups.values() for row in rows if "sign=1" not in str(row.recipe["spec"])]
    none = sum(not two_sided(row) for row in negative)
    sentences = [f"In {none} of {len(negative)} runs with −s·x² every class lies on one side of x_k = 0."]
    if lower:
        sentences.append(
            f"In the {len(lower)} rows that have runs of both kinds, those with classes on both sides differ from the "
            f"others by {signed(fmean(lower))} points in the mean; they are lower in {sum(d < 0 for d in lower)}."
        )
    headings = ["Method", "Runs", "Accuracy of each seed (classes on both sides)"]
    return {"headings": headings, "table": table, "sentences": sentences if negative else []}


def _batch_norm(groups: Groups) -> dict[str, Any]:
    table, gains = [], []
    for (conditions, label), rows in groups.items():
        trained = _accuracies(rows)
        anew = {row.seed: 100 * row.metrics["reestimated_bn"]["accuracy"] for row in rows}
        means = [f"{fmean(values.values()):.2f}" for values in (trained, anew)]
        table.append([label, conditions, *means, _difference(anew, trained)])
        gains += [(anew[seed] - trained[seed]) for seed in trained]
    more = sum(gain > 0.5 for gain in gains)
    sentences = [
        f"New statistics change the accuracy by {signed(fmean(gains))} points in the mean of {len(gains)} runs, and "
        f"raise it by more than half a point in {more} of them."
    ]
    headings = ["Method", "Runs", "As trained", "New statistics", "Difference"]
    return {"headings": headings, "table": table, "sentences": sentences}


def _probes(groups: Groups) -> dict[str, Any]:
    table = []
    for (conditions, label), rows in groups.items():
        found = {name: _probed(rows, name) for name in FEATURES}
        means = [f"{fmean(values.values()):.2f}" for values in found.values()]
        pooled, variance = _difference(found["G"], found["M"]), _difference(found["M, S²"], found["M, M²"])
        table.append([label, conditions, *means, pooled, variance])
    headings = ["Method", "Runs", *FEATURES, "G minus M", "(M, S²) minus (M, M²)"]
    return {"headings": headings, "table": table, "sentences": _probe_sentences(groups)}


def _probed(rows: Sequence[Row], features: str) -> dict[int, float]:
    """The accuracy of a probe in per cent, by seed."""
    return {row.seed: 100 * row.metrics["linear_probe"][features] for row in rows}


def _probe_sentences(groups: Groups) -> list[str]:
    sentences = []
    for first, second in (("G", "M"), ("M, S²", "M, M²")):
        differences = [paired(_probed(rows, first), _probed(rows, second)) for rows in groups.values()]
        judged = [difference for difference in differences if difference and difference.n >= SEEDS]
        ahead, behind = sum(d.low > 0 for d in judged), sum(d.high < 0 for d in judged)
        if judged:
            sentences.append(f"({first}) is ahead of ({second}) in {ahead} of {len(judged)} rows, behind in {behind}.")
    return sentences


_SECTIONS = {
    "softmin_signs": (
        "Which side of x = 0 the classes lie on",
        "−s·x² is symmetric in x. Is the symmetry used? A class lies on both sides if between 5% and 95% of the test "
        "images have x_k > 0, x being the input of Square-Softmin.",
        _signs,
    ),
    "reestimated_bn": (
        "Batch statistics estimated anew",
        "A square amplifies what running statistics lag behind. Accuracy of the trained network, and with the "
        "statistics of batches of training images.",
        _batch_norm,
    ),
    "linear_probe": (
        "A linear probe on the last map",
        "“Square-Pooling extracts a more discriminative feature vector than GAP” (Equation 21): test accuracy of "
        "logistic regression on frozen features: the means M, G = M² + S², means and variances, and as control means "
        f"and their squares; on {PROBE_IMAGES:,} training images, a fifth of which chooses the decay.",
        _probes,
    ),
}
