"""The charts of Tables 2 and 3.

The forest chart is one small SVG a row, its x in per cent, so that it fits any width with text of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from markupsafe import Markup

from deepsquare.paper.report.evidence import Findings, Line, Result, Schedule
from deepsquare.paper.report.svg import add, markup, text
from deepsquare.paper.statistics import Interval, interval

LANE = 12  # pixels a marker
REACH = 2.0  # points beyond the paper's claims: what of ours lies farther out is an arrow at the edge
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 180, 124, 24, 18, 6, 6  # of a panel of learning curves


def number(value: float, digits: int = 2) -> str:
    """With a sign, and a minus that is one."""
    shown = f"{value:+.{digits}f}"
    return (shown[1:] if float(shown) == 0 else shown).replace("-", "−")


@dataclass(frozen=True)
class Scale:
    """From points to per cent of the width, with round ticks."""

    low: float
    high: float

    @classmethod
    def over(cls, claims: Sequence[float], ours: Sequence[float]) -> Scale:
        """A scale for the paper's claims and for ours, but for those that lie far out."""
        least, most = min(0, *claims) - REACH, max(0, *claims) + REACH
        shown = [0, *claims, *(min(max(value, least), most) for value in ours)]
        margin = 0.04 * (max(shown) - min(shown)) + 0.1
        return cls(min(shown) - margin, max(shown) + margin)

    def __call__(self, value: float) -> float:
        """The place of ``value``, at most at an edge."""
        return 100 * min(max((value - self.low) / (self.high - self.low), 0), 1)

    @property
    def ticks(self) -> list[float]:
        """About six round values."""
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


@dataclass(frozen=True)
class Forest:
    """The rows of a forest chart (label, what it shows in words, image) and its axis."""

    rows: tuple[tuple[str, str, Markup], ...]
    axis: Markup
    schedules: tuple[Schedule, ...]  # the longest first, as in each row


def forest(findings: Findings) -> Forest | None:
    """Improvements, the paper's and ours with intervals; None where there are none of ours."""
    lines = [line for line in findings.lines if not line.is_base]
    ours = [r.improvement for line in lines for r in line.results.values() if r.improvement]
    if not ours:
        return None
    ends = [end for i in ours for end in ((i.low, i.high) if i.bounded else (i.mean,))]
    scale = Scale.over([line.claim for line in lines if line.claim is not None], ends)
    schedules = tuple(reversed(findings.schedules))
    rows = tuple((line.entry.label, _words(line, schedules), _forest_row(line, schedules, scale)) for line in lines)
    return Forest(rows, _axis(scale), schedules)


def _words(line: Line, schedules: Sequence[Schedule]) -> str:
    said = [f"paper {number(line.claim)}" if line.claim is not None else "paper: divergence"]
    for schedule in schedules:
        result = line.results.get(schedule)
        if result and result.improvement:
            said.append(f"{schedule.name} {number(result.improvement.mean)}")
    return f"{line.entry.label}: {', '.join(said)}"


def _forest_row(line: Line, schedules: Sequence[Schedule], scale: Scale) -> Markup:
    height = LANE * (len(schedules) + 1) + 8
    svg = Element("svg", {"width": "100%", "height": str(height), "aria-hidden": "true"})
    for tick in scale.ticks:
        x = f"{scale(tick):.2f}%"
        add(svg, "line", x1=x, x2=x, y1=0, y2=height, class_="zero" if tick == 0 else "grid")
    y = 4 + LANE / 2
    if line.claim is None:
        _beside_zero(svg, "paper: divergence", scale, y, "paper-text")
    else:
        marker = add(svg, "svg", x=f"{scale(line.claim):.2f}%", y=y, overflow="visible")
        add(marker, "path", d="M-5.5,0L0,-5.5L5.5,0L0,5.5Z", class_="paper")
    for place, schedule in enumerate(schedules):
        y += LANE
        result = line.results.get(schedule)
        if result:
            _whisker(svg, result, scale, y, f"s{min(place, 2)}")
    return markup(svg)


def _whisker(svg: Element, result: Result, scale: Scale, y: float, style: str) -> None:
    found = result.improvement
    if found is None:
        _beside_zero(svg, "diverged" if result.diverged else "no pair yet", scale, y, "quiet")
        return
    if found.bounded:
        ends = {"x1": f"{scale(found.low):.2f}%", "x2": f"{scale(found.high):.2f}%"}
        add(svg, "line", **ends, y1=y, y2=y, class_=f"whisker {style}")
    x = f"{scale(found.mean):.2f}%"
    if scale.low <= found.mean <= scale.high:
        add(svg, "circle", cx=x, cy=y, r=4.5 if style == "s0" else 3.5, class_=f"dot {style}")
        return
    right = found.mean > scale.high
    anchor, arrow = ("end", f"{number(found.mean, 1)} ▶") if right else ("start", f"◀ {number(found.mean, 1)}")
    text(svg, arrow, x=x, y=y + 4, text_anchor=anchor, class_=f"far {style}")


def _beside_zero(svg: Element, words: str, scale: Scale, y: float, style: str) -> None:
    """Words in place of a marker, on the side of 0 that has more room."""
    anchor, dx = ("end", -6) if scale(0) > 50 else ("start", 6)
    text(svg, words, x=f"{scale(0):.2f}%", dx=dx, y=y + 4, text_anchor=anchor, class_=style)


def _axis(scale: Scale) -> Markup:
    svg = Element("svg", {"width": "100%", "height": "20", "aria-hidden": "true"})
    digits = 0 if all(tick == round(tick) for tick in scale.ticks) else 1
    for tick in scale.ticks:
        x = scale(tick)
        anchor = "start" if x < 4 else "end" if x > 96 else "middle"
        text(svg, number(tick, digits), x=f"{x:.2f}%", y=14, text_anchor=anchor, class_="tick")
    return markup(svg)


@dataclass(frozen=True)
class Curves:
    """The panels of one schedule: label, what is missing, image."""

    schedule: Schedule
    panels: tuple[tuple[str, str, Markup], ...]


def learning_curves(findings: Findings) -> list[Curves]:
    """Test accuracy by epoch, a panel for each row beside its base model; the longest schedule first."""
    charts = []
    for schedule in reversed(findings.schedules):
        base = {line.entry.model: line.results.get(schedule) for line in findings.lines if line.is_base}
        low, high = _range(findings.lines, schedule)
        panels = []
        for line in findings.lines:
            result = line.results.get(schedule)
            if result and any(run.curve for run in result.runs):
                beside = None if line.is_base else base.get(line.entry.model)
                note = f"{result.diverged} of {len(result.runs)} diverged" if result.diverged else ""
                label = line.entry.label
                panels.append((label, note, _panel(label, result, beside, schedule.epochs, low, high)))
        if panels:
            charts.append(Curves(schedule, tuple(panels)))
    return charts


def mean_curve(result: Result | None) -> list[Interval]:
    """The mean of the runs that did not diverge, epoch by epoch."""
    curves = [run.curve for run in result.runs if not run.diverged] if result else []
    length = max(map(len, curves), default=0)
    at = [interval([c[k] for c in curves if len(c) > k and math.isfinite(c[k])]) for k in range(length)]
    return [mean for mean in at if mean]


def _range(lines: Sequence[Line], schedule: Schedule) -> tuple[float, float]:
    """Round numbers around the base's curve but for its first tenth, and around the end of every other."""
    shown: list[float] = []
    for line in lines:
        curve = [point.mean for point in mean_curve(line.results.get(schedule))]
        shown += curve[min(schedule.epochs // 10, len(curve) - 1) :] if line.is_base else curve[-1:]
    low, high = 10 * math.floor(min(shown, default=0) / 10), 5 * math.ceil(max(shown, default=100) / 5)
    return low, high if high > low else low + 10


def _panel(label: str, result: Result, base: Result | None, epochs: int, low: float, high: float) -> Markup:
    mean = mean_curve(result)
    last = f"{mean[-1].mean:.2f}%" if mean else "no run left"
    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"})
    svg.set("aria-label", f"{label}: test accuracy over {epochs} epochs, at the end {last}")

    def x(epoch: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (epoch - 1) / max(epochs - 1, 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - low) / (high - low)

    def points(values: Sequence[float]) -> str:
        return " ".join(f"{x(k):.1f},{y(value):.1f}" for k, value in enumerate(values, 1) if math.isfinite(value))

    for tick in sorted({low, 5 * round((low + high) / 10), high}):
        add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="grid")
        text(svg, f"{tick:g}", x=LEFT - 5, y=y(tick) + 3.5, text_anchor="end", class_="tick")
    for epoch in sorted({1, epochs}):
        anchor = "start" if epoch == 1 else "end"
        words = f"epoch {epoch}" if epoch == 1 else str(epoch)
        text(svg, words, x=x(epoch), y=HEIGHT - 4, text_anchor=anchor, class_="tick")
    area = {"x": LEFT, "y": TOP, "width": WIDTH - LEFT - RIGHT, "height": HEIGHT - TOP - BOTTOM}
    plot = add(svg, "svg", **area, viewBox=" ".join(map(str, area.values())))  # cuts off what lies outside
    edges = [(point.high, point.low) for point in mean if point.bounded]
    if len(edges) > 1:
        upper = points([high for high, _ in edges])
        lower = " ".join(reversed(points([low for _, low in edges]).split()))
        add(plot, "polygon", points=f"{upper} {lower}", class_="band")
    if base:
        add(plot, "polyline", points=points([point.mean for point in mean_curve(base)]), class_="base")
    for run in result.runs:
        reached = [value for value in run.curve if math.isfinite(value)] if run.diverged else []
        if reached:
            add(plot, "polyline", points=points(reached), class_="lost")
            end = min(y(reached[-1]), HEIGHT - BOTTOM) + 4
            text(svg, "×", x=x(len(reached)), y=end, text_anchor="middle", class_="lost-end")
    if mean:
        add(plot, "polyline", points=points([point.mean for point in mean]), class_="mean")
        add(svg, "circle", cx=x(len(mean)), cy=y(mean[-1].mean), r=2.5, class_="end")
    return markup(svg)
