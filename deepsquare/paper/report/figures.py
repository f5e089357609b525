"""Figures 2 to 6: titles, images and the results in the rows; the template has the paper's claims."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepsquare.paper.spirals.draw import NAMES
from deepsquare.paper.spirals.measures import BETTER
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import judge_sign
from deepsquare.results import Row, Store

LABELS = {
    "test_loss": "test loss",
    "train_loss": "training loss",
    "test_accuracy": "test accuracy (%)",
    "roughness": "roughness (the spiral’s is 1)",
    "sharpest_turn": "sharpest turn (°)",
    **NAMES,
}
PERFORMANCE = ("test_loss", "train_loss", "test_accuracy")  # Figures 4 and 6; the other metrics are those of 3 and 5


@dataclass(frozen=True)
class Figure:
    """A figure of the paper. ``task`` begins the labels of its rows; ``smoothness`` selects the metrics it shows."""

    number: int
    title: str
    task: str = ""
    smoothness: bool = False  # else test loss and accuracy


FIGURES = (
    Figure(2, "Hyperbolic decision boundary and regions"),
    Figure(3, "Regression on the one-arm spiral", "one-arm", smoothness=True),
    Figure(4, "Test loss of the regression", "one-arm"),
    Figure(5, "Decision regions of the three-arm spiral", "three-arm", smoothness=True),
    Figure(6, "Test loss and accuracy of the classification", "three-arm"),
)


def figure_data_uri(name: str, folders: Sequence[Path]) -> str | None:
    """A PNG as a data URI, from the first folder that has it."""
    path = next((Path(folder) / name for folder in folders if (Path(folder) / name).is_file()), None)
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path else None


def fig2_rows(folders: Sequence[Path]) -> list[Row]:
    """The rows of Figure 2 in the first folder that has some."""
    return next((rows for folder in folders if (rows := Store(Path(folder) / "fig2.jsonl").rows())), [])


def spiral_results(rows: Sequence[Row], task: str, smoothness: bool) -> dict[str, Any] | None:
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
