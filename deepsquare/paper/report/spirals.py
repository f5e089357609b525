"""What the rows of the spirals say on Figures 3 to 6: the networks of each activation, and ReLU-Square beside ReLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepsquare.paper.spirals.intervals import BETTER
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
PERFORMANCE = ("test_loss", "train_loss", "test_accuracy")  # Figures 4 and 6; the rest is smoothness: 3 and 5


@dataclass(frozen=True)
class Difference:
    """ReLU-Square minus ReLU, paired by seed: the interval, the share of the seeds that gain, and the verdict."""

    interval: Interval
    share: float | None
    verdict: Verdict | None  # None where the paper claims nothing


@dataclass(frozen=True)
class Finals:
    """The networks of a task after training: by activation, then by metric."""

    names: tuple[str, ...]
    networks: Mapping[str, Mapping[str, Interval]]
    differences: Mapping[str, Difference]
    settings: tuple[Mapping[str, int], ...]  # after how many steps ReLU-Square is better in how many settings

    @property
    def seeds(self) -> int:
        """How many networks of each activation there are."""
        return max(mean.n for means in self.networks.values() for mean in means.values())


def finals(rows: Sequence[Row], task: str, smoothness: bool) -> Finals | None:
    """What the rows of a task, labelled ``task/activation``, say on a figure; None where there are none."""
    try:
        return _finals(rows, task, smoothness)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"a row {task}/… of the spirals lacks something ({error!r}); make them again: reproduce fig3"
        raise ValueError(reason) from error


def _finals(rows: Sequence[Row], task: str, smoothness: bool) -> Finals | None:
    found: dict[str, Row] = {}
    for row in rows:
        if row.experiment == "spirals" and "means" in row.metrics and row.row.startswith(f"{task}/"):
            found.setdefault(row.row.removeprefix(f"{task}/"), row)
    names = dict.fromkeys(name for row in found.values() for name in row.metrics["means"])
    chosen = tuple(name for name in names if smoothness is (name not in PERFORMANCE))
    if not chosen:
        return None
    networks = {
        activation: {name: _interval(row, name, row.metrics["means"][name]) for name in chosen}
        for activation, row in found.items()
    }
    square = found.get("relu_square") if "relu" in found else None
    against = square.metrics.get("against_relu", {}) if square else {}
    differences = {name: _difference(square, name, against[name]) for name in chosen if square and name in against}
    better = next((r.metrics.get("relu_square_better", ()) for r in rows if r.row == f"settings/{task}"), ())
    return Finals(chosen, networks, differences, () if smoothness else tuple(better))


def _interval(row: Row, name: str, stored: Mapping[str, float]) -> Interval:
    """A stored mean; accuracies in per cent."""
    return Interval.read(stored, len(row.metrics[name]), 100 if "accuracy" in name else 1)


def _difference(row: Row, name: str, stored: Mapping[str, float]) -> Difference:
    interval = _interval(row, name, stored)
    claim = judge_sign(BETTER[name], interval) if name in BETTER else None
    return Difference(interval, stored.get("share_better"), claim)


def costs(rows: Sequence[Row]) -> Mapping[str, Mapping[str, Any]]:
    """How long each activation takes, ReLU being 1."""
    stored = (row.metrics.get("relative_to_relu", {}) for row in rows if row.experiment == "spirals")
    return next((found for found in stored if found), {})


def ablations(rows: Sequence[Row]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The cases of each row ``ablation/NAME``, by name."""
    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    for row in rows:
        if row.experiment == "spirals" and row.row.startswith("ablation/"):
            found.setdefault(row.row.removeprefix("ablation/"), row.metrics.get("cases", ()))
    return found
