"""The functions beside the limit of the memory, by ``deepsquare bench ops``: tables, and a roofline as a image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from markupsafe import Markup

from deepsquare.paper.report.svg import add, markup, text
from deepsquare.results import Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320, 190, 34, 8, 8, 34
TITLES = {
    "square_pooling": "Square-Pooling",
    "square_excitation": "Square-Excitation",
    "square_excitation_add_relu": "Square-Excitation + residual, ReLU",
    "relu_square": "ReLU-Square",
}
MAPS = {
    "square_pooling": 1,
    "square_excitation": 2,
    "square_excitation_add_relu": 3,
    "relu_square": 2,
}  # moved, at least


@dataclass(frozen=True)
class OpTimes:
    """A function in one layout and type, on each map."""

    function: str
    layout: str
    dtype: str
    row: Row

    @property
    def title(self) -> str:
        """For a reader."""
        return TITLES[self.function]

    @property
    def maps(self) -> Mapping[str, Any]:
        """What was measured, by map."""
        return self.row.metrics

    @property
    def kinds(self) -> list[str]:
        """Of passes: forward, and with its gradient."""
        return [name for name, found in next(iter(self.maps.values())).items() if isinstance(found, Mapping)]

    @property
    def others(self) -> list[str]:
        """What ours is compared with."""
        first = next(iter(self.maps.values()))[self.kinds[0]]
        return [name.removesuffix(" / ours") for name in first if name.endswith(" / ours")]

    def memory(self, case: str, who: str) -> float:
        """What the forward pass allocates, in maps."""
        found = self.maps[case]
        return float(found[self.kinds[0]]["allocated"][who] / found["bytes"])


def measured(rows: Sequence[Row]) -> list[OpTimes]:
    """The last measurement of each function, layout and type."""
    found = {}
    for row in sorted(rows, key=lambda row: row.date):
        if row.experiment == "bench" and row.row.startswith("ops/"):
            _, function, layout, dtype = row.row.split("/")
            found[row.row] = OpTimes(function, layout, dtype, row)
    return sorted(found.values(), key=lambda m: (list(TITLES).index(m.function), m.dtype != "float32"))


def rooflines(found: Sequence[OpTimes]) -> list[tuple[str, Markup]]:
    """For each function: how many bytes a second it moves, over the size of the map, under the roof of the limit."""
    return [(m.title, _roofline(m)) for m in found if (m.layout, m.dtype) == ("contiguous", "float32")]


def _roofline(found: OpTimes) -> Markup:
    points: dict[str, list[tuple[float, float]]] = {"limit": [], "ours": [], "compiled": [], "formula": []}
    by_size = {case["bytes"]: case for case in reversed(list(found.maps.values()))}  # of one size, the first
    for case in (by_size[size] for size in sorted(by_size)):
        size, times = case["bytes"], case[found.kinds[0]]
        moved, own = MAPS[found.function] * size / 1e9, times["seconds"][0]
        seconds = {"limit": times["limit"][0], "ours": own}
        seconds |= {name: own * times[f"{name} / ours"][0] for name in ("compiled", "formula")}
        for name, value in seconds.items():
            points[name].append((size, moved / value))
    sizes = [size for size, _ in points["ours"]]
    speeds = [speed for line in points.values() for _, speed in line]
    left, right = math.log2(min(sizes)) - 0.5, math.log2(max(sizes)) + 0.5
    low, high = math.floor(math.log2(min(speeds))), math.ceil(math.log2(max(speeds)))

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(size) - left) / (right - left)

    def y(speed: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log2(speed) - low) / (high - low)

    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"})
    last = {name: f"{line[-1][1]:.0f} GB/s" for name, line in points.items()}
    svg.set("aria-label", f"{found.title}, on the largest map: " + ", ".join(f"{n} {v}" for n, v in last.items()))
    for power in range(low, high + 1):
        add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(2**power), y2=y(2**power), class_="grid")
        text(svg, f"{2**power:g}", x=LEFT - 5, y=y(2**power) + 4, text_anchor="end", class_="tick")
    for power in range(math.ceil(left), math.floor(right) + 1):
        if power % 3 == 2:  # 256 KiB, 2 MiB, 16 MiB, 128 MiB
            label = f"{2 ** (power - 20):g} MB" if power >= 20 else f"{2 ** (power - 10):g} kB"
            text(svg, label, x=x(2**power), y=HEIGHT - BOTTOM + 15, text_anchor="middle", class_="tick")
    text(svg, "size of the map; GB/s", x=LEFT, y=HEIGHT - 4, class_="tick")
    for name, line in points.items():
        path = " ".join(f"{x(size):.1f},{y(speed):.1f}" for size, speed in line)
        add(svg, "polyline", points=path, class_=f"speed {name}")
        for size, speed in line if name == "ours" else ():
            add(svg, "circle", cx=x(size), cy=y(speed), r=2.6, class_="end")
    return markup(svg)
