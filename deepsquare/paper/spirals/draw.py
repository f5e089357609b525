"""Figures 3 to 6 in the paper's layout, and the dependence of the result on the setting.

Trajectories and decision regions are those of the network with the median test loss, not of the best one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from deepsquare.paper.spirals.data import NOISE, Array, trajectory
from deepsquare.paper.spirals.measures import TIMES, boundary_turn, largest_turn, on_grid, paths
from deepsquare.paper.spirals.tuning import LENGTHS, LRS, Trained, Tuned, quantiles

NAMES = {"relu": "ReLU", "relu_square": "ReLU-Square", "softplus": "softplus", "tanh": "tanh", "sigmoid": "sigmoid"}
COLORS = {  # Okabe and Ito's
    "relu": "#D55E00",
    "relu_square": "#0072B2",
    "softplus": "#009E73",
    "tanh": "#CC79A7",
    "sigmoid": "#E69F00",
}
STYLES = {"softplus": (0, (4, 1.5)), "tanh": (0, (1, 1)), "sigmoid": (0, (5, 1, 1, 1))}
ARM_COLORS = ("#0072B2", "#E69F00", "#009E73")
ARM_TINTS = ("#b3d4e8", "#f7dfae", "#b0dccb")
ARM_MARKERS = ("o", "s", "^")
MAIN = ("relu", "relu_square")
SCHEDULES = {  # of regimes.py
    "default": "Adam at 0.001, not tuned",
    "constant": "tuned, constant rate",
    "decay": "tuned, rate decays",
}
VERDICTS = {
    "reproduced": ("ReLU-Square better", COLORS["relu_square"]),
    "contrary": ("ReLU better", COLORS["relu"]),
    "inconclusive": ("no significant difference", "0.45"),
}
BANDS = "median over the seeds; bands: the middle 50% and 90%; dot: number of steps chosen on validation data"
MEDIAN = "(b), (c): of {} networks the one with the median test loss"
TITLES = ("(b) With DeepSquare", "(c) Without DeepSquare")


def fig3(trained: Mapping[str, Trained]) -> Figure:
    """The one arm; its regression with and without DeepSquare."""
    figure = _figure(8, 3.2, MEDIAN.format(len(trained["relu"].loss)))
    data, *panels = figure.subplots(1, 3, sharex=True, sharey=True)
    _, points = trained["relu_square"].median_data
    true = trajectory(TIMES)
    data.plot(*true.T, color="0.6", linewidth=1)
    x1, x2 = points
    data.scatter(x1, x2, s=9, color="black")
    _title(data, "(a) One-arm spiral data", f"{len(x1)} points to train on; grey: without noise")
    for axes, title, name in zip(panels, TITLES, ("relu_square", "relu"), strict=True):
        result = trained[name]
        path = paths(result.networks, result.parameters)[result.median_network]
        axes.plot(*true.T, color="0.6", linewidth=1)
        axes.plot(*path.T, color=COLORS[name], linewidth=1.8)
        loss = result.loss[result.median_network]
        _title(axes, title, f"test loss {loss:.2g}, sharpest turn {largest_turn(path):.0f}°")
    for axes in (data, *panels):
        axes.set(aspect="equal", xlim=(-1.2, 0.9), ylim=(-0.75, 1.05), xticks=(-1, 0), yticks=(0, 1))
    return figure


def fig4(trained: Mapping[str, Trained]) -> Figure:
    """The test loss of the regression along training."""
    figure = _figure(6.4, 3.8, BANDS)
    axes = figure.subplots()
    _curves(axes, trained, "test_loss")
    axes.axhline(NOISE**2, color="0.4", linewidth=0.9, linestyle="--")
    in_axes = axes.get_yaxis_transform()
    axes.text(0.01, NOISE**2, "noise", ha="left", va="top", fontsize=9, color="0.3", transform=in_axes)
    axes.set(yscale="log", xlabel="step", ylabel="test loss (mean squared error)", title="One-arm spiral")
    axes.set_ylim(NOISE**2 / 1.3, 0.03)
    _legend(axes, "upper right")
    return figure


def fig5(trained: Mapping[str, Trained]) -> Figure:
    """The three arms; the decision regions with and without DeepSquare."""
    figure = _figure(8, 3.5, MEDIAN.format(len(trained["relu"].loss)))
    data, *panels = figure.subplots(1, 3, sharex=True, sharey=True)
    _arms(data, trained["relu_square"], 9)
    _title(data, "(a) Three-arm spiral data", "the points to train on")
    for axes, title, name in zip(panels, TITLES, ("relu_square", "relu"), strict=True):
        result = trained[name]
        index = result.median_network
        ticks, outputs = on_grid(result.networks, result.parameters, [index])
        extent = (ticks[0], ticks[-1], ticks[0], ticks[-1])
        regions = np.argmax(outputs[0], axis=0)
        axes.imshow(regions, extent=extent, origin="lower", cmap=ListedColormap(ARM_TINTS), vmin=0, vmax=2)
        _arms(axes, result, 4)
        turn = boundary_turn(ticks, outputs[0])
        _title(axes, title, f"test loss {result.loss[index]:.2g}, sharpest turns {turn:.0f}°")
    for axes in (data, *panels):
        axes.set(aspect="equal", xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    return figure


def _arms(axes: Axes, trained: Trained, size: float) -> None:
    points, arms = trained.median_data
    for arm, color, marker in zip(arms, ARM_COLORS, ARM_MARKERS, strict=True):
        x1, x2 = points[:, arm == 1]
        axes.scatter(x1, x2, s=size, color=color, marker=marker, linewidths=0)


def fig6(trained: Mapping[str, Trained]) -> Figure:
    """The test loss and the test accuracy of the classification along training."""
    figure = _figure(8, 3.6, BANDS)
    loss, accuracy = figure.subplots(1, 2)
    _curves(loss, trained, "test_loss")
    _curves(accuracy, trained, "test_accuracy", unit=100)
    loss.set(yscale="log", xlabel="step", ylabel="test loss (cross-entropy)", title="Three-arm spiral: loss")
    accuracy.set(xlabel="step", ylabel="test accuracy (%)", title="Three-arm spiral: accuracy", ylim=(85, 100.3))
    _legend(accuracy, "lower right")
    return figure


def _curves(axes: Axes, trained: Mapping[str, Trained], metric: str, unit: float = 1) -> None:
    """Medians over the seeds; for the paper's two activations also the middle 50% and 90%."""
    for name in (*(name for name in trained if name not in MAIN), *MAIN):
        result, color = trained[name], COLORS[name]
        low, quarter, middle, third, high = quantiles(unit * result.curves[metric])
        main = name in MAIN
        if main:
            axes.fill_between(result.checkpoints, low, high, color=color, alpha=0.15, linewidth=0)
            axes.fill_between(result.checkpoints, quarter, third, color=color, alpha=0.3, linewidth=0)
        width, style, size = (2, "-", 7) if main else (1.2, STYLES[name], 5)
        axes.plot(result.checkpoints, middle, color=color, linewidth=width, linestyle=style, label=NAMES[name])
        axes.plot(result.steps, middle[result.chosen], "o", color=color, markersize=size, zorder=3)
    axes.set_xlim(0, 1.02 * max(result.checkpoints[-1] for result in trained.values()))


def _legend(axes: Axes, location: Literal["upper right", "lower right"]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    order = [labels.index(name) for name in NAMES.values()]  # ReLU and ReLU-Square first, though drawn last
    axes.legend([handles[i] for i in order], [labels[i] for i in order], loc=location, fontsize=9, frameon=False)


def settings(tuned: Mapping[str, Mapping[str, Tuned]]) -> Figure:
    """The ratio of test losses, ReLU-Square to ReLU, for every setting and length; the best ones are framed."""
    figure = _figure(8, 5.6)
    grid = figure.subplots(len(tuned), len(LENGTHS), gridspec_kw={"height_ratios": [2, 1]})
    for row, (task, results) in zip(grid, tuned.items(), strict=True):
        for index, axes in enumerate(row):
            _heat_map(axes, task, results, index)
            axes.set_yticklabels(axes.get_yticklabels() if index == 0 else [])
    bar = figure.colorbar(grid[0, 0].images[0], ax=grid, shrink=0.6, pad=0.01)
    bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["⅛", "¼", "½", "1", "2", "4", "8"])
    bar.set_label("test loss, ReLU-Square / ReLU", fontsize=9)
    frame: dict[str, Any] = {"fill": False, "linewidth": 2}
    frames = [Patch(edgecolor=COLORS[name], label=f"chosen for {NAMES[name]}", **frame) for name in MAIN]
    figure.legend(handles=frames, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _heat_map(axes: Axes, task: str, tuned: Mapping[str, Tuned], index: int) -> None:
    relu, square = tuned["relu"], tuned["relu_square"]
    lrs = [f"{lr:g}" for values in LRS.values() for lr in values]
    table = log_ratio(square.test, relu.test)[index].reshape(-1, len(lrs))
    axes.imshow(table.clip(-3, 3), cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto")
    _title(axes, f"{task}, {relu.steps[index]:,} steps", f"ReLU-Square better in {(table < 0).sum()} of {table.size}")
    for (row, column), value in np.ndenumerate(table):
        text = "–" if np.isnan(value) else ">8" if value > 3 else "<⅛" if value < -3 else f"{2**value:.1f}"
        color = "white" if abs(value) > 1.8 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    for name, size in zip(MAIN, (0.92, 0.76), strict=True):  # nested if both are the same
        setting, steps = tuned[name].best
        if steps == relu.steps[index]:
            row, column = divmod(relu.settings.index(setting), len(lrs))
            corner = (column - size / 2, row - size / 2)
            axes.add_patch(Rectangle(corner, size, size, fill=False, edgecolor=COLORS[name], linewidth=2))
    kinds = relu.settings[:: len(lrs)]
    axes.set_yticks(range(len(kinds)), [f"{kind.initialization}\n{kind.inputs}" for kind in kinds], fontsize=8)
    axes.set_xticks(range(len(lrs)), lrs, fontsize=7)
    axes.axvline(len(LRS["adam"]) - 0.5, color="black", linewidth=1)
    for x, name in ((0.28, "Adam"), (0.79, "SGD")):
        axes.text(x, -0.2 * 2 / len(kinds), name, transform=axes.transAxes, fontsize=9, ha="center", va="top")


def regimes(judgements: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Figure:
    """The difference between ReLU-Square and ReLU with its interval, by regime; a panel for each task and metric."""
    note = (
        "mean and 95% interval over the seeds, paired by seed; the axis of the accuracy is logarithmic beyond ±1 point"
    )
    figure = _figure(10.5, 5, note)
    for axes, ((task, metric), shown) in zip(figure.subplots(1, len(judgements)), judgements.items(), strict=True):
        accuracy = metric == "accuracy"
        _differences(axes, shown, relative=not accuracy)
        axes.set_xlabel("ReLU-Square minus ReLU " + ("(points)" if accuracy else "(% of ReLU’s mean)"), fontsize=9)
        better = "right" if accuracy else "left"
        _title(axes, f"{task} spiral: {metric}", f"ReLU-Square is better to the {better} of 0")
    handles = [Patch(color=color, label=label) for label, color in VERDICTS.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    return figure


def _differences(axes: Axes, shown: Sequence[Mapping[str, Any]], relative: bool) -> None:
    """One line for each regime under the name of its schedule; ``relative`` to ReLU's mean, in per cent."""
    y, ticks = 0.0, []
    for schedule, name in SCHEDULES.items():
        y += 1.2
        text: dict[str, Any] = {"va": "center", "fontsize": 8, "bbox": {"color": "white", "pad": 1}}
        axes.text(0.02, y, name, transform=axes.get_yaxis_transform(), **text)
        for found in (found for found in shown if found["schedule"] == schedule):
            y += 1
            difference, scale = found["difference"], 100 / found["relu"].mean if relative else 1
            _, color = VERDICTS[found["verdict"].value]
            bar: dict[str, Any] = {"fmt": "o", "color": color, "markersize": 4, "capsize": 2.5, "linewidth": 1.4}
            axes.errorbar(scale * difference.mean, y, xerr=scale * difference.half, **bar)
            ticks.append((y, f"{found['steps']:,}"))
    axes.axvline(0, color="0.3", linewidth=0.8, zorder=0)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    if not relative:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks((-1, -0.5, 0, 0.5, 1, 2, 5))
        axes.set_xlim(-2, 12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+g}".replace("-", "−") if x else "0"))
    axes.set_yticks(*zip(*ticks, strict=True), fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(y + 0.8, 0.4)
    axes.set_ylabel("steps", fontsize=9)


def log_ratio(square: Array, relu: Array) -> Array:
    """log₂ of the ratio of two losses; ±∞ if one diverged, NaN if both did."""
    with np.errstate(divide="ignore", invalid="ignore"):  # ∞ − ∞ is NaN
        ratio: Array = np.log2(square) - np.log2(relu)
    return ratio


def _figure(width: float, height: float, note: str = "") -> Figure:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.supxlabel(note, fontsize=8.5, color="0.25")
    return figure


def _title(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, fontsize=10.5, fontweight="bold", pad=16)
    axes.text(0.5, 1.02, below, transform=axes.transAxes, fontsize=8, ha="center", va="bottom")
