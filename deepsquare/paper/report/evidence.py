"""The rows of the stores, grouped by schedule and compared with the entries of a table."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from deepsquare.paper.rows import check_row
from deepsquare.paper.statistics import Interval, interval, paired
from deepsquare.paper.tables import PaperRow, PaperTable
from deepsquare.paper.verdict import MIN_SEEDS, Finding, Verdict
from deepsquare.results import Row, Store

T = TypeVar("T")
K = TypeVar("K")
JudgedRows = Mapping[tuple[str, str], Mapping[str, Finding]]  # by experiment and schedule, by spec
NETWORK_FIELDS = ("spec", "dropout")  # of a recipe; the other fields are equal in all runs that are compared


@dataclass(frozen=True)
class Schedule:
    """A named recipe, as found in the rows."""

    experiment: str
    name: str
    epochs: int
    continued: bool = False  # it starts from a trained network

    @property
    def label(self) -> str:
        name = f"{self.name}, continued" if self.continued else self.name
        return f"{name} ({self.epochs} epoch{'s' if self.epochs != 1 else ''})"

    @property
    def is_proxy(self) -> bool:
        """Whether it ran on other data than the paper's."""
        return self.experiment not in ("cifar10", "imagenet")


@dataclass(frozen=True)
class RunResult:
    """A row that trained a model of the tables; accuracies in per cent."""

    row: Row
    schedule: Schedule
    model: str
    spec: str
    recipe: str  # without NETWORK_FIELDS
    accuracy: float | None
    curve: tuple[float, ...]
    diverged: bool

    @classmethod
    def from_row(cls, row: Row) -> RunResult | None:
        """Parse a row; None for a row of another kind."""
        recipe, metrics = row.recipe, row.metrics
        if not {"model", "spec", "epochs"} <= recipe.keys() or "accuracy" not in metrics:
            return None
        shared = {name: value for name, value in recipe.items() if name not in NETWORK_FIELDS}
        try:
            schedule, epochs = str(recipe.get("schedule", "runs")), int(recipe["epochs"])
            fraction = metrics["accuracy"]
            accuracy = 100 * fraction if fraction is not None and math.isfinite(fraction) else None
            return cls(
                row=row,
                schedule=Schedule(row.experiment, schedule, epochs, continued="init_from" in recipe),
                model=str(recipe["model"]),
                spec=str(recipe["spec"]),
                recipe=json.dumps(shared, sort_keys=True),
                accuracy=accuracy,
                curve=tuple(math.nan if value is None else 100 * value for value in metrics.get("test_accuracy", ())),
                diverged=bool(metrics.get("diverged")) or accuracy is None,
            )
        except (TypeError, ValueError) as error:
            reason = f"the row {row.row} of {row.experiment}, seed {row.seed}, cannot be read ({error}); remove it"
            raise ValueError(reason) from error


@dataclass(frozen=True)
class ScheduleResult:
    """An entry under one schedule. Diverged runs are counted, and left out of the means.

    ``improvement`` and ``verdict`` are those of the ledger where it judges the entry under this schedule. Else the
    improvement is paired by seed, and there is no verdict.
    """

    runs: tuple[RunResult, ...]
    accuracy: Interval | None
    improvement: Interval | None
    verdict: Verdict | None
    agrees: bool  # the paper's improvement lies within our interval
    note: str = ""

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @cached_property
    def mean_curve(self) -> list[Interval]:
        """Test accuracy by epoch: the mean of the runs that did not diverge."""
        curves = [run.curve for run in self.runs if not run.diverged]
        epochs = range(max(map(len, curves), default=0))
        by_epoch = [[curve[k] for curve in curves if len(curve) > k and math.isfinite(curve[k])] for k in epochs]
        return [mean for values in by_epoch if (mean := interval(values))]


@dataclass(frozen=True)
class RowFindings:
    """A row of a table: the paper's entry and our results, by schedule."""

    table: int  # its number
    entry: PaperRow
    claim: float | None  # the paper's improvement in points; None for divergence and where nothing is compared
    is_base: bool
    results: Mapping[Schedule, ScheduleResult]


@dataclass(frozen=True)
class TableFindings:
    """A table of the paper with our results; the longest schedule is the last."""

    table: PaperTable
    schedules: tuple[Schedule, ...]
    recipes: Mapping[Schedule, Mapping[str, Any]]
    rows: tuple[RowFindings, ...]
    notes: tuple[str, ...]


def read_stores(folders: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Read the rows of every store in the folders, each run once, with the warnings about the files."""
    rows: dict[str, Row] = {}
    notes: list[str] = []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.jsonl")) if _is_store(path)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stored = Store(path).rows_by_line()
        notes += [str(warning.message).replace(str(path), path.name) for warning in caught]
        for line, row in stored.items():
            try:
                check_row(row)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}. Remove that line to repeat the run") from error
            if row.experiment not in ("fig2", "support"):  # figures.py reads the first; the second has its own page
                rows.setdefault(row.key, row)
    return list(rows.values()), notes


def _is_store(path: Path) -> bool:
    """Whether the first line has a store's fields: a folder may hold other JSON lines too."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        parsed = json.loads(first)
    except (ValueError, RecursionError):
        return bool(first)  # truncated or damaged: Store reports it
    return isinstance(parsed, dict) and bool({"experiment", "recipe", "metrics"} & parsed.keys())


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def bench_rows(rows: Sequence[Row], subject: str) -> dict[str, list[Row]]:
    """The rows of ``deepsquare bench SUBJECT`` by what was measured, the last measurement last.

    What was measured on a GPU, or with networks in the contiguous layout, stands for itself: ``resnet50, contiguous``.
    """
    measured = [row for row in rows if row.experiment == "bench" and row.row.startswith(f"{subject}/")]

    def key(row: Row) -> str:
        device, memory = row.recipe.get("device", "cpu"), row.recipe.get("memory", "channels_last")
        differs = [value for value, usual in ((device, "cpu"), (memory, "channels_last")) if value != usual]
        return ", ".join([row.row.removeprefix(f"{subject}/"), *differs])

    return grouped(sorted(measured, key=lambda row: row.date), key)


def table_findings(table: PaperTable, rows: Sequence[Row], judged: JudgedRows | None = None) -> TableFindings:
    """Compare the rows with the entries of a table; ``judged`` has the findings of the ledger."""
    runs = [run for row in rows if (run := RunResult.from_row(row)) and _belongs(run, table)]
    entry_epochs = {entry.epochs for entry in table.entries} - {None}
    latest, notes = latest_recipes(runs, entry_epochs)
    schedules = sorted({run.schedule for run in latest}, key=lambda s: (not s.is_proxy, s.epochs, s.name))
    first_by_seed = {(run.schedule, run.model, run.spec, run.row.seed): run for run in reversed(latest)}  # of any label
    in_order = sorted(first_by_seed.values(), key=lambda run: run.row.seed)
    by_network = grouped(in_order, lambda run: (run.schedule, run.model, run.spec))
    findings = []
    for entry in table.entries:
        base = next((other for other in table.entries if (other.model, other.spec) == (entry.model, "")), None)
        claim = None
        if base and base is not entry and entry.top1 is not None and base.top1 is not None:
            claim = round(entry.top1 - base.top1, 2)
        results = {}
        for schedule in schedules:
            applies = schedule.epochs == entry.epochs if entry.epochs else schedule.epochs not in entry_epochs
            if applies and (runs := by_network.get((schedule, entry.model, entry.spec), [])):
                compared = base is not None and base is not entry
                base_runs = by_network.get((schedule, entry.model, ""), []) if compared else None
                finding = (judged or {}).get((schedule.experiment, schedule.name), {}).get(entry.spec)
                results[schedule] = _schedule_result(claim, runs, base_runs, finding)
        findings.append(RowFindings(table.number, entry, claim, entry is base, results))
    recipes = {run.schedule: json.loads(run.recipe) for run in latest}
    return TableFindings(table, tuple(schedules), recipes, tuple(findings), tuple(notes))


def _belongs(run: RunResult, table: PaperTable) -> bool:
    experiment, continued = run.schedule.experiment, run.schedule.continued
    on_imagenet = (
        not experiment.startswith(("cifar", "tiny_imagenet", "continued")) and not continued
    )  # the study has its own section
    on_data = {"CIFAR-10": experiment == "cifar10", "ImageNet": on_imagenet}
    return on_data[table.data] and run.model in {entry.model for entry in table.entries}


def latest_recipes(runs: Sequence[RunResult], entry_epochs: set[int | None]) -> tuple[list[RunResult], list[str]]:
    """Keep one recipe for each schedule name of a model: the one that ran last."""

    def name_of(run: RunResult) -> tuple[str, str, str, int]:
        schedule = run.schedule
        epochs = schedule.epochs if schedule.epochs in entry_epochs else 0
        return schedule.experiment, schedule.name, run.model, epochs

    kept: list[RunResult] = []
    notes = []
    for (experiment, name, model, _), same_name in grouped(runs, name_of).items():
        recipes = grouped(same_name, lambda run: run.recipe)
        latest = max(recipes.values(), key=lambda same: max(run.row.date for run in same))
        kept += latest
        if len(recipes) > 1:
            omitted = len(same_name) - len(latest)
            notes.append(
                f"{experiment}, {model}: {len(recipes)} recipes are called “{name}”. The page shows the one that ran "
                f"last and omits {omitted} run{'s' if omitted != 1 else ''} of the others."
            )
    return kept, notes


def _schedule_result(
    claim: float | None, runs: Sequence[RunResult], base: Sequence[RunResult] | None, finding: Finding | None
) -> ScheduleResult:
    """Summarize the runs of an entry; ``base`` is None for a base model, which is compared with nothing."""
    accuracies, base_accuracies = (
        {run.row.seed: run.accuracy for run in group if run.accuracy is not None and not run.diverged}
        for group in (runs, base or ())
    )
    improvement = None if base is None else paired(accuracies, base_accuracies)
    if finding is not None and finding.mean is not None:
        low, high = (
            (-math.inf, math.inf) if finding.low is None or finding.high is None else (finding.low, finding.high)
        )
        improvement = Interval(finding.mean, (high - low) / 2, min(finding.n))
    return ScheduleResult(
        runs=tuple(runs),
        accuracy=interval(list(accuracies.values())),
        improvement=improvement,
        verdict=None if finding is None else finding.verdict,
        agrees=claim is not None
        and improvement is not None
        and improvement.n >= MIN_SEEDS
        and improvement.bounded
        and improvement.holds(claim),
        note="" if finding is None else finding.note,
    )
