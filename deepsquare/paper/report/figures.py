"""Figures 2 to 6: titles, images and the results in the rows; the template has the paper's claims."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepsquare.paper.spirals.draw import NAMES
from deepsquare.paper.spirals.measures import BETTER
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import judge_sign

LABELS = {
    "test_loss": "test loss",
    "train_loss": "training loss",
    "test_accuracy": "test accuracy (%)",
    "roughness": "roughness (the spiral’s is 1)",
    "sharpest_turn": "sharpest turn (°)",
    **NAMES,
}
PERFORMANCE = ("test_loss", "train_loss", "test_accuracy")  # Figures 4 and 6; the other metrics are those of 3 and 5

# The title, the task whose rows the figure shows, and whether it shows their smoothness, or else loss and accuracy.
FIGURES = {
    2: ("Hyperbolic decision boundary and regions", "", False),
    3: ("Regression on the one-arm spiral", "one-arm", True),
    4: ("Test loss of the regression", "one-arm", False),
    5: ("Decision regions of the three-arm spiral", "three-arm", True),
    6: ("Test loss and accuracy of the classification", "three-arm", False),
}


def figure_data_uri(name: str, folders: Sequence[Path]) -> str | None:
    """A PNG as a data URI, from the first folder that has it."""
    path = next((Path(folder) / name for folder in folders if (Path(folder) / name).is_file()), None)
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path else None


def spiral_results(metrics: Mapping[str, Mapping[str, Any]], task: str, smoothness: bool) -> dict[str, Any] | None:
    """The networks of a task after training, labelled ``task/activation``, as a figure shows them; None without rows.

    ``networks`` has the means by activation and metric, ``differences`` ReLU-Square minus ReLU, paired by seed, and
    ``settings`` those in which ReLU-Square is better, by steps.
    """

    def interval(network: Mapping[str, Any], kind: str, name: str) -> Interval:
        return Interval.read(network[kind][name], len(network[name]), 100 if "accuracy" in name else 1)  # per cent

    try:
        rows = {activation: metrics.get(f"{task}/{activation}", {}) for activation in NAMES}
        trained = {activation: row for activation, row in rows.items() if "means" in row}
        shown = dict.fromkeys(name for network in trained.values() for name in network["means"])
        names = [name for name in shown if smoothness is (name not in PERFORMANCE)]
        if not names:
            return None
        networks = {key: {name: interval(network, "means", name) for name in names} for key, network in trained.items()}
        square = trained.get("relu_square", {}) if "relu" in trained else {}
        against = square.get("against_relu", {})
        return {
            "names": names,
            "networks": networks,
            "seeds": max(mean.n for means in networks.values() for mean in means.values()),
            "differences": {
                name: {
                    "interval": (difference := interval(square, "against_relu", name)),
                    "share_better": against[name].get("share_better"),
                    # loss and accuracy are judged by training regime
                    "verdict": judge_sign(BETTER[name], difference) if smoothness and name in BETTER else None,
                }
                for name in names
                if name in against
            },
            "settings": [] if smoothness else metrics.get(f"settings/{task}", {}).get("relu_square_better", []),
        }
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"a row {task}/… of the spirals lacks a value ({error!r}); create the rows again: reproduce fig3"
        raise ValueError(reason) from error
