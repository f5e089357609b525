"""Figures 2 to 6: their titles and rows, and the images as data URIs; the template has the paper's claims."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepsquare.results import Row, Store


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
