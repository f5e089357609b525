"""Figures 2 to 6: the paper's claims, the counts of Figure 2, and the images as data URIs."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepsquare.paper.fig2.experiment import summarize
from deepsquare.results import Row, Store


@dataclass(frozen=True)
class Figure:
    """A figure of the paper. ``task`` begins the labels of its rows; ``smoothness`` selects the metrics it shows."""

    number: int
    title: str
    claim: str
    task: str = ""
    smoothness: bool = False  # else test loss and accuracy


FIGURES = (
    Figure(
        2,
        "Hyperbolic decision boundary and regions",
        "Two inputs and two hidden units: under conditions (17) and (18) the boundary of a network of squares is a "
        "hyperbola, so that one of its two decision regions is in two pieces. With ReLU no region has more than one.",
    ),
    Figure(
        3,
        "Regression on the one-arm spiral",
        "With ReLU-Square the regressed trajectory is much smoother than with ReLU.",
        "one-arm",
        smoothness=True,
    ),
    Figure(
        4,
        "Test loss of the regression",
        "ReLU-Square brings the mean squared error on test data significantly below that of ReLU.",
        "one-arm",
    ),
    Figure(
        5,
        "Decision regions of the three-arm spiral",
        "With ReLU-Square the decision boundaries are smoother than with ReLU.",
        "three-arm",
        smoothness=True,
    ),
    Figure(6, "Test loss and accuracy of the classification", "ReLU-Square improves both over ReLU.", "three-arm"),
)


@dataclass(frozen=True)
class Count:
    """A kind of network of Figure 2: how many were counted, and how many pieces their regions have."""

    case: str
    networks: int
    claim: str
    found: str
    holds: bool | None


def figure_data_uri(name: str, folders: Sequence[Path]) -> str | None:
    """A PNG as a data URI, from the first folder that has it."""
    for folder in folders:
        path = Path(folder) / name
        if path.is_file():
            return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return None


def _fig2(folders: Sequence[Path]) -> list[Row]:
    """The rows of the first folder that has some."""
    return next((rows for folder in folders if (rows := Store(Path(folder) / "fig2.jsonl").rows())), [])


def fig2_row(folders: Sequence[Path]) -> list[Row]:
    """The conditions of Figure 2's counts: its first row, if there is one."""
    return _fig2(folders)[:1]


def fig2_counts(folders: Sequence[Path]) -> list[Count]:
    """The counts for Figure 2, over all distributions of the weights."""
    rows = _fig2(folders)
    return [
        Count(summary.case.name, summary.counts.total(), summary.case.claim, str(summary), summary.holds)
        for summary in (summarize(rows) if rows else ())
    ]
