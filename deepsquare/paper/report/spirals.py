"""Figures 3 to 6 from the rows of the spirals: the networks of each activation, and ReLU-Square minus ReLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepsquare.paper.spirals.measures import BETTER
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import judge_sign
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


def finals(rows: Sequence[Row], task: str, smoothness: bool) -> dict[str, Any] | None:
    """The networks of a task after training, labelled ``task/activation``, as a figure shows them; None without rows.

    ``networks`` has the means by activation and metric, ``differences`` ReLU-Square minus ReLU, paired by seed, and
    ``settings`` those in which ReLU-Square is better, by steps.
    """
    metrics = _metrics(rows)
    try:
        trained = {
            name.removeprefix(f"{task}/"): stored
            for name, stored in metrics.items()
            if "means" in stored and name.startswith(f"{task}/")
        }
        shown = dict.fromkeys(name for stored in trained.values() for name in stored["means"])
        names = [name for name in shown if smoothness is (name not in PERFORMANCE)]
        if not names:
            return None
        networks = {
            activation: {name: _interval(stored, name, stored["means"][name]) for name in names}
            for activation, stored in trained.items()
        }
        square = trained.get("relu_square", {}) if "relu" in trained else {}
        against = square.get("against_relu", {})
        return {
            "names": names,
            "networks": networks,
            "seeds": max(mean.n for means in networks.values() for mean in means.values()),
            "differences": {name: _difference(square, name, against[name]) for name in names if name in against},
            "settings": [] if smoothness else metrics.get(f"settings/{task}", {}).get("relu_square_better", []),
        }
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"a row {task}/… of the spirals lacks a value ({error!r}); create the rows again: reproduce fig3"
        raise ValueError(reason) from error


def _interval(metrics: Mapping[str, Any], name: str, stored: Mapping[str, float]) -> Interval:
    """A stored mean; accuracies in per cent."""
    return Interval.read(stored, len(metrics[name]), 100 if "accuracy" in name else 1)


def _difference(metrics: Mapping[str, Any], name: str, stored: Mapping[str, float]) -> dict[str, Any]:
    """The difference, the share of the seeds in which it is an improvement, and the verdict if the paper claims one."""
    interval = _interval(metrics, name, stored)
    verdict = judge_sign(BETTER[name], interval) if name in BETTER else None
    return {"interval": interval, "share_better": stored.get("share_better"), "verdict": verdict}


def _metrics(rows: Sequence[Row]) -> dict[str, Mapping[str, Any]]:
    """The metrics of the spirals by the label of the row; the first row with a label counts."""
    metrics: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row.experiment == "spirals":
            metrics.setdefault(row.row, row.metrics)
    return metrics


def activation_costs(rows: Sequence[Row]) -> Mapping[str, Mapping[str, Any]]:
    """The time of each activation relative to ReLU."""
    costs: Mapping[str, Mapping[str, Any]] = _metrics(rows).get("activation cost", {}).get("relative_to_relu", {})
    return costs


def ablations(rows: Sequence[Row]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The cases of each row ``ablation/NAME``, by name."""
    stored = {name: metrics for name, metrics in _metrics(rows).items() if name.startswith("ablation/")}
    return {name.removeprefix("ablation/"): metrics.get("cases", ()) for name, metrics in stored.items()}
