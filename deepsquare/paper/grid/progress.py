"""The progress of a grid: a live table on a terminal, a line per run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepsquare._terminal import printable_lines
from deepsquare.results import Row

if TYPE_CHECKING:
    from deepsquare.paper.grid.runner import TrainingRun


class Progress:
    """Counts runs and epochs, and displays them.

    ``hours`` are expected core-hours by the keys of the runs; without them, all epochs are expected to take as long.
    """

    def __init__(self, total: int, done: int, hours: Mapping[str, float] | None = None) -> None:
        self.console = Console(stderr=True)
        self.total, self.done, self.workers = total, done, 1
        self._waiting: dict[str, TrainingRun] = {}
        self._latest: dict[str, Mapping[str, Any]] = {}  # metrics of the running runs
        self._hours = hours or {}
        self._seconds, self._work = 0.0, 0.0  # measured, and what was expected for the same epochs

    def log(self, text: str) -> None:
        self.console.print(printable_lines(text), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def live(self, waiting: Sequence[TrainingRun], workers: int) -> Iterator[None]:
        self._waiting, self.workers = {run.key: run for run in waiting}, workers
        table = Live(console=self.console, get_renderable=self._table, refresh_per_second=2, transient=True)
        with table if self.console.is_terminal else nullcontext():
            yield

    def update(self, key: str, metrics: Mapping[str, Any]) -> None:
        if (run := self._waiting.get(key)) is None:  # a message that arrives after the run's row
            return
        before = self._latest.get(key, metrics)  # the first epoch after resuming does not measure the speed
        self._seconds += metrics["seconds"] - before["seconds"]
        self._work += self._expected(run, metrics["epochs"] - before["epochs"])
        self._latest[key] = metrics

    def complete(self, run: TrainingRun, row: Row | None, error: object) -> None:
        self._latest.pop(run.key, None)
        self._waiting.pop(run.key, None)
        if row is None:
            self.log(f"{run.name}: {error or 'skipped: another grid runs it or has its row'}")
            return
        self.done += 1
        diverged, accuracy = row.metrics["diverged"], row.metrics["accuracy"]
        outcome = f"diverged: {diverged}" if diverged else f"{accuracy:.2%}"
        self.log(f"{self.done} of {self.total}: {run.name}: {outcome} in {row.seconds:.0f} s{self._left()}")

    def _left(self) -> str:
        """The estimated time that is left, once the speed is known."""
        if not self._work:
            return ""
        work = sum(self._expected(run, run.recipe.epochs) for run in self._waiting.values())
        work -= sum(self._expected(self._waiting[key], metrics["epochs"]) for key, metrics in self._latest.items())
        seconds = work * self._seconds / self._work
        elapsed = timedelta(seconds=round(seconds / min(self.workers, max(len(self._waiting), 1))))
        return f", about {elapsed} left" + (f" ({seconds / 3600:.1f} core-hours)" if self._hours else "")

    def _expected(self, run: TrainingRun, epochs: int) -> float:
        return epochs * self._hours.get(run.key, run.recipe.epochs) / run.recipe.epochs

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("running", "epoch", "", "accuracy"):
            table.add_column(heading, justify="right" if heading in ("epoch", "accuracy") else "left")
        for key, metrics in self._latest.items():
            run = self._waiting[key]
            bar = ProgressBar(run.recipe.epochs, metrics["epochs"], width=24)
            table.add_row(run.name, f"{metrics['epochs']}/{run.recipe.epochs}", bar, f"{metrics['accuracy']:.2%}")
        head = Text(f"{self.done} of {self.total} runs done{self._left()}")
        return Group(head, ProgressBar(self.total, self.done, width=60), table)
