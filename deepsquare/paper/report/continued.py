"""What a trained network knows after ``equip``, and after continued training."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any

from deepsquare.paper.imagenet.continued import CLASSES, EXPERIMENT, IMAGES, MARGIN, NETWORKS, SPECS, Continued, row_of
from deepsquare.paper.report.charts import signed
from deepsquare.paper.report.ledger import to_samples
from deepsquare.paper.statistics import Effect, image_variance, reject_holm
from deepsquare.paper.verdict import ALPHA, Sample
from deepsquare.results import Row
from deepsquare.surgery import INITS

TITLES = {
    "pooling": "Square-Pooling (SP)",
    "softmin": "Square-Softmin (SS)",
    "excitation": "Square-Excitation (SEx)",
    "encoding": "Square-Encoding (SEn)",
    "pooling+excitation": "SP & SEx",
}
STARTS = {"paper": "as in the paper", "identity": "identity, β learned", "anneal": "β annealed from 0 to 1"}


def before_training(rows: Sequence[Row]) -> dict[str, Any] | None:
    """EfficientNet-Lite0 with ImageNet weights right after ``equip``; None if it was not measured."""
    metrics = {(row.recipe["spec"], row.recipe["init"]): row.metrics for row in rows if row.experiment == "pretrained"}
    base = metrics.get(("", "paper"))
    if base is None:
        return None
    table = []
    for spec, title in TITLES.items():
        starts = [metrics.get((spec, init)) for init in ("paper", "identity")]
        if all(starts):
            accuracies = [f"{100 * found['accuracy']:.2f}" for found in starts if found]
            error = starts[1]["max_rel_error"] if starts[1] else None
            table.append([title, *accuracies, "–" if error is None else f"{error:.0e}" if error else "0"])
    headings = ["Technique", "As in the paper", "Identity", "Largest difference of a logit, relative"]
    return {"headings": headings, "table": table, "base": f"{100 * base['accuracy']:.2f}"}


def continued_networks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A table for each network that was continued."""
    own = [row for row in rows if row.experiment == EXPERIMENT]
    return [section for network in NETWORKS.values() if (section := _section(network, own))]


def _section(network: Continued, rows: Sequence[Row]) -> dict[str, Any] | None:
    plain = row_of(network.model)
    labels = {row_of(network.model, spec, init): (spec, init) for spec in SPECS for init in INITS}
    runs = _one_base_per_seed(rows, {plain, *labels})
    samples = to_samples([(row.row, row) for row in runs], CLASSES, IMAGES)
    if plain not in samples:
        return None
    effects = {label: _effect(samples.get(label), samples[plain], network.seeds) for label in labels}
    verdicts = _verdicts(effects) if all(effects.values()) else {}
    table = []
    for label, (spec, init) in labels.items():
        cells = _cells(samples.get(label), samples[plain], effects[label])
        table.append([TITLES[spec], STARTS[init], *cells, verdicts.get(label, "–")])
    recipe = network.recipe
    return {
        "title": network.title,
        "regime": f"{recipe.size} pixels, {recipe.epochs} epoch{'s' * (recipe.epochs > 1)}, lr {recipe.lr}",
        "plain": _mean(samples[plain]),
        "done": len(runs),
        "planned": network.seeds * (1 + len(labels)),
        "headings": ["Technique", "Start", "Accuracy", "Minus the plain network", "Verdict"],
        "table": table,
    }


def _one_base_per_seed(rows: Sequence[Row], labels: set[str]) -> list[Row]:
    """Of each seed the rows that continue one base: that with the most of them."""
    groups: dict[int, dict[str, list[Row]]] = {}
    for row in rows:
        if row.row in labels and "init_from" in row.recipe:
            groups.setdefault(row.seed, {}).setdefault(str(row.recipe["init_from"]), []).append(row)
    return [row for bases in groups.values() for row in max(bases.values(), key=len)]


def _effect(sample: Sample | None, plain: Sample, seeds: int) -> Effect | None:
    """The difference paired by seed, with the errors of the seeds and of the test images, once all seeds are there."""
    shared = sorted(sample.accuracies.keys() & plain.accuracies.keys()) if sample else []
    if sample is None or len(shared) < seeds:
        return None
    differences = [sample.accuracies[seed] - plain.accuracies[seed] for seed in shared]
    images = image_variance({"row": sample.correct, "plain": plain.correct}, {"row": 1.0, "plain": -1.0})
    return Effect(fmean(differences), math.sqrt(variance(differences) / seeds + (images or 0.0)), seeds - 1)


def _verdicts(effects: Mapping[str, Effect | None]) -> dict[str, str]:
    """Whether each is worse by less than the margin or by more, with Holm's correction for their number."""
    tests = [(effect.p_above(-MARGIN), effect.p_below(-MARGIN)) for effect in effects.values() if effect]
    words = [
        "not inferior" if less else "inferior" if more else "undecided" for less, more in reject_holm(tests, ALPHA)
    ]
    return dict(zip(effects, words, strict=True))


def _cells(sample: Sample | None, plain: Sample, effect: Effect | None) -> list[str]:
    """The accuracy, and its difference from the plain network: with an interval, or the number of seeds so far."""
    if sample is None:
        return ["–", "–"]
    if effect is not None:
        return [_mean(sample), f"{signed(effect.mean)} [{', '.join(map(signed, effect.interval()))}]"]
    shared = sample.accuracies.keys() & plain.accuracies.keys()
    differences = [sample.accuracies[seed] - plain.accuracies[seed] for seed in shared]
    return [_mean(sample), f"{signed(fmean(differences))} (n = {len(shared)})" if shared else "–"]


def _mean(sample: Sample) -> str:
    return f"{fmean(sample.values):.2f}"
