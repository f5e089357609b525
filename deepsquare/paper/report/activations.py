"""The cost of ReLU-Square beside the smooth activations (Section 3.2), by the newest measurement."""

from collections.abc import Mapping, Sequence
from typing import Any

from deepsquare.paper.bench.activations import FORWARD, FUSED, PLAIN, SMOOTH, STEP
from deepsquare.paper.report.bench import conditions_text
from deepsquare.paper.statistics import Median, bounds_label, has_interval
from deepsquare.results import Row

TITLES = {"relu": "ReLU", PLAIN: "ReLU-Square, plain operations", FUSED: "ReLU-Square, fused kernel"}
Measurement = tuple[Mapping[str, Any], str, int]  # by elements, pass and activation; how; the rounds
FORMS = {PLAIN: "plain operations", FUSED: "fused kernel"}


def activation_costs(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The times relative to ReLU by elements, pass and activation, and which of the paper's statements hold."""
    measured = [row for row in rows if (row.experiment, row.row) in READERS]
    if not measured:
        return None
    row = max(measured, key=lambda row: row.date)
    metrics, summary, rounds = READERS[row.experiment, row.row](row)
    times = {
        size: {kind: {name: Median(*ratios["/ relu"]) for name, ratios in passes[kind].items()} for kind in passes}
        for size, passes in metrics.items()
    }
    statements = [
        {"form": label, "pass": kind, **statement}
        for form, label in FORMS.items()
        for kind in (FORWARD, STEP)
        if (statement := _statement(metrics, kind, form))
    ]
    shown = {"summary": summary, "decided": has_interval(rounds), "conditions": conditions_text(row)}
    return {"times": times, "statements": statements, **shown}


def _statement(metrics: Mapping[str, Mapping[str, Any]], kind: str, form: str) -> dict[str, Any] | None:
    """Whether each smooth activation takes longer than ReLU-Square, at every size and by the bounds of the ratio."""
    by_name = {
        name: [Median(*passes[kind][name][f"/ {form}"]) for passes in metrics.values() if form in passes[kind]]
        for name in SMOOTH
    }
    if not all(by_name.values()):
        return None
    values = {name: [ratio.value for ratio in ratios] for name, ratios in by_name.items()}
    return {
        "ranges": {name: (min(ratios), max(ratios)) for name, ratios in values.items()},
        "cheaper": [name for name, ratios in by_name.items() if min(ratio.high for ratio in ratios) < 1],
        "unclear": [name for name, ratios in by_name.items() if min(ratio.low for ratio in ratios) <= 1],
    }


def _read_bench(row: Row) -> Measurement:
    rounds = row.recipe["rounds"]
    return row.metrics, f"one thread, median over {rounds} rounds ({bounds_label(rounds)})", rounds


def _read_spirals(row: Row) -> Measurement:
    """A row of ``reproduce fig3`` before ``bench activations``: one size, the least time, plain operations."""
    relative = row.metrics["relative_to_relu"]
    passes: dict[str, dict[str, Any]] = {}
    for kind, stored in ((FORWARD, "forward"), (STEP, "forward_backward")):
        square = relative["relu_square"][stored]
        passes[kind] = {
            PLAIN if name == "relu_square" else name: {
                "/ relu": [times[stored]] * 3,
                f"/ {PLAIN}": [times[stored] / square] * 3,
            }
            for name, times in relative.items()
        }
    summary = f"one thread, the least of {row.recipe['repeats']} times, without an interval; without the kernel"
    return {str(row.recipe["elements"]): passes}, summary, 1


READERS = {("bench", "activations"): _read_bench, ("spirals", "activation cost"): _read_spirals}
