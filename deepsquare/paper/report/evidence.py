"""The rows of the stores, sorted by schedule and held against the entries of a table."""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepsquare.paper.statistics import Interval, interval, paired
from deepsquare.paper.tables import Entry, PaperTable
from deepsquare.paper.verdict import SEEDS, Verdict, judge
from deepsquare.results import Row, Store

OWN = ("spec", "dropout")  # what a recipe says on the network; the rest is common to the runs that are compared


@dataclass(frozen=True)
class Schedule:
    """A named recipe, as found in the rows."""

    experiment: str
    name: str
    epochs: int

    @property
    def label(self) -> str:
        """Name and length."""
        return f"{self.name} ({self.epochs} epoch{'s' if self.epochs != 1 else ''})"

    @property
    def is_proxy(self) -> bool:
        """Whether it ran on other data than the paper's."""
        return self.experiment not in ("cifar10", "imagenet")


@dataclass(frozen=True)
class RunResult:
    """A row that trained a model of the tables; accuracies in per cent."""

    schedule: Schedule
    model: str
    spec: str
    seed: int
    recipe: str  # all of it but what is the network's own
    accuracy: float | None
    top5: float | None
    curve: tuple[float, ...]
    diverged: bool
    date: str

    @classmethod
    def of(cls, row: Row) -> RunResult | None:
        """The run of a row; None for a row of another kind."""
        if not {"model", "spec", "epochs"} <= row.recipe.keys() or not {"accuracy", "top1"} & row.metrics.keys():
            return None
        try:
            return cls._of(row)
        except (TypeError, ValueError) as error:
            reason = f"the row {row.row} of {row.experiment}, seed {row.seed}, cannot be read ({error}); remove it"
            raise ValueError(reason) from error

    @classmethod
    def _of(cls, row: Row) -> RunResult:
        recipe, metrics = row.recipe, row.metrics
        epochs = int(recipe["epochs"])
        schedule = Schedule(row.experiment, str(recipe.get("schedule", "runs")), epochs)
        common = json.dumps({name: value for name, value in recipe.items() if name not in OWN}, sort_keys=True)
        accuracy = _percent(metrics.get("accuracy", metrics.get("top1")))
        curve = metrics.get("test_accuracy", metrics.get("test_top1", ()))
        return cls(
            schedule,
            str(recipe["model"]),
            str(recipe["spec"]),
            row.seed,
            common,
            accuracy,
            _percent(metrics.get("top5")),
            tuple(math.nan if value is None else 100 * value for value in curve),
            bool(metrics.get("diverged")) or accuracy is None,
            row.date,
        )


def _percent(fraction: float | None) -> float | None:
    return 100 * fraction if fraction is not None and math.isfinite(fraction) else None


@dataclass(frozen=True)
class Result:
    """An entry under one schedule. Diverged runs are counted, and left out of the means."""

    runs: tuple[RunResult, ...]
    accuracy: Interval | None
    top5: Interval | None
    improvement: Interval | None
    verdict: Verdict | None  # None for a base model, and where the paper claims nothing
    agrees: bool  # the paper's improvement lies within our interval
    judged: bool  # there are seeds enough for a verdict that counts

    @property
    def diverged(self) -> int:
        """How many runs diverged."""
        return sum(run.diverged for run in self.runs)


@dataclass(frozen=True)
class Line:
    """A row of a table: the paper's entry and our results, by schedule."""

    entry: Entry
    claim: float | None  # the paper's improvement in points; None for divergence and where nothing is compared
    is_base: bool
    results: Mapping[Schedule, Result]

    @property
    def summary(self) -> tuple[Schedule, Result] | None:
        """The longest schedule with enough seeds, else the longest one; proxies do not count."""
        found = [(schedule, result) for schedule, result in self.results.items() if not schedule.is_proxy]
        return next((pair for pair in reversed(found) if pair[1].judged), found[-1] if found else None)


@dataclass(frozen=True)
class Findings:
    """A table of the paper with our results; the schedules in order, the longest last."""

    table: PaperTable
    schedules: tuple[Schedule, ...]
    recipes: Mapping[Schedule, str]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def load_rows(folders: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """The rows of every store in the folders, each run once, and notes on what is wrong with the files."""
    rows: dict[str, Row] = {}
    notes: list[str] = []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.jsonl")) if _is_store(path)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = Store(path).rows()
        notes += [str(warning.message).replace(str(path), path.name) for warning in caught]
        for row in found:
            rows.setdefault(row.key, row)
    return list(rows.values()), notes


def _is_store(path: Path) -> bool:
    """Whether the file begins as a store does: other lists of JSON objects may lie beside it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        parsed = json.loads(first)
    except ValueError:
        return bool(first)  # cut or broken: the store says so
    return isinstance(parsed, dict) and bool({"experiment", "recipe", "metrics"} & parsed.keys())


def find(table: PaperTable, rows: Sequence[Row]) -> Findings:
    """Hold the rows against the entries of a table."""
    runs = [run for row in rows if (run := RunResult.of(row)) and _belongs(run, table)]
    own_epochs = {entry.epochs for entry in table.entries} - {None}
    chosen, notes = _latest_recipes(runs, own_epochs)
    order = sorted({run.schedule for run in chosen}, key=lambda s: (not s.is_proxy, s.epochs, s.name))
    lines = tuple(_line(table, entry, chosen, order) for entry in table.entries)
    recipes = {run.schedule: run.recipe for run in chosen}
    return Findings(table, tuple(order), recipes, lines, tuple(notes))


def _belongs(run: RunResult, table: PaperTable) -> bool:
    on_cifar = run.schedule.experiment == "cifar10"
    continued = run.schedule.name.endswith("continued")
    on_imagenet = not run.schedule.experiment.startswith("cifar") and not continued
    models = {entry.model for entry in table.entries}
    on_data = {"CIFAR-10": on_cifar, "ImageNet": on_imagenet, "continued": continued}
    return run.model in models and on_data[table.data]


def _latest_recipes(runs: Sequence[RunResult], own_epochs: set[int | None]) -> tuple[list[RunResult], list[str]]:
    """Keep one recipe for each schedule name of a model: the one that ran last."""
    groups: dict[tuple[str, str, str, int], dict[str, list[RunResult]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        own = run.schedule.epochs if run.schedule.epochs in own_epochs else 0
        groups[run.schedule.experiment, run.schedule.name, run.model, own][run.recipe].append(run)
    kept: list[RunResult] = []
    notes = []
    for (experiment, name, model, _), recipes in groups.items():
        latest = max(recipes.values(), key=lambda same: max(run.date for run in same))
        kept += latest
        if len(recipes) > 1:
            left = sum(map(len, recipes.values())) - len(latest)
            notes.append(
                f"{experiment}, {model}: {len(recipes)} recipes are called “{name}”. The one that ran last is shown; "
                f"{left} run{'s' if left != 1 else ''} of the others left out."
            )
    return kept, notes


def _line(table: PaperTable, entry: Entry, runs: Sequence[RunResult], order: Sequence[Schedule]) -> Line:
    base = next((other for other in table.entries if other.model == entry.model and other.spec == ""), None)
    is_base = entry is base
    claim = None
    if base and not is_base and entry.top1 is not None and base.top1 is not None:
        claim = round(entry.top1 - base.top1, 2)
    own_epochs = {other.epochs for other in table.entries} - {None}
    results = {}
    for schedule in order:
        fits = schedule.epochs == entry.epochs if entry.epochs else schedule.epochs not in own_epochs
        mine = _of(runs, schedule, entry)
        if mine and fits:
            against = _of(runs, schedule, base) if base and not is_base else ()
            compared = base is not None and not is_base
            results[schedule] = _result(claim, mine, against, compared, claimed=table.number > 0)
    return Line(entry, claim, is_base, results)


def _of(runs: Sequence[RunResult], schedule: Schedule, entry: Entry) -> tuple[RunResult, ...]:
    found: dict[int, RunResult] = {}  # one for a seed, whatever its label
    for run in runs:
        if (run.schedule, run.model, run.spec) == (schedule, entry.model, entry.spec):
            found.setdefault(run.seed, run)
    return tuple(found[seed] for seed in sorted(found))


def _result(
    claim: float | None, mine: tuple[RunResult, ...], base: tuple[RunResult, ...], compared: bool, claimed: bool
) -> Result:
    ours, theirs = (
        {run.seed: run.accuracy for run in runs if run.accuracy is not None and not run.diverged}
        for runs in (mine, base)
    )
    improvement = paired(ours, theirs) if compared else None
    diverged = sum(run.diverged for run in mine)
    paired_enough = improvement is not None and improvement.n >= SEEDS
    about_divergence = claim is None or 2 * diverged > len(mine)
    return Result(
        mine,
        interval(list(ours.values())),
        interval([run.top5 for run in mine if run.top5 is not None and not run.diverged]),
        improvement,
        judge(claim, improvement, len(mine), diverged) if compared and claimed else None,
        claim is not None and improvement is not None and paired_enough and improvement.holds(claim),
        paired_enough or (about_divergence and len(mine) >= SEEDS),
    )
