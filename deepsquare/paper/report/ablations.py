"""The ablations of the study on CIFAR-10: tables, a figure, and sentences that follow from the rows.

Sentences and intervals are given once all seeds of the plan are there.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from deepsquare.paper.report.charts import CLAIM, INK, QUIET, SERIES, draw_svg, signed
from deepsquare.paper.statistics import Interval, paired
from deepsquare.paper.study.plan import Family, read_plan
from deepsquare.results import Row

EXPERIMENT = "cifar10_ablation"
CHANCE = 10.0  # per cent: what a diverged run counts as
BASE = "Original"
RATES = {"lr × 1/4": "× ¼", "lr × 1": "× 1", "lr × 4": "× 4"}
MATCHED = {  # each row with its matched variant
    "DeepSquare3": "Square-Pooling, matched",
    "Variant1": "Third moment, matched",
    "Variant2": "Fourth moment, matched",
    "Variant3": "Fifth moment, matched",
    "Variant4": "Sixth moment, matched",
}
BELOW_BEST = 20  # points: the lower end of the figure
SIZE, MARGINS = (640, 460), ((44, 176), (38, 12))  # of the figure, in pixels
LABEL_GAP = 15 / (460 - 38 - 12)  # between the labels of its lines, relative to the height of the axes

Accuracies = Mapping[int, float]  # in per cent, by seed


class Cells:
    """The rows of a family: accuracies by label and schedule."""

    def __init__(self, family: Family, rows: Mapping[str, Row]) -> None:
        self.family, self.runs = family, family.runs()
        self.rows: dict[tuple[str, str], dict[int, Row]] = {}
        for run in self.runs:
            if (row := rows.get(run.key)) is not None:
                self.rows.setdefault((run.row, run.schedule), {})[run.seed] = row
        self.done = sum(map(len, self.rows.values()))

    @property
    def complete(self) -> bool:
        return self.done == len(self.runs)

    @property
    def schedules(self) -> list[str]:
        return [schedule for schedule in RATES if schedule in {run.schedule for run in self.runs}]

    def accuracies(self, label: str, schedule: str) -> dict[int, float]:
        return {seed: accuracy(row) for seed, row in self.rows.get((label, schedule), {}).items()}

    def diverged(self, label: str, schedule: str) -> int:
        return sum(map(has_diverged, self.rows.get((label, schedule), {}).values()))

    def difference(self, label: str, base: str, schedule: str) -> Interval | None:
        """The paired difference, once all seeds are there."""
        values, reference = self.accuracies(label, schedule), self.accuracies(base, schedule)
        return paired(values, reference) if len(values.keys() & reference.keys()) == self.family.seeds else None

    def best(self, label: str) -> str:
        """The schedule with the highest mean."""
        return max(self.schedules, key=lambda schedule: fmean(self.accuracies(label, schedule).values()))


def has_diverged(row: Row) -> bool:
    """Whether the run diverged, perhaps before its first evaluation."""
    return bool(row.metrics["diverged"]) or row.metrics["accuracy"] is None


def accuracy(row: Row) -> float:
    """In per cent; chance for a diverged run, which is the worst outcome and not a missing one."""
    return CHANCE if has_diverged(row) else 100 * float(row.metrics["accuracy"])


def ablations(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The experiments of which rows came in: title, question, table, sentences and, for the scale, a figure."""
    families = {family.name: family for family in read_plan().family if family.experiment == EXPERIMENT}
    by_key = {row.key: row for row in rows if row.experiment == EXPERIMENT}
    sections = []
    for name, (title, question, describe) in _SECTIONS.items():
        cells = Cells(families[name], by_key)
        if cells.done:
            section = {"title": title, "question": question, "done": cells.done, "planned": len(cells.runs)}
            sections.append({"chart": None, **section, **describe(cells)})
    return sections


def format_difference(difference: Interval | None) -> str:
    """The mean and, if there are several seeds, the interval; a dash for None."""
    if difference is None:
        return "–"
    bounds = f" [{signed(difference.low)}, {signed(difference.high)}]" if difference.bounded else ""
    return signed(difference.mean) + bounds


def _mean(values: Accuracies) -> str:
    return f"{fmean(values.values()):.2f}" if values else "–"


def _range(cells: Cells, label: str, schedule: str) -> str:
    """Mean, lowest and highest accuracy, and the number of diverged runs."""
    values = cells.accuracies(label, schedule)
    if not values:
        return "–"
    diverged = cells.diverged(label, schedule)
    note = f", {diverged} of {len(values)} diverged" if diverged else ""
    return f"{_mean(values)} ({min(values.values()):.1f} to {max(values.values()):.1f}{note})"


def _scale(cells: Cells) -> dict[str, Any]:
    headings = ["Method"]
    for rate in RATES.values():
        headings += [rate, f"minus Original, {rate}"]
    table = []
    for label in cells.family.rows:
        line = [label]
        for schedule in RATES:
            line.append(_mean(cells.accuracies(label, schedule)))
            line.append("–" if label == BASE else format_difference(cells.difference(label, BASE, schedule)))
        table.append(line)
    sentences = _scale_sentences(cells) if cells.complete else []
    return {"headings": headings, "table": table, "sentences": sentences, "chart": rate_chart(cells)}


def _scale_sentences(cells: Cells) -> list[str]:
    base = cells.best(BASE)
    sentences = [f"Original is best at {RATES[base]} ({_mean(cells.accuracies(BASE, base))}%)."]
    groups: dict[str, list[str]] = {"ahead": [], "behind": [], "undecided": []}
    for label in cells.family.rows:
        difference = paired(cells.accuracies(label, cells.best(label)), cells.accuracies(BASE, base))
        if label != BASE and difference is not None:
            side = "undecided" if difference.holds(0) else "ahead" if difference.mean > 0 else "behind"
            groups[side].append(f"{label} ({signed(difference.mean)})")
    named = "; ".join(f"{side}: {', '.join(labels) or 'none'}" for side, labels in groups.items())
    sentences.append(f"Each row at its own best rate against Original at its best one (three rates for both): {named}.")
    doubled = format_difference(cells.difference("GAP × 2", BASE, "lr × 1"))
    pooled = format_difference(cells.difference("DeepSquare3", "GAP × 2", "lr × 1"))
    matched = format_difference(cells.difference(MATCHED["DeepSquare3"], BASE, "lr × 1"))
    sentences.append(
        f"At × 1, GAP × 2 minus Original is {doubled}, Square-Pooling minus GAP × 2 {pooled}, and matched "
        f"Square-Pooling minus Original {matched}."
    )

    def spread(label: str) -> float:
        means = [fmean(cells.accuracies(label, schedule).values()) for schedule in RATES]
        return max(means) - min(means)

    plain, equal = fmean(map(spread, MATCHED)), fmean(map(spread, MATCHED.values()))
    sentences.append(
        f"Between their best and their worst rate lie {plain:.1f} points in the mean of the moments of order 2 to 6, "
        f"{equal:.1f} when they are matched, and {spread(BASE):.1f} for Original."
    )
    return sentences


def rate_chart(cells: Cells) -> Markup:
    """Mean accuracy against the learning rate, one line for each row."""
    lines = {
        label: [fmean(values.values()) if (values := cells.accuracies(label, schedule)) else None for schedule in RATES]
        for label in cells.family.rows
    }
    found = {label: [(x, y) for x, y in enumerate(means) if y is not None] for label, means in lines.items()}
    reached = {label: points for label, points in found.items() if points}
    heights = [y for points in reached.values() for _, y in points]
    limits = (max(min(heights), max(heights) - BELOW_BEST) - 1, max(heights) + 1)

    def plot(axes: Axes) -> None:
        axes.set(xlim=(0, 2), ylim=limits, xlabel="learning rate relative to the recipe's", ylabel="accuracy in %")
        axes.set_xticks(range(3), list(RATES.values()))
        for label, points in reached.items():
            axes.plot(*zip(*points, strict=True), **_line_style(label))
        _label_ends(axes, {label: points[-1][1] for label, points in reached.items()})

    description = "; ".join(
        f"{label}: " + ", ".join(f"{list(RATES.values())[x]} {y:.1f}%" for x, y in points)
        for label, points in reached.items()
    )
    return draw_svg(SIZE, MARGINS, "learning rates", description, plot)


def _line_style(label: str) -> dict[str, Any]:
    if label == BASE:
        return {"color": INK, "linewidth": 2.6, "zorder": 3}
    if label in MATCHED:
        return {"color": SERIES[0]}
    if label in MATCHED.values():
        return {"color": SERIES[0], "dashes": (3, 2)}
    return {"color": CLAIM, "linewidth": 2.0} if label == "GAP × 2" else {"color": QUIET, "linewidth": 1.0}


def _label_ends(axes: Axes, ends: Mapping[str, float]) -> None:
    """The labels of the lines at the right edge, from the top, moved down or up where they would overlap."""
    low, high = axes.get_ylim()
    gap, positions = LABEL_GAP * (high - low), dict[str, float]()
    y = high + gap
    for label, end in sorted(ends.items(), key=lambda end: -end[1]):
        y = positions[label] = min(max(end, low), y - gap)
    lift = max(0.0, low - y)
    for label, y in positions.items():
        style: dict[str, Any] = {"color": _line_style(label)["color"], "va": "center"}
        axes.annotate(label, (2, y + lift), (8, 0), textcoords="offset points", annotation_clip=False, **style)


def _forms(cells: Cells) -> dict[str, Any]:
    headings = ["Form of 5_", *RATES.values()]
    forms = {"DeepSquare6": "−s·x² (5s-)", "DeepSquare6, 5s+": "+s·x² (5s+)"}
    forms |= {"DeepSquare6, 5-": "−x² (5-)", "DeepSquare6, 5+": "+x² (5+)"}
    table = [[form, *(_range(cells, label, schedule) for schedule in RATES)] for label, form in forms.items()]
    sentences = []
    if cells.complete:
        diverged = {label: sum(cells.diverged(label, schedule) for schedule in RATES) for label in forms}
        per_form = ", ".join(f"{forms[label]} {count}" for label, count in diverged.items())
        sentences.append(f"{sum(diverged.values())} of {cells.done} runs diverged: {per_form}.")
        n = cells.family.seeds
        if any(not cells.diverged(*cell) for cell in cells.rows):
            sentences.append(
                f"Where none of {n} runs diverged, the probability of divergence is below "
                f"{100 * (1 - 0.05 ** (1 / n)):.0f}% with 95% confidence."
            )
    return {"headings": headings, "table": table, "sentences": sentences}


def _depth(cells: Cells) -> dict[str, Any]:
    names = {
        activation: {
            depth: BASE if (activation, depth) == ("ReLU", 3) else f"{activation}, {depth} layers"
            for depth in (3, 5, 7)
        }
        for activation in ("ReLU", "ReLU-Square", "EleSquare")
    }
    table = [
        [activation, *(_range(cells, label, "lr × 1") for label in labels.values())]
        for activation, labels in names.items()
    ]
    sentences = []
    if cells.complete:
        for activation in ("ReLU-Square", "EleSquare"):
            differences = (
                f"{format_difference(cells.difference(label, names['ReLU'][depth], 'lr × 1'))} with {depth} layers"
                for depth, label in names[activation].items()
            )
            sentences.append(f"{activation} minus ReLU: {', '.join(differences)}.")
    return {"headings": ["Activation", "3 layers", "5 layers", "7 layers"], "table": table, "sentences": sentences}


def _start(cells: Cells) -> dict[str, Any]:
    headings = ["Method", "Scale", "bias as usual", "bias 2", "Difference", "minus Original, bias as usual"]
    table, improved = [], []
    for row in ("DeepSquare5s-", "DeepSquare8"):
        for scale, label in (("per class", row), ("shared", f"{row}, shared")):
            moved = cells.difference(f"{label}, bias 2", label, "lr × 1")
            ranges = [_range(cells, one, "lr × 1") for one in (label, f"{label}, bias 2")]
            usual = format_difference(cells.difference(label, BASE, "lr × 1"))
            table.append([row, scale, *ranges, format_difference(moved), usual])
            if moved is not None and not moved.holds(0):
                improved.append(f"{row} with its scale {scale} ({signed(moved.mean)})")
    decided = ", ".join(improved) or "none"
    sentences = [f"Rows in which the interval of the difference excludes 0: {decided}."] if cells.complete else []
    return {"headings": headings, "table": table, "sentences": sentences}


_SECTIONS = {
    "scale": (
        "Scale: accuracy against the learning rate",
        "Do the rows differ only because their first gradients differ in size, that is in the effective learning rate? "
        "GAP × 2 doubles the mean; a matched pooling has a constant factor behind it that makes the first gradient of "
        "the convolutions as large as Original’s.",
        _scale,
    ),
    "DeepSquare6": (
        "DeepSquare6: does it diverge?",
        "Table 2 reports divergence without saying which form position 5_ has. Mean accuracy, with the lowest and the "
        "highest of the seeds; a diverged run counts as 10%.",
        _forms,
    ),
    "activations and depth": (
        "All activations replaced by EleSquare",
        "Section 1 calls such networks very hard to train. Layers beyond the three of Table 1 have stride 1.",
        _depth,
    ),
    "Square-Softmin start": (
        "The start of Square-Softmin",
        "−s·x² has no gradient at x = 0, around which x starts. With biases of 2 it starts away from there.",
        _start,
    ),
}
