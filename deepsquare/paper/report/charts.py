"""The static charts of the page, drawn by matplotlib as inline SVG.

Colors are CSS variables of ``style.css``, so that each chart follows the page's light or dark mode.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from deepsquare.paper.report.bench import PLAIN, bandwidths, on_cpu_in_float32, spec_title
from deepsquare.paper.report.evidence import RowFindings, Schedule, ScheduleResult, TableFindings
from deepsquare.paper.statistics import Median
from deepsquare.paper.tables import TABLE_5, TABLE_6, PaperRow

# matplotlib needs real colors: each of these is replaced in the SVG by a variable of style.css.
NAMES = ("ink", "quiet", "line", "paper", "claim", "bad", "band", "s0", "s1", "s2")
VARIABLES = {f"#abcde{digit}": f"var(--{name})" for digit, name in enumerate(NAMES)}
INK, QUIET, GRID, PAPER, CLAIM, BAD, BAND, *SERIES = VARIABLES
LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "font.size": 11,
    "text.color": INK,
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor", "legend.labelcolor"), QUIET),
    **dict.fromkeys(("xtick.bottom", "ytick.left", "legend.frameon"), False),
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "axes.grid": True,
    "grid.color": GRID,
    "lines.solid_capstyle": "butt",
    "lines.linewidth": 1.6,
    **dict.fromkeys(("legend.borderpad", "legend.borderaxespad"), 0),
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.4,
}
Pair = tuple[float, float]
REACH = 2.0  # points beyond the paper's claims: our results farther out are arrows at the edge
DIAMOND: dict[str, Any] = {
    "color": CLAIM,
    "marker": "D",
    "linestyle": "none",
    "markerfacecolor": PAPER,
    "markeredgewidth": 2,
}
LANE = 12  # height of a marker of the forest chart, in pixels


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign, with a typographic minus; a rounded zero has none."""
    text = f"{value:+.{digits}f}"
    return (text[1:] if float(text) == 0 else text).replace("-", "−")


def draw_svg(
    size: Pair, margins: tuple[Pair, Pair], name: str, description: str, plot: Callable[[Axes], None]
) -> Markup:
    """Draw one chart as inline SVG.

    Args:
        size: width and height in pixels.
        margins: (left, right) and (bottom, top) of the axes, in pixels.
        name: unique on the page; the ids within the SVG depend on it.
        description: read by screen readers in place of the chart.
        plot: draws on the axes.
    """
    (width, height), ((left, right), (bottom, top)) = size, margins
    area = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    with rc_context(LOOK | {"svg.hashsalt": name}):
        figure = Figure((width / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        axes = figure.add_axes(area)
        axes.patch.set_visible(False)
        plot(axes)
        for line in (*axes.get_xgridlines(), *axes.get_ygridlines()):
            line.set_clip_on(False)
        file = io.StringIO()
        figure.savefig(file, format="svg")
    _, start, svg = file.getvalue().removesuffix("</svg>\n").partition('<g id="figure_1">')  # cut header and metadata
    svg = re.sub(r' id="[A-Za-z.\d]+_\d+"| transform="rotate\(-0 [^"]*"|font-family: [^;"]*; ', "", start + svg)
    svg = re.sub(r' [dxy]="[^"]*', lambda attribute: re.sub(r"(\.\d)\d+", r"\1", attribute[0]), svg)
    svg = re.sub(r"\s+", " ", svg).replace("> <", "><").replace("xlink:href", "href")
    svg = re.sub("|".join(VARIABLES), lambda color: VARIABLES[color[0]], svg)
    opening = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, description)
    return opening + Markup(svg) + Markup("</svg>")


def _series_style(series: int, scale: float = 1) -> dict[str, Any]:
    """A line with round markers, which are filled for the first series."""
    color = SERIES[min(series, 2)]
    marker = {"marker": "o", "markersize": 6 * scale, "markeredgewidth": 2 * scale}
    fill = color if series == 0 else PAPER
    return {"color": color, "linewidth": 2 * scale, "markerfacecolor": fill, "clip_on": False, **marker}


def _plot_interval(axes: Axes, y: float, estimate: Sequence[float], series: int, scale: float = 1) -> None:
    """Plot (value, low, high): a marker, if the value lies on the axis, and a line, if the interval is finite."""
    value, low, high = estimate
    left, right = axes.get_xlim()
    style = _series_style(series, scale)
    if math.isfinite(high - low):
        axes.plot([min(max(end, left), right) for end in (low, high)], [y, y], **style | {"marker": ""})
    if left <= value <= right:
        axes.plot(value, y, **style)


def _reference_line(axes: Axes, x: float, tick_label: Callable[[float], str]) -> None:
    """A vertical line at ``x``, and round ticks without horizontal grid lines."""
    axes.axvline(x, color=QUIET, linewidth=1.2)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))


def _legend(axes: Axes, styles: Mapping[str, dict[str, Any]], columns: int = 4) -> None:
    """A legend at the top of the figure; ``styles`` are the keywords of a line by label."""
    lines = [axes.plot([], [], label=label, **style)[0] for label, style in styles.items()]
    axes.figure.legend(handles=lines, loc="upper left", bbox_to_anchor=(0, 0.99), ncols=min(len(lines), columns))


def forest(findings: TableFindings) -> Markup | None:
    """The improvements of a table, the paper's and ours with intervals; None where we have none."""
    rows = [row for row in findings.rows if not row.is_base]
    ours = [result.improvement for row in rows for result in row.results.values() if result.improvement]
    if not ours:
        return None
    schedules = list(reversed(findings.schedules))
    claims = [row.claim for row in rows if row.claim is not None]
    low, high = _limits(claims, [end for i in ours for end in ((i.low, i.high) if i.bounded else (i.mean,))])
    row_height = LANE * (len(schedules) + 1) + 8
    legend_height = 12 + 16 * math.ceil((1 + len(schedules)) / 3)
    size = (440, row_height * len(rows) + 38 + legend_height)

    def plot(axes: Axes) -> None:
        axes.set(xlim=(low, high), ylim=(row_height * len(rows), 0), xlabel="points")
        _reference_line(axes, 0, lambda points: signed(points, 0 if high - low > 6 else 1))
        tops = [row_height * k for k in range(len(rows))]
        axes.hlines(tops[1:], -0.28, 1, GRID, transform=axes.get_yaxis_transform(), linewidth=1, clip_on=False)
        axes.set_yticks([top + row_height / 2 for top in tops], [row.entry.label for row in rows], color=INK)
        for row, top in zip(rows, tops, strict=True):
            _forest_row(axes, row, schedules, top + 4 + LANE / 2)
        _legend(axes, {"paper": DIAMOND} | {s.label: _series_style(k) for k, s in enumerate(schedules)}, columns=3)

    def describe(row: RowFindings) -> str:
        means = [(s.name, row.results[s].improvement) for s in schedules if s in row.results]
        paper = f"paper {signed(row.claim)}" if row.claim is not None else "paper: divergence"
        return ", ".join([f"{row.entry.label}: {paper}", *(f"{name} {signed(i.mean)}" for name, i in means if i)])

    description = "; ".join(map(describe, rows))
    return draw_svg(size, ((102, 10), (38, legend_height)), f"forest {findings.table.number}", description, plot)


def _limits(claims: Sequence[float], ours: Sequence[float]) -> Pair:
    """The ends of an axis that has 0, the paper's claims and our results within REACH of them."""
    lowest, highest = min([0, *claims]) - REACH, max([0, *claims]) + REACH
    values = [0, *claims, *(min(max(value, lowest), highest) for value in ours)]
    margin = 0.04 * (max(values) - min(values)) + 0.1
    return min(values) - margin, max(values) + margin


def _forest_row(axes: Axes, row: RowFindings, schedules: Sequence[Schedule], y: float) -> None:
    low, high = axes.get_xlim()

    def beside_zero(text: str, y: float, color: str) -> None:
        side = -1 if -low > high else 1  # that has more room
        style: dict[str, Any] = {"ha": "right" if side < 0 else "left", "va": "center", "color": color}
        axes.annotate(text, (0, y), (6 * side, 0), textcoords="offset points", **style)

    if row.claim is None:
        beside_zero("paper: divergence", y, CLAIM)
    else:
        axes.plot(row.claim, y, **DIAMOND)
    for series, schedule in enumerate(schedules):
        y += LANE
        result = row.results.get(schedule)
        improvement = result.improvement if result else None
        if result and improvement is None:
            beside_zero("diverged" if result.diverged else "no pair yet", y, QUIET)
        elif improvement:
            _plot_interval(axes, y, (improvement.mean, improvement.low, improvement.high), series)
            if not low <= improvement.mean <= high:
                right = improvement.mean > high
                text = f"{signed(improvement.mean, 1)} ▶" if right else f"◀ {signed(improvement.mean, 1)}"
                style: dict[str, Any] = {"color": SERIES[0] if series == 0 else QUIET, "va": "center"}
                style["bbox"] = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
                axes.text(high if right else low, y, text, ha="right" if right else "left", **style)


def learning_curves(findings: TableFindings) -> list[tuple[Schedule, list[tuple[str, str, Markup]]]]:
    """Test accuracy by epoch, by schedule from the longest: a panel (label, note, chart) for each row and its base."""
    charts = []
    for schedule in reversed(findings.schedules):
        results = [(row, row.results[schedule]) for row in findings.rows if schedule in row.results]
        base = {row.entry.model: result for row, result in results if row.is_base}
        limits = _curve_limits(results, schedule.epochs)
        panels = []
        for row, result in results:
            if any(run.curve for run in result.runs):
                note = f"{result.diverged} of {len(result.runs)} diverged" if result.diverged else ""
                label, reference = row.entry.label, None if row.is_base else base.get(row.entry.model)
                name = f"table {findings.table.number}, {schedule.label}, {label}"
                panels.append((label, note, _learning_curve(name, label, result, reference, schedule.epochs, limits)))
        if panels:
            charts.append((schedule, panels))
    return charts


def _curve_limits(results: Sequence[tuple[RowFindings, ScheduleResult]], epochs: int) -> Pair:
    """Round numbers around the base's curve except its first tenth, and around the end of every other curve."""
    values: list[float] = []
    for row, result in results:
        curve = [point.mean for point in result.mean_curve]
        values += curve[min(epochs // 10, len(curve) - 1) :] if row.is_base else curve[-1:]
    low, high = 10 * math.floor(min(values, default=0) / 10), 5 * math.ceil(max(values, default=100) / 5)
    return low, high if high > low else low + 10


def _learning_curve(
    name: str, label: str, result: ScheduleResult, base: ScheduleResult | None, epochs: int, limits: Pair
) -> Markup:
    mean = result.mean_curve
    low, high = limits

    def plot(axes: Axes) -> None:
        axes.set(xlim=(1, max(epochs, 2)), ylim=limits)
        axes.grid(axis="x", visible=False)
        axes.set_yticks(sorted({low, 5 * round((low + high) / 10), high}))
        axes.set_xticks(sorted({1, epochs}), ["epoch 1", str(epochs)][: 1 + (epochs > 1)])
        axes.get_xticklabels()[0].set_horizontalalignment("left")
        axes.get_xticklabels()[-1].set_horizontalalignment("right" if epochs > 1 else "left")
        lower, upper = ([getattr(point, end) for point in mean] for end in ("low", "high"))
        bounded = [point.bounded for point in mean]
        axes.fill_between(range(1, len(mean) + 1), lower, upper, where=bounded, color=BAND, linewidth=0)
        if base:
            curve = [point.mean for point in base.mean_curve]
            axes.plot(range(1, len(curve) + 1), curve, color=QUIET, linewidth=1.3, dashes=(3, 2.3))
        for run in result.runs:
            reached = [value for value in run.curve if math.isfinite(value)]
            if run.diverged and reached:
                axes.plot(range(1, len(reached) + 1), reached, color=BAD, linewidth=1.2)
                axes.plot(len(reached), max(reached[-1], low), "x", color=BAD, clip_on=False)
        if mean:
            axes.plot(range(1, len(mean) + 1), [point.mean for point in mean], color=SERIES[0], linewidth=1.8)
            axes.plot(len(mean), mean[-1].mean, "o", color=SERIES[0], markersize=5, clip_on=False)

    last = f"{mean[-1].mean:.2f}%" if mean else "no run left"
    description = f"{label}: test accuracy over {epochs} epochs, at the end {last}"
    return draw_svg((180, 124), ((24, 6), (18, 7)), name, description, plot)


def rooflines(functions: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """For each function in float32: GB/s over the size of the map, with the limit as the roof."""
    return [(op["title"], _roofline(op)) for op in on_cpu_in_float32(functions)]


def _roofline(op: Mapping[str, Any]) -> Markup:
    points = bandwidths(op)
    styles: dict[str, dict[str, Any]] = {
        "limit": {"color": CLAIM},
        "ours": {"color": SERIES[0], "marker": "o", "markersize": 4.5},
        "compiled": {"color": SERIES[2], "linewidth": 1},
        "formula": {"color": SERIES[2], "dashes": (2.5, 1.9)},
    }

    def plot(axes: Axes) -> None:
        sizes = [size for size, _ in points["ours"]]
        powers = [math.log2(speed) for line in points.values() for _, speed in line]
        low, high = math.floor(min(powers)), math.ceil(max(powers))
        axes.loglog(base=2)
        axes.minorticks_off()
        left, right = min(sizes) / 1.5, max(sizes) * 1.5
        axes.set(xlim=(left, right), ylim=(2.0**low, 2.0**high), xlabel="GB/s over the size of the map")
        axes.grid(axis="x", visible=False)
        axes.set_yticks([2.0**k for k in range(low, high + 1)], [f"{2.0**k:g}" for k in range(low, high + 1)])
        megabytes = [m for m in (0.125, 1, 8, 64, 512) if left <= m * 2**20 <= right]
        axes.set_xticks([m * 2**20 for m in megabytes], [f"{m:g} MB" for m in megabytes])
        for name, line in points.items():
            axes.plot(*zip(*line, strict=True), clip_on=False, **styles[name])
        _legend(axes, styles)

    speeds = ", ".join(f"{name} {line[-1][1]:.0f} GB/s" for name, line in points.items())
    name, description = f"roofline {op['function']}", f"{op['title']}, on the largest map: {speeds}"
    return draw_svg((320, 206), ((34, 8), (34, 26)), name, description, plot)


def accuracy_against_time(run: Mapping[str, Any] | None) -> Markup | None:
    """Table 6: the paper's accuracy over the time that one run on ResNet50 measured for one image."""
    if run is None:
        return None
    plain = next(entry for entry in TABLE_5.entries if entry.spec == "")
    measured = {spec: next(iter(measured["times"].values())) for spec, measured in run["specs"].items()}
    points: list[tuple[PaperRow, Median]] = [(plain, Median(1, 1, 1))]
    points += [(entry, measured[entry.spec]) for entry in TABLE_6.entries]

    def plot(axes: Axes) -> None:
        longest = max(time.high for _, time in points)
        accuracies = [entry.top1 for entry, _ in points if entry.top1 is not None]
        axes.set(xlim=(0.9, max(longest, 1.5)), ylim=(int(min(accuracies)), int(max(accuracies)) + 1))
        axes.set_xlabel("time of one image, relative to ResNet50", loc="left")
        axes.xaxis.set_major_locator(MultipleLocator(0.5 if longest < 4 else 1))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.yaxis.set_major_locator(MultipleLocator(1))
        axes.axvline(1, color=QUIET, linewidth=1.2)
        for entry, time in points:
            assert entry.top1 is not None
            ours = entry.spec == "pooling+excitation"
            _plot_interval(axes, entry.top1, time, series=0 if ours else 1)
            label = "ResNet50" if entry is plain else entry.label
            style: dict[str, Any] = {"color": SERIES[0], "weight": "bold"} if ours else {}
            axes.annotate(label, (time.high, entry.top1), (9, 0), textcoords="offset points", va="center", **style)

    description = "; ".join(f"{e.label}: {e.top1}% at {t.value:.2f} times the time" for e, t in points)
    return draw_svg((440, 280), ((26, 80), (36, 12)), "accuracy against time", description, plot)


def latency_charts(backbone: str, measured: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """For each runtime and precision: the time of each network relative to the plain one, with its interval."""
    ratios = [times[n]["ratio"] for group in measured for times in group["specs"].values() for n in group["threads"]]
    limits = (min(0.98, min(r[1] for r in ratios) - 0.01), max(1.05, max(r[2] for r in ratios) + 0.01))
    return [(group["title"], _latency_chart(backbone, group, limits)) for group in measured]


def _latency_chart(backbone: str, latencies: Mapping[str, Any], limits: Pair) -> Markup:
    specs, threads, label = latencies["specs"], latencies["threads"], latencies["title"]
    size = (320, 19 * len(specs) + 60)

    def plot(axes: Axes) -> None:
        axes.set(xlim=limits, ylim=(len(specs) - 0.5, -0.5))
        axes.set_xlabel("time added to that of the plain network", loc="right")
        _reference_line(axes, 1, lambda ratio: f"{signed(100 * ratio - 100, 0)}%")
        axes.set_yticks(range(len(specs)), [PLAIN.get(spec, spec) for spec in specs], color=INK)
        for y, times in enumerate(specs.values()):
            for lane, n in enumerate(threads):
                _plot_interval(axes, y + 0.34 * (lane - (len(threads) - 1) / 2), times[n]["ratio"], lane, scale=0.75)
        labels = [f"{n} thread{'s' if n != '1' else ''}" for n in threads]
        _legend(axes, {label: _series_style(lane, 0.75) for lane, label in enumerate(labels)})

    added = (f"{spec_title(spec)} {100 * times[threads[0]]['ratio'][0] - 100:+.1f}%" for spec, times in specs.items())
    description = f"{label}, time added with one thread: {', '.join(added)}"
    return draw_svg(size, ((128, 10), (36, 24)), f"{backbone}, {label}", description, plot)
