"""The peers: what each costs beside the plain network, by ``deepsquare bench models``; and Table 6 as a image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from markupsafe import Markup

from deepsquare.cost import Cost
from deepsquare.paper.report.svg import add, markup, text
from deepsquare.paper.statistics import Median, median_ratio
from deepsquare.paper.tables import TABLE_5, TABLE_6, Entry
from deepsquare.results import Row
from deepsquare.surgery import TECHNIQUES

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 44, 110, 12, 36
NAMES = {"gsop1": "GSoP-Net1", "gsop2": "GSoP-Net2"} | {word: technique.title for word, technique in TECHNIQUES.items()}


@dataclass(frozen=True)
class SpecTimes:
    """A spec on a backbone: what it costs, what it adds, and how many times as long each kind of work takes."""

    spec: str
    cost: Cost
    base: Cost
    times: Mapping[str, Median]
    without_kernels: Mapping[str, Median]  # the same by plain operations; empty where there is no kernel

    @property
    def name(self) -> str:
        """For a reader."""
        return " & ".join(NAMES.get(word, word) for word in self.spec.split("+"))

    def added(self, what: str) -> float:
        """What it adds to the plain network, as a fraction."""
        before, after = (float(getattr(cost, what)) for cost in (self.base, self.cost))
        return after / before - 1


@dataclass(frozen=True)
class Backbone:
    """All specs that were measured on a backbone."""

    name: str
    threads: int
    specs: Mapping[str, SpecTimes]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of work."""
        return tuple(next(iter(self.specs.values())).times)


def backbones(rows: Sequence[Row]) -> dict[str, Backbone]:
    """The measurements of each backbone by spec: those at the commit of its last one, which count together."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.date):
        kind, _, name = row.row.partition("/")
        if row.experiment == "bench" and kind == "models":
            groups.setdefault(name, []).append(row)
    return {
        name: Backbone(
            name,
            of_name[-1].recipe["threads"],
            {spec: _measured(spec, of_name) for row in of_name for spec in row.metrics if spec},
        )
        for name, of_name in groups.items()
    }


def _measured(spec: str, rows: Sequence[Row]) -> SpecTimes:
    own = [row for row in rows if spec in row.metrics]
    own = [row for row in own if (row.commit, row.hardware) == (own[-1].commit, own[-1].hardware)]
    seconds = [row.metrics[spec]["seconds"] for row in own]

    def ratios(who: str) -> dict[str, Median]:
        return {
            kind: median_ratio(*([go for part in seconds for go in part[kind][of]] for of in (who, "base")))
            for kind in seconds[0]
            if who in seconds[0][kind]
        }

    base, cost = (Cost(**own[-1].metrics[name]["cost"]) for name in ("", spec))
    return SpecTimes(spec, cost, base, ratios("own"), ratios("without_kernels"))


def accuracy_against_time(resnet50: Backbone | None) -> Markup | None:
    """Table 6 as a image: the paper's accuracy over the time that we measured for a single image."""
    if resnet50 is None:
        return None
    plain = next(entry for entry in TABLE_5.entries if entry.spec == "")
    points: list[tuple[Entry, Median]] = [(plain, Median(1, 1, 1))]
    points += [
        (entry, resnet50.specs[entry.spec].times[resnet50.kinds[0]])
        for entry in TABLE_6.entries
        if entry.spec in resnet50.specs
    ]
    most = max(time.high for _, time in points)
    accuracies = [entry.top1 for entry, _ in points if entry.top1 is not None]
    low, high = int(min(accuracies)), int(max(accuracies)) + 1

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (time - 0.9) / (max(most, 1.5) - 0.9)

    def y(accuracy: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (accuracy - low) / (high - low)

    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"})
    svg.set("aria-label", "; ".join(f"{e.label}: {e.top1}% at {t.value:.2f} times the time" for e, t in points))
    for tick in range(low, high + 1):
        add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="grid")
        text(svg, str(tick), x=LEFT - 6, y=y(tick) + 4, text_anchor="end", class_="tick")
    step = 0.5 if most < 4 else 1.0
    ticks = [1 + k * step for k in range(int((most - 1) / step) + 1)]
    for value in ticks:
        add(svg, "line", x1=x(value), x2=x(value), y1=TOP, y2=HEIGHT - BOTTOM, class_="zero" if value == 1 else "grid")
        text(svg, f"{value:g}×", x=x(value), y=HEIGHT - BOTTOM + 16, text_anchor="middle", class_="tick")
    text(svg, "time of one image, relative to ResNet50", x=LEFT, y=HEIGHT - 4, class_="tick")
    for entry, time in points:
        assert entry.top1 is not None
        ours = entry.spec == "pooling+excitation"
        style = "s0" if ours else "s1"
        add(svg, "line", x1=x(time.low), x2=x(time.high), y1=y(entry.top1), y2=y(entry.top1), class_=f"whisker {style}")
        add(svg, "circle", cx=x(time.value), cy=y(entry.top1), r=5 if ours else 4, class_=f"dot {style}")
        label = "ResNet50" if entry is plain else entry.label
        text(svg, label, x=x(time.high) + 9, y=y(entry.top1) + 4, class_="name ours" if ours else "name")
    return markup(svg)
