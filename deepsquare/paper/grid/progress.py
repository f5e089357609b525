"""What a person sees of a grid: a live table on a terminal, a line per run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from deepsquare.paper.grid.backend import Done
    from deepsquare.paper.grid.runner import TrainingRun


class Progress:
    """Counts runs and epochs, and shows them."""

    def __init__(self, runs: int, done: int) -> None:
        self.console = Console(stderr=True)
        self.runs, self.done, self.workers = runs, done, 1
        self._waiting: dict[str, TrainingRun] = {}
        self._active: dict[str, Mapping[str, Any]] = {}
        self._spent, self._epochs = 0.0, 0

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def shown(self, waiting: Sequence[TrainingRun], workers: int) -> Iterator[None]:
        """Show the table, where there is a terminal, while the block runs."""
        self._waiting, self.workers = {run.key: run for run in waiting}, workers
        if self.console.is_terminal:
            with Live(console=self.console, get_renderable=self._table, refresh_per_second=2, transient=True):
                yield
        else:
            yield

    def epoch(self, key: str, seen: Mapping[str, Any]) -> None:
        """A worker has finished an epoch."""
        before = self._active.get(key, seen)  # of a resumed run the first report tells nothing about speed
        self._spent += seen["seconds"] - before["seconds"]
        self._epochs += seen["epochs"] - before["epochs"]
        self._active[key] = seen

    def finish(self, run: TrainingRun, done: Done) -> None:
        """A run has ended."""
        self._active.pop(run.key, None)
        self._waiting.pop(run.key, None)
        if done.row is None:
            self.say(f"{run.name}: {done.error or 'another grid does it, or has done it'}")
            return
        self.done += 1
        metrics = done.row.metrics
        outcome = f"diverged: {metrics['diverged']}" if metrics["diverged"] else f"{metrics['accuracy']:.2%}"
        left = f", about {eta} left" if (eta := self._eta()) else ""
        self.say(f"{self.done} of {self.runs}: {run.name}: {outcome} in {done.row.seconds:.0f} s{left}")

    def _eta(self) -> str:
        if not self._epochs:
            return ""
        epochs = sum(run.recipe.epochs for run in self._waiting.values())
        epochs -= sum(seen["epochs"] for key, seen in self._active.items() if key in self._waiting)
        seconds = epochs * self._spent / self._epochs / min(self.workers, max(len(self._waiting), 1))
        return str(timedelta(seconds=round(seconds)))

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("running", "epoch", "", "accuracy"):
            table.add_column(heading, justify="right" if heading in ("epoch", "accuracy") else "left")
        for key, seen in self._active.items():
            if (run := self._waiting.get(key)) is not None:
                epochs = run.recipe.epochs
                bar = ProgressBar(epochs, seen["epochs"], width=24)
                table.add_row(run.name, f"{seen['epochs']}/{epochs}", bar, f"{seen['accuracy']:.2%}")
        head = Text(f"{self.done} of {self.runs} runs done{', about ' + eta + ' left' if (eta := self._eta()) else ''}")
        return Group(head, ProgressBar(self.runs, self.done, width=60), table)
