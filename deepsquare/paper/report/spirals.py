"""Figures 3 to 6 from the rows of the spirals: the networks of each activation, and ReLU-Square minus ReLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepsquare.paper.spirals.measures import BETTER
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import Verdict, judge_sign
from deepsquare.results import Row

LABELS = {
    "test_loss": "test loss",
    "train_loss": "training loss",
    "test_accuracy": "test accuracy (%)",
    "roughness": "roughness (the spiral’s is 1)",
    "sharpest_turn": "sharpest turn (°)",
    "units_with_kink": "units with a kink",
    "relu": "ReLU",
    "relu_square": "ReLU-Square",
}
PERFORMANCE = ("test_loss", "train_loss", "test_accuracy")  # Figures 4 and 6; the other metrics are those of 3 and 5


@dataclass(frozen=True)
class Difference:
    """ReLU-Square minus ReLU, paired by seed."""

    interval: Interval
    share_better: float | None  # of the seeds
    verdict: Verdict | None  # None where the paper claims nothing


@dataclass(frozen=True)
class Finals:
    """The networks of a task after training: by activation, then by metric."""

    names: tuple[str, ...]
    networks: Mapping[str, Mapping[str, Interval]]
    differences: Mapping[str, Difference]
    settings: tuple[Mapping[str, int], ...]  # settings in which ReLU-Square is better, by steps

    @property
    def seeds(self) -> int:
        """The number of networks of each activation."""
        return max(mean.n for means in self.networks.values() for mean in means.values())


def finals(rows: Sequence[Row], task: str, smoothness: bool) -> Finals | None:
    """The rows of a task, labelled ``task/activation``, as a figure shows them; None where there are none."""
    try:
        return _finals(rows, task, smoothness)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"a row {task}/… of the spirals lacks a value ({error!r}); create the rows again: reproduce fig3"
        raise ValueError(reason) from error


def _finals(rows: Sequence[Row], task: str, smoothness: bool) -> Finals | None:
    rows = [row for row in rows if row.experiment == "spirals"]
    by_activation: dict[str, Row] = {}
    for row in rows:
        if "means" in row.metrics and row.row.startswith(f"{task}/"):
            by_activation.setdefault(row.row.removeprefix(f"{task}/"), row)
    metrics = dict.fromkeys(name for row in by_activation.values() for name in row.metrics["means"])
    names = tuple(name for name in metrics if smoothness is (name not in PERFORMANCE))
    if not names:
        return None
    networks = {
        activation: {name: _interval(row, name, row.metrics["means"][name]) for name in names}
        for activation, row in by_activation.items()
    }
    square = by_activation.get("relu_square") if "relu" in by_activation else None
    against = square.metrics.get("against_relu", {}) if square else {}
    differences = {name: _difference(square, name, against[name]) for name in names if square and name in against}
    better = next((r.metrics.get("relu_square_better", ()) for r in rows if r.row == f"settings/{task}"), ())
    return Finals(names, networks, differences, () if smoothness else tuple(better))


def _interval(row: Row, name: str, stored: Mapping[str, float]) -> Interval:
    """A stored mean; accuracies in per cent."""
    return Interval.read(stored, len(row.metrics[name]), 100 if "accuracy" in name else 1)


def _difference(row: Row, name: str, stored: Mapping[str, float]) -> Difference:
    interval = _interval(row, name, stored)
    verdict = judge_sign(BETTER[name], interval) if name in BETTER else None
    return Difference(interval, stored.get("share_better"), verdict)


def activation_costs(rows: Sequence[Row]) -> Mapping[str, Mapping[str, Any]]:
    """The time of each activation relative to ReLU."""
    stored = (row.metrics.get("relative_to_relu", {}) for row in rows if row.experiment == "spirals")
    return next(filter(None, stored), {})


def ablations(rows: Sequence[Row]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The cases of each row ``ablation/NAME``, by name."""
    cases: dict[str, Sequence[Mapping[str, Any]]] = {}
    for row in rows:
        if row.experiment == "spirals" and row.row.startswith("ablation/"):
            cases.setdefault(row.row.removeprefix("ablation/"), row.metrics.get("cases", ()))
    return cases
