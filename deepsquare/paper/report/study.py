"""The rows of the study on Tiny ImageNet: means as they come in, and intervals only at the looks of the plan."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from deepsquare.paper.statistics import paired
from deepsquare.paper.study.plan import Family, TinyImageNetRecipe, read_plan
from deepsquare.paper.verdict import Finding
from deepsquare.results import Row

Judged = Mapping[tuple[str, str], Finding]  # by family and row


def study_families(rows: Sequence[Row], findings: Judged) -> list[dict[str, Any]]:
    """The families on Tiny ImageNet of which rows came in, each with its rows and the ledger's findings about them."""
    families = [family for family in read_plan().family if family.experiment == "tiny_imagenet"]
    by_key = {row.key: row for row in rows if row.experiment == "tiny_imagenet"}
    bases: dict[tuple[str, str], Mapping[int, float]] = {}  # accuracies of the plain network by model and schedule
    shown: list[dict[str, Any]] = []
    for family in families:
        accuracies = _accuracies(family, by_key)
        if not any(accuracies.values()):
            continue
        assert isinstance(family.rows, dict)
        for label, spec in family.rows.items():
            if not spec:
                bases[family.model, family.schedule] = accuracies[label]
        base = bases.get((family.model, family.schedule), {})
        entries = [
            _entry(family, label, spec, accuracies[label], base, by_key, findings.get((family.name, label)))
            for label, spec in family.rows.items()
        ]
        judged = any(family.alpha)
        title = family.name if judged else family.schedule.capitalize()
        if shown and shown[-1]["title"] == title:  # variants of a recipe, which are never judged: one table
            shown[-1]["entries"] += entries
        else:
            conditions = _conditions(family, with_lr=judged)
            shown.append({"title": title, "conditions": conditions, "judged": judged, "entries": entries})
    return shown


def _conditions(family: Family, *, with_lr: bool) -> str:
    recipe = family.runs()[0].recipe
    assert isinstance(recipe, TinyImageNetRecipe)
    images = f"{recipe.held_out:,} held-out training images" if recipe.held_out else "the 10,000 validation images"
    lr = f", learning rate {recipe.lr:g}" if with_lr else ""
    return f"{recipe.size} pixels, {recipe.epochs} epochs{lr}, evaluated on {images}"


def _accuracies(family: Family, rows: Mapping[str, Row]) -> dict[str, dict[int, float]]:
    """Top-1 in per cent by label and seed; a diverged run counts as chance."""
    accuracies: dict[str, dict[int, float]] = {label: {} for label in family.rows}
    for run in family.runs():
        if (row := rows.get(run.key)) is not None:
            diverged = row.metrics["diverged"] or row.metrics["accuracy"] is None
            accuracies[run.row][run.seed] = 100 / 200 if diverged else 100 * row.metrics["accuracy"]
    return accuracies


def _entry(
    family: Family,
    label: str,
    spec: str,
    accuracies: Mapping[int, float],
    base: Mapping[int, float],
    rows: Mapping[str, Row],
    finding: Finding | None,
) -> dict[str, Any]:
    done = [rows[run.key] for run in family.runs() if run.row == label and run.key in rows]
    top5 = [100 * row.metrics.get("top5", 0) for row in done]
    return {
        "label": label,
        "seeds": f"{len(accuracies)} of {family.seeds}",
        "top1": fmean(accuracies.values()) if accuracies else None,
        "top5": fmean(top5) if top5 else None,
        "so_far": _so_far(accuracies, base, finding) if spec else None,
        "judged": finding if finding is not None and finding.at_look else None,
        "next_look": next((look for look in family.looks if look > _paired_seeds(accuracies, base)), None),
        "is_base": not spec,
    }


def _so_far(accuracies: Mapping[int, float], base: Mapping[int, float], finding: Finding | None) -> float | None:
    """The difference of the means: the ledger's, or of the seeds that both have."""
    if finding is not None:
        return finding.mean
    difference = paired(accuracies, base)
    return None if difference is None else difference.mean


def _paired_seeds(accuracies: Mapping[int, float], base: Mapping[int, float]) -> int:
    """How many of the first seeds both have: 3 for the seeds 0, 1, 2 and 4."""
    return next(n for n in range(len(accuracies) + 1) if n not in accuracies or n not in base)
