"""Figure 2 and the claim of Section 3.1: with squares a narrow network has disconnected decision regions.

The paper claims, for two inputs and two hidden units: under (17) and (18) the boundary of EleSquare is a
hyperbola, which disconnects a region; with ReLU no region has more than one component, by [4]. Both are checked
on random networks by the exact count of ``regions.py``: about half a minute for 10,000 per distribution.

NOTE not in paper: both claims need a first layer of full rank. One of rank 1 maps the plane onto a line, where
ReLU can have two components (h₂ = −h₁ gives D = |h₁| − 1) and EleSquare may have one: counted separately.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import rich
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.markup import escape
from rich.table import Table

from deepsquare._files import atomic_write, ensure_writable
from deepsquare.paper.fig2.regions import Activation, Network, Window, boundary, components, on_grid, window_components
from deepsquare.results import Row, Store, conditions

Sampler: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[Any]]
Pair: TypeAlias = tuple[int, int]  # the components of a network's two regions, the fewer first

DISTRIBUTIONS: Mapping[str, Sampler] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "integers": lambda rng, shape: rng.integers(-3, 4, shape),  # zeros and ties: the degenerate cases
}
MULTIPLES = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)  # exact in floating point


@dataclass(frozen=True)
class Case:
    """A kind of network, and the component counts that agree with the paper's claim (None: no claim)."""

    name: str
    activation: Activation
    rank: int  # of the first layer
    applies: Callable[[Fraction, Fraction, Fraction], bool]  # to the coefficients a, c and d of the decision
    claim: str = "–"
    allowed: frozenset[Pair] | None = None


@dataclass(frozen=True)
class Panel:
    """One panel: a network, the positions of its region labels, and a window that gives a wrong count."""

    title: str
    network: Network
    activation: Activation
    names: tuple[tuple[str, float, float], ...]
    window: Window | None = None


def _hyperbolic(a: Fraction, c: Fraction, d: Fraction) -> bool:
    """Equations (17) and (18)."""
    return a * c < 0 and d != 0


ONE_AND_TWO = frozenset({(1, 2)})
AT_MOST_ONE = frozenset({(0, 0), (0, 1), (1, 1)})
CASES = (
    Case("EleSquare, (17) and (18), full rank", "square", 2, _hyperbolic, "1 and 2", ONE_AND_TWO),
    Case("ReLU, full rank", "relu", 2, lambda *_: True, "at most 1", AT_MOST_ONE),
    Case("EleSquare, (17), not (18), full rank", "square", 2, lambda a, c, d: a * c < 0 and d == 0),
    Case("EleSquare, not (17), full rank", "square", 2, lambda a, c, _: a * c >= 0),
    Case("EleSquare, (17) and (18), rank 1", "square", 1, _hyperbolic),
    Case("ReLU, rank 1", "relu", 1, lambda *_: True),
)

HYPERBOLA = Network.from_weights(((1, 0), (0, 1)), (0, 0), ((0, 1), (1, 0)), (1, 0))  # D = σ(h₂) − σ(h₁) + 1
WEDGE = Network.from_weights(((1, 2.5), (1, -2.5)), (-1.25, -1.25), ((0, 1), (0, 1)), (1, 0))  # D = 1 − σ(h₁) − σ(h₂)
VIEW: Window = (-3, 3, -3, 3)
WEDGE_B = (("B", -0.5, 1.7), ("B", -0.5, -1.7), ("B", 2.4, 0))
PANELS = (
    Panel("EleSquare", HYPERBOLA, "square", (("A", 0, 0), ("B", -2.3, 0), ("B", 2.3, 0))),
    Panel("ReLU, same weights", HYPERBOLA, "relu", (("A", -1, 0), ("B", 2.3, 0))),
    Panel("ReLU, cut by a window", WEDGE, "relu", (("A", -1, 0), *WEDGE_B), window=(-2.4, 0.4, -2.3, 2.3)),
)


@dataclass(frozen=True)
class CaseSummary:
    """The counts of one case over all distributions."""

    case: Case
    drawn: int
    counts: Counter[Pair]

    @property
    def networks(self) -> int:
        return self.counts.total()

    @property
    def holds(self) -> bool | None:
        """Whether the paper's claim holds for every network of the case; None if there is no claim or no network."""
        return set(self.counts) <= self.case.allowed if self.case.allowed and self.counts else None

    def __str__(self) -> str:
        return "; ".join(f"{low} and {high}: {n:,}" for (low, high), n in sorted(self.counts.items())) or "–"


def summarize(rows: Sequence[Row]) -> list[CaseSummary]:
    """The rows of the experiment by case."""
    summaries = []
    for case in CASES:
        mine = [row for row in rows if row.recipe["case"] == case.name]
        counts: Counter[Pair] = Counter()
        for row in mine:
            for pair, n in row.metrics["components"].items():
                low, high = pair.split(" and ")
                counts[int(low), int(high)] += n
        summaries.append(CaseSummary(case, sum(row.recipe["drawn"] for row in mine), counts))
    return summaries


def run(figures: Path, results: Path, *, seed: int = 0, networks: int = 10_000) -> list[CaseSummary]:
    """Count the components of ``networks`` random networks per distribution, draw the figure and print a summary.

    Writes ``fig2.png`` to ``figures`` and ``fig2.jsonl`` to ``results``.
    """
    if networks < 1:
        raise ValueError(f"networks is {networks}; expected at least 1")
    for folder in (figures, results):
        ensure_writable(folder)
    figure, store = figures / "fig2.png", Store(results / "fig2.jsonl")
    rows = [row for index in range(len(DISTRIBUTIONS)) for row in count(index, seed, networks)]
    with atomic_write(figure) as path:
        draw().savefig(path, format="png")
    store.replace(rows)
    summaries = summarize(rows)
    title = "Section 3.1: connected components of the two decision regions"
    headings = ("case", "networks", "claimed", "counted", "holds")
    table = Table(*headings, title=title, caption=escape(f"figure: {figure}\nrows: {store.path}"))
    for summary in summaries:
        holds = {True: "yes", False: "NO", None: "–"}[summary.holds]
        counted = f"{summary.networks:,} of {summary.drawn:,}"
        table.add_row(summary.case.name, counted, summary.case.claim, str(summary), holds)
    rich.print(table)
    return summaries


def count(index: int, seed: int, networks: int) -> list[Row]:
    """The rows of one distribution, one per case. For rank 1, A's rows are made proportional."""
    distribution, sample = list(DISTRIBUTIONS.items())[index]
    rng = np.random.default_rng([seed, index])
    weights = sample(rng, (networks, 6, 2))  # A, a₀, W, b
    rank_1 = weights.astype(np.float64)
    rank_1[:, 1] = rank_1[:, 0] * rng.choice(MULTIPLES, (networks, 1))
    drawn = {
        rank: [Network.from_weights(w[:2], w[2], w[3:5], w[5]) for w in stack.tolist()]
        for rank, stack in ((2, weights), (1, rank_1))
    }
    rows = []
    for case in CASES:
        start = time.perf_counter()
        selected = [net for net in drawn[case.rank] if net.rank == case.rank and case.applies(*net.decision)]
        pairs = (sorted(components(net, case.activation)) for net in selected)
        counts = Counter(f"{low} and {high}" for low, high in pairs)
        recipe = {"case": case.name, "rank": case.rank, "distribution": distribution, "drawn": networks}
        metrics = {"networks": len(selected), "components": dict(sorted(counts.items()))}
        seconds = round(time.perf_counter() - start, 2)
        rows.append(Row("fig2", f"{case.name}, {distribution}", seed, recipe, metrics, seconds, **conditions()))
    return rows


def draw() -> Figure:
    """Figure 2: EleSquare, ReLU with the same weights, and why a window is not enough."""
    figure = Figure(figsize=(8, 3.3), dpi=200, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
        _draw_panel(axes, panel)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    above = on_grid(panel.network, panel.activation, VIEW, 900)
    colors = ListedColormap(["#f6c777", "#a9cfe8"])  # tints of Okabe and Ito's orange and blue
    axes.imshow(above, extent=VIEW, origin="lower", cmap=colors, vmin=0, vmax=1, interpolation="nearest")
    for x1, x2 in boundary(panel.network, panel.activation):
        axes.plot(x1, x2, color="black", linewidth=1.4)
    for name, x1, x2 in panel.names:
        axes.text(x1, x2, name, fontsize=15, ha="center", va="center")
    region_a, region_b = components(panel.network, panel.activation)
    counts = f"A: {_pieces(region_a)}, B: {_pieces(region_b)}"
    if panel.window:
        left, right, low, high = panel.window
        axes.add_patch(Rectangle((left, low), right - left, high - low, fill=False, linestyle="--", linewidth=1.4))
        _, in_window = window_components(panel.network, panel.activation, panel.window)
        counts = f"B: {_pieces(region_b)}, {in_window} in the window"
    axes.set_title(panel.title, fontsize=11.5, fontweight="bold", pad=20)
    axes.text(0.5, 1.03, counts, transform=axes.transAxes, fontsize=9.5, ha="center", va="bottom")
    axes.set(xlim=VIEW[:2], ylim=VIEW[2:], xlabel="$x_1$", ylabel="$x_2$", xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    axes.label_outer()


def _pieces(number: int) -> str:
    return f"{number} piece" if number == 1 else f"{number} pieces"
