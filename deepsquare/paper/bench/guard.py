"""What became slower than in the committed rows: ratios within one run, compared with ratios within another.

Seconds of different runs are not comparable, their ratios to the plain network are, on one kind of machine. A spec is
slower in a workload if the lower end of the new ratio's interval lies above the upper end of the committed one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from deepsquare.paper.bench import _common
from deepsquare.paper.bench.networks import OWN
from deepsquare.paper.bench.ratios import iteration_counts, relative_times
from deepsquare.paper.statistics import Median, has_interval
from deepsquare.results import Row, Store

SAME = ("threads", "input", "memory", "interleaved", "device")  # of the recipe, beside the hardware
SLOWER, NOT_SLOWER, UNDECIDED, NEW = "slower", "not slower", "too few iterations for an interval", "no committed ratio"


@dataclass(frozen=True)
class Comparison:
    """The time of a spec relative to the plain network, now and in the newest committed row that has it."""

    spec: str
    workload: str
    now: Median
    committed: Median | None
    enough: bool  # iterations on both sides for an interval

    @property
    def verdict(self) -> str:
        if self.committed is None:
            return NEW
        if not self.enough:
            return UNDECIDED
        return SLOWER if self.now.low > self.committed.high else NOT_SLOWER


def comparable_rows(folder: Path, names: Sequence[str], recipe: Mapping[str, Any], hardware: str) -> list[Row]:
    """The committed rows of these networks on this kind of machine, the newest first; at least one."""
    path = folder / "bench.jsonl"
    if not path.is_file():
        raise ValueError(
            f"there are no committed rows to compare with: no file {path}; give their folder by --committed"
        )
    rows = [row for row in Store(path).rows() if row.row in names]
    same = [row for row in rows if row.hardware == hardware and _setting(row.recipe) == _setting(recipe)]
    if not same:
        machine = f"{hardware}, {recipe['device']}, {recipe['threads']} threads, {recipe['memory']}"
        raise ValueError(
            f"{path} has no row of {', '.join(names)} that was measured on a machine like this one ({machine}); "
            f"run it without --guard and with --results {folder} to measure the first"
        )
    return sorted(same, key=lambda row: row.date, reverse=True)


def _setting(recipe: Mapping[str, Any]) -> list[Any]:
    return [recipe.get(field, "cpu" if field == "device" else None) for field in SAME]


def compare(metrics: Mapping[str, Any], committed: Sequence[Row]) -> list[Comparison]:
    """Every spec and workload of a run, with the newest of the committed rows, which are of one backbone."""
    counts = iteration_counts(metrics)
    comparisons = []
    for spec in filter(None, metrics):
        for workload, now in relative_times(metrics, spec)[OWN].items():
            ratio, count = next(filter(None, (_ratio_of(row, spec, workload) for row in committed)), (None, 0))
            enough = has_interval(counts[workload]) and has_interval(count)
            comparisons.append(Comparison(spec, workload, now, ratio, enough))
    return comparisons


def _ratio_of(row: Row, spec: str, workload: str) -> tuple[Median, int] | None:
    """The ratio and its number of iterations, where the row has it."""
    ratio = relative_times(row.metrics, spec)[OWN].get(workload) if spec in row.metrics else None
    return None if ratio is None else (ratio, iteration_counts(row.metrics)[workload])


def guard_table(comparisons: Mapping[str, Sequence[Comparison]]) -> Table:
    """By backbone, spec and workload: the committed ratio, the new one, and the verdict."""
    result = _common.make_table(
        "Time relative to the plain network, beside the committed rows",
        "slower: the lower end of the new interval lies above the upper end of the committed one",
        ("network", "spec", "workload", "committed", "now", "verdict"),
    )
    for backbone, of_backbone in comparisons.items():
        for one in sorted(of_backbone, key=lambda one: one.verdict != SLOWER):
            committed = "–" if one.committed is None else _common.format_median(one.committed, 3)
            cells = (one.spec, one.workload, committed, _common.format_median(one.now, 3))
            result.add_row(backbone, *cells, one.verdict, style="bold red" if one.verdict == SLOWER else None)
        result.add_section()
    return result
