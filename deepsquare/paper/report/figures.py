"""Figures 2 to 6: what each claims, what was found, and the image as a part of the page."""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepsquare.results import Row


@dataclass(frozen=True)
class Figure:
    """A figure of the paper. ``task`` begins the labels of its rows; ``smoothness`` says what of them it is about."""

    number: int
    file: str
    title: str
    claim: str
    command: str
    task: str = ""
    smoothness: bool = False  # else test loss and accuracy


FIGURES = (
    Figure(
        2,
        "fig2.png",
        "Hyperbolic decision boundary and regions",
        "Two inputs and two hidden units: under conditions (17) and (18) the boundary of a network of squares is a "
        "hyperbola, so that one of its two decision regions is in two pieces. With ReLU no region has more than one.",
        "deepsquare reproduce fig2",
    ),
    Figure(
        3,
        "fig3.png",
        "Regression on the one-arm spiral",
        "With ReLU-Square the regressed trajectory is much smoother than with ReLU.",
        "deepsquare reproduce fig3",
        "one-arm",
        smoothness=True,
    ),
    Figure(
        4,
        "fig4.png",
        "Test loss of the regression",
        "ReLU-Square brings the mean squared error on test data significantly below that of ReLU.",
        "deepsquare reproduce fig4",
        "one-arm",
    ),
    Figure(
        5,
        "fig5.png",
        "Decision regions of the three-arm spiral",
        "With ReLU-Square the decision boundaries are smoother than with ReLU.",
        "deepsquare reproduce fig5",
        "three-arm",
        smoothness=True,
    ),
    Figure(
        6,
        "fig6.png",
        "Test loss and accuracy of the classification",
        "ReLU-Square improves both over ReLU.",
        "deepsquare reproduce fig6",
        "three-arm",
    ),
)


@dataclass(frozen=True)
class Count:
    """A kind of network of Figure 2: how many were counted, and how many pieces their regions have."""

    case: str
    networks: int
    claim: str
    found: str
    holds: bool | None


def image(name: str, folders: Sequence[Path]) -> str | None:
    """The PNG as a data URI, from the first folder that has it."""
    for folder in folders:
        path = Path(folder) / name
        if path.is_file():
            return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return None


def _fig2(folders: Sequence[Path]) -> dict[str, Any]:
    for folder in folders:
        path = Path(folder) / "fig2.json"
        if path.is_file():
            try:
                stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                _ = stored["seed"], stored["rows"], stored["claims"]
            except (ValueError, TypeError, KeyError) as error:
                reason = f"{path} does not hold the counts of Figure 2 ({error!r}); make it again: reproduce fig2"
                raise ValueError(reason) from error
            return stored
    return {}


def fig2_row(folders: Sequence[Path]) -> list[Row]:
    """The conditions of Figure 2's counts as a row, if there are any."""
    stored = _fig2(folders)
    conditions = {name: stored[name] for name in ("versions", "hardware", "commit", "date") if name in stored}
    return [Row("fig2", "", stored["seed"], {}, {}, 0.0, **conditions)] if stored else []


def fig2_counts(folders: Sequence[Path]) -> list[Count]:
    """What was counted for Figure 2, over all distributions of the weights."""
    stored = _fig2(folders)
    claims = {claim["case"]: claim for claim in stored.get("claims", ())}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in stored.get("rows", ()):
        counts[row["case"]].update(row["components"])
    return [
        Count(
            case,
            found.total(),
            claims.get(case, {}).get("claim", "–"),
            "; ".join(f"{pieces}: {n:,}" for pieces, n in sorted(found.items())) or "–",
            claims.get(case, {}).get("holds"),
        )
        for case, found in counts.items()
    ]
