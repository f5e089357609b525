"""Figure 2, and the claim of Section 3.1 behind it: squares let a narrow network's regions fall apart.

The paper claims, for two inputs and two hidden units: under (17) and (18) the boundary of EleSquare is a
hyperbola, which disconnects a region; with ReLU no region has more than one piece, by [4]. Both are checked
on random networks by the exact count of ``regions.py``: about half a minute for 10,000 per distribution.

NOTE not in paper: both claims need a first layer of full rank. One of rank 1 maps the plane onto a line,
where ReLU can make two pieces (h₂ = −h₁ gives D = |h₁| − 1) and EleSquare need not: counted apart.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import rich
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.markup import escape
from rich.table import Table

from deepsquare._files import atomic_write, ensure_writable
from deepsquare.paper.fig2.regions import (
    Activation,
    Network,
    Window,
    boundary,
    components,
    on_grid,
    window_components,
)
from deepsquare.results import conditions

Sampler: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[Any]]
Pair: TypeAlias = tuple[int, int]  # the components of a network's two regions, the fewer first

DISTRIBUTIONS: Mapping[str, Sampler] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "integers": lambda rng, shape: rng.integers(-3, 4, shape),  # zeros and ties: the degenerate cases
}
MULTIPLES = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)  # of a float, exact


@dataclass(frozen=True)
class Case:
    """A kind of network, and the counts that the paper allows it (None: it claims nothing)."""

    name: str
    activation: Activation
    rank: int  # of the first layer
    applies: Callable[[Network], bool]
    claim: str = "–"
    allowed: frozenset[Pair] | None = None


@dataclass(frozen=True)
class CaseCount:
    """One case under one distribution: the counts found among the networks drawn."""

    case: Case
    distribution: str
    drawn: int
    found: Counter[Pair]


@dataclass(frozen=True)
class Panel:
    """One image: a network, where to write the names of its regions, and a window that misleads."""

    title: str
    network: Network
    activation: Activation
    names: tuple[tuple[str, float, float], ...]
    window: Window | None = None


def _disagree(network: Network) -> bool:
    """Equation (17)."""
    a, c, _ = network.decision
    return a * c < 0


def _hyperbolic(network: Network) -> bool:
    """Equations (17) and (18)."""
    return _disagree(network) and network.decision[2] != 0


ONE_AND_TWO = frozenset({(1, 2)})
AT_MOST_ONE = frozenset({(0, 0), (0, 1), (1, 1)})
CASES = (
    Case("EleSquare, (17) and (18), full rank", "square", 2, _hyperbolic, "1 and 2", ONE_AND_TWO),
    Case("ReLU, full rank", "relu", 2, lambda net: True, "at most 1", AT_MOST_ONE),
    Case(
        "EleSquare, (17), not (18), full rank",
        "square",
        2,
        lambda net: _disagree(net) and not _hyperbolic(net),
    ),
    Case("EleSquare, not (17), full rank", "square", 2, lambda net: not _disagree(net)),
    Case("EleSquare, (17) and (18), rank 1", "square", 1, _hyperbolic),
    Case("ReLU, rank 1", "relu", 1, lambda net: True),
)

HYPERBOLA = Network.of(((1, 0), (0, 1)), (0, 0), ((0, 1), (1, 0)), (1, 0))  # D = σ(h₂) − σ(h₁) + 1
WEDGE = Network.of(((1, 2.5), (1, -2.5)), (-1.25, -1.25), ((0, 1), (0, 1)), (1, 0))  # D = 1 − σ(h₁) − σ(h₂)
VIEW: Window = (-3, 3, -3, 3)
WEDGE_B = (("B", -0.5, 1.7), ("B", -0.5, -1.7), ("B", 2.4, 0))
PANELS = (
    Panel("EleSquare", HYPERBOLA, "square", (("A", 0, 0), ("B", -2.3, 0), ("B", 2.3, 0))),
    Panel("ReLU, same weights", HYPERBOLA, "relu", (("A", -1, 0), ("B", 2.3, 0))),
    Panel("ReLU, cut by a window", WEDGE, "relu", (("A", -1, 0), *WEDGE_B), window=(-2.4, 0.4, -2.3, 2.3)),
)


@dataclass(frozen=True)
class Fig2Result:
    """What was counted, and where the figure and the rows are."""

    rows: tuple[CaseCount, ...]
    figure: Path
    results: Path

    def found(self, case: Case) -> Counter[Pair]:
        """The counts of one case over all distributions."""
        return sum((row.found for row in self.rows if row.case is case), Counter())

    def holds(self, case: Case) -> bool | None:
        """Whether the paper's claim on a case holds for every network of it; None where there is none."""
        found = self.found(case)
        return set(found) <= case.allowed if case.allowed and found else None

    def __rich__(self) -> Table:
        """The summary: what was claimed, what was found, and where to see it."""
        table = Table(
            title="Section 3.1: connected components of the two decision regions",
            caption=escape(f"figure: {self.figure}\nrows: {self.results}"),
        )
        for heading in ("case", "networks", "claimed", "found", "holds"):
            table.add_column(heading)
        for case in CASES:
            found = self.found(case)
            seen = "; ".join(f"{low} and {high}: {n:,}" for (low, high), n in sorted(found.items()))
            holds = {True: "yes", False: "NO", None: "–"}[self.holds(case)]
            drawn = sum(row.drawn for row in self.rows if row.case is case)
            table.add_row(case.name, f"{found.total():,} of {drawn:,}", case.claim, seen or "–", holds)
        return table


def run(
    figures: Path = Path("out/figures"),
    results: Path = Path("out/results"),
    seed: int = 0,
    networks: int = 10_000,
) -> Fig2Result:
    """Count on ``networks`` random networks per distribution, draw, write and print what was found.

    Writes ``fig2.png`` into ``figures`` and ``fig2.json`` into ``results``, both made if missing.
    """
    if networks < 1:
        raise ValueError(f"networks is {networks}; expected at least 1")
    for folder in (figures, results):
        ensure_writable(folder)
    rows = [row for index in range(len(DISTRIBUTIONS)) for row in count(index, seed, networks)]
    result = Fig2Result(tuple(rows), figures / "fig2.png", results / "fig2.json")
    with atomic_write(result.figure) as path:
        path.write_bytes(draw())
    with atomic_write(result.results) as path:
        path.write_text(json.dumps(record(result, seed), indent=1, ensure_ascii=False) + "\n")
    rich.print(result)
    return result


def count(index: int, seed: int, networks: int) -> list[CaseCount]:
    """The rows of one distribution. Rank 1 is drawn too: the same networks, A's rows made proportional."""
    name, distribution = list(DISTRIBUTIONS.items())[index]
    rng = np.random.default_rng([seed, index])
    weights = distribution(rng, (networks, 6, 2))  # A, a₀, W, b
    flat = weights.astype(np.float64)
    flat[:, 1] = flat[:, 0] * rng.choice(MULTIPLES, (networks, 1))
    drawn = {rank: [_network(rows) for rows in values] for rank, values in ((2, weights), (1, flat))}
    rows = []
    for case in CASES:
        cases = [net for net in drawn[case.rank] if net.rank == case.rank and case.applies(net)]
        counts = (sorted(components(net, case.activation)) for net in cases)
        rows.append(CaseCount(case, name, networks, Counter((low, high) for low, high in counts)))
    return rows


def _network(rows: npt.NDArray[Any]) -> Network:
    a1, a2, a0, w1, w2, b = rows.tolist()
    return Network.of((a1, a2), a0, (w1, w2), b)


def draw() -> bytes:
    """Figure 2 as a PNG: EleSquare, ReLU with the same weights, and why a window is not enough."""
    figure = Figure(figsize=(8, 3.3), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
        _draw_panel(axes, panel)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    above = on_grid(panel.network, panel.activation, VIEW, 900)
    colours = ListedColormap(["#f6c777", "#a9cfe8"])  # tints of Okabe and Ito's orange and blue
    axes.imshow(above, extent=VIEW, origin="lower", cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    for x1, x2 in boundary(panel.network, panel.activation):
        axes.plot(x1, x2, color="black", linewidth=1.4)
    for name, x1, x2 in panel.names:
        axes.text(x1, x2, name, fontsize=15, ha="center", va="center")
    one, two = components(panel.network, panel.activation)
    found = f"A: {_pieces(one)}, B: {_pieces(two)}"
    if panel.window:
        left, right, low, high = panel.window
        frame = Rectangle((left, low), right - left, high - low, fill=False, linestyle="--", linewidth=1.4)
        axes.add_patch(frame)
        _, seen = window_components(panel.network, panel.activation, panel.window)
        found = f"B: {_pieces(two)}, {seen} in the window"
    axes.set_title(panel.title, fontsize=11.5, fontweight="bold", pad=20)
    axes.text(0.5, 1.03, found, transform=axes.transAxes, fontsize=9.5, ha="center", va="bottom")
    axes.set(xlim=VIEW[:2], ylim=VIEW[2:], xlabel="$x_1$", ylabel="$x_2$")
    axes.set(xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    axes.label_outer()


def _pieces(number: int) -> str:
    return f"{number} piece" if number == 1 else f"{number} pieces"


def record(result: Fig2Result, seed: int) -> dict[str, Any]:
    """What is stored: the claims, the rows behind them, and the conditions they were found under."""
    claimed = [case for case in CASES if case.allowed]
    claims = [{"case": case.name, "claim": case.claim, "holds": result.holds(case)} for case in claimed]
    rows = [
        {
            "case": row.case.name,
            "first_layer_rank": row.case.rank,
            "distribution": row.distribution,
            "drawn": row.drawn,
            "networks": row.found.total(),
            "components": {f"{low} and {high}": n for (low, high), n in sorted(row.found.items())},
        }
        for row in result.rows
    ]
    return {"figure": "fig2", "section": "3.1", "seed": seed, "claims": claims, "rows": rows, **conditions()}
