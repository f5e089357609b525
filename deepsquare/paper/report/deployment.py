"""Deployed networks: how they differ from their models, what eight bits cost, and how long a image takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from markupsafe import Markup

from deepsquare.paper.report.baselines import NAMES
from deepsquare.paper.report.curves import number
from deepsquare.paper.report.svg import add, markup, text
from deepsquare.results import Row

WIDTH, LEFT, RIGHT, TOP, BOTTOM, LINE = 320, 128, 10, 6, 36, 19
RUNTIMES = {"onnx": "onnxruntime", "executorch": "ExecuTorch"}
PLAIN = {"": "plain", "again": "plain, again"}
MARGIN = 0.01  # that a ratio's axis has at its ends


def title(spec: str) -> str:
    """What a network has, for a reader."""
    return PLAIN.get(spec) or " & ".join(NAMES.get(word, word) for word in spec.split("+"))


@dataclass(frozen=True)
class Parity:
    """A model in each runtime: the largest difference over its specs, and what was refused."""

    name: str
    specs: int
    fp32_error: float | None  # the largest of PyTorch's own float32
    max_rel_error: Mapping[str, float]  # by runtime
    top1_agreement: Mapping[str, float]  # the least
    undelegated_muls: int
    refused: Sequence[str]


@dataclass(frozen=True)
class Quantised:
    """A trained network's accuracy in per cent, in float32 and in int8 by runtime."""

    name: str
    seed: int
    float32: float
    int8: Mapping[str, float]
    overflows: int  # images without finite logits, in float32


@dataclass(frozen=True)
class Timed:
    """A backbone in one runtime and precision: by spec what was measured, the plain network first."""

    runtime: str
    precision: str
    specs: Mapping[str, Mapping[str, Any]]
    rounds: int

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{RUNTIMES[self.runtime]}, {self.precision}"

    @property
    def threads(self) -> list[str]:
        """The numbers of threads."""
        return [name for name in next(iter(self.specs.values())) if name.isdigit()]


def parities(rows: Sequence[Row]) -> list[Parity]:
    """By model, the peers apart."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.experiment == "parity":
            name, _, spec = row.row.partition("+")
            groups.setdefault(row.row if spec and not _ours(spec) else name, []).append(row)
    found = []
    for name, mine in groups.items():
        made = [row for row in mine if not row.metrics["refused"]]
        by_runtime = {kind: [row.metrics for row in made if row.recipe["runtime"] == kind] for kind in RUNTIMES}
        found.append(
            Parity(
                name,
                len({row.row for row in mine}),
                max((row.metrics["fp32_error"] for row in made), default=None),
                {kind: max(m["max_rel_error"] for m in own) for kind, own in by_runtime.items() if own},
                {kind: min(m["top1_agreement"] for m in own) for kind, own in by_runtime.items() if own},
                sum(row.metrics["undelegated_muls"] for row in made),
                [f"{RUNTIMES[row.recipe['runtime']]}: {row.metrics['refused']}" for row in mine if row not in made],
            )
        )
    return found


def _ours(spec: str) -> bool:
    return set(spec.split("+")) <= {"pooling", "softmin", "excitation", "encoding"}


def quantised(rows: Sequence[Row]) -> list[Quantised]:
    """By network, those that were measured in float32 and in int8."""
    groups: dict[tuple[str, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row.experiment == "int8":
            way = (row.recipe["runtime"], row.recipe["precision"])
            groups.setdefault((row.row, row.seed), {})[way] = row
    return [
        Quantised(
            name,
            seed,
            100 * ways["onnx", "float32"].metrics["accuracy"],
            {kind: 100 * ways[kind, "int8"].metrics["accuracy"] for kind in RUNTIMES if (kind, "int8") in ways},
            ways["onnx", "float32"].metrics["overflows"],
        )
        for (name, seed), ways in sorted(groups.items(), key=lambda item: (item[0][0].partition("+")[0], item[0]))
        if ("onnx", "float32") in ways
    ]


def timed(rows: Sequence[Row]) -> dict[str, list[Timed]]:
    """By backbone, the last measurement of each runtime and precision."""
    last: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.date):
        if row.experiment == "bench" and row.row.startswith("deploy/"):
            last[row.row] = row
    found: dict[str, list[Timed]] = {}
    for name, row in last.items():
        backbone, runtime, precision = name.removeprefix("deploy/").rsplit("/", 2)
        found.setdefault(backbone, []).append(Timed(runtime, precision, row.metrics, row.recipe["rounds"]))
    return {name: sorted(ways, key=lambda way: list(RUNTIMES).index(way.runtime)) for name, ways in found.items()}


def latencies(ways: Sequence[Timed]) -> list[tuple[str, Markup]]:
    """For each runtime and precision: the time of each network relative to the plain one, with its interval."""
    ratios = [found[threads]["ratio"] for way in ways for found in way.specs.values() for threads in way.threads]
    low = min(0.98, min(ratio[1] for ratio in ratios) - MARGIN)
    high = max(1.05, max(ratio[2] for ratio in ratios) + MARGIN)
    return [(way.name, _latency(way, low, high)) for way in ways]


def _latency(way: Timed, low: float, high: float) -> Markup:
    specs = way.specs
    height = TOP + LINE * len(specs) + BOTTOM

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (ratio - low) / (high - low)

    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {height}", "role": "img"})
    said = (f"{title(spec)} {100 * found[way.threads[0]]['ratio'][0] - 100:+.1f}%" for spec, found in specs.items())
    svg.set("aria-label", f"{way.name}, time added with one thread: " + ", ".join(said))
    step = next(step for step in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2) if (high - low) / step <= 6)
    for tick in range(math.ceil((low - 1) / step), math.floor((high - 1) / step) + 1):
        at = x(1 + tick * step)
        add(svg, "line", x1=at, x2=at, y1=TOP, y2=height - BOTTOM, class_="grid" if tick else "zero")
        label = f"{number(100 * tick * step, 0)}%"
        text(svg, label, x=at, y=height - BOTTOM + 15, text_anchor="middle", class_="tick")
    text(
        svg, "time added to that of the plain network", x=WIDTH - RIGHT, y=height - 5, text_anchor="end", class_="tick"
    )
    for place, (spec, found) in enumerate(specs.items()):
        middle = TOP + LINE * (place + 0.5)
        text(svg, PLAIN.get(spec, spec), x=LEFT - 6, y=middle + 4, text_anchor="end", class_="name")
        for lane, threads in enumerate(way.threads):
            (value, lowest, highest), at = found[threads]["ratio"], middle + 6 * (lane - (len(way.threads) - 1) / 2)
            style = f"s{lane}"
            add(svg, "line", x1=x(lowest), x2=x(highest), y1=at, y2=at, class_=f"whisker {style}")
            add(svg, "circle", cx=x(value), cy=at, r=2.8, class_=f"dot {style}")
    return markup(svg)
