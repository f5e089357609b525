"""What a person sees of a training run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from deepsquare.training import History, Recipe
from deepsquare.training.loop import EpochMetrics

LINE_EVERY = 60  # seconds, where there is no terminal


class TrainingProgress:
    """Epoch, loss, images per second and the time left; silent unless ``speaks``."""

    def __init__(self, recipe: Recipe, steps: int, speaks: bool) -> None:
        self.console = Console(stderr=True, quiet=not speaks)
        self.recipe, self.steps = recipe, steps
        self._timed = 0
        self._since = self._said = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"))
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("", total=recipe.epochs * steps, shown="")

    def __enter__(self) -> TrainingProgress:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._bar.stop()

    def step(self, epoch: int, epoch_metrics: EpochMetrics, lr: float) -> None:
        """A step of an epoch, counted from 0, was done."""
        now = time.perf_counter()
        if not self._timed:  # the first step of a process tells nothing about speed
            self._since = now
        self._timed += 1
        speed = (self._timed - 1) * self.recipe.batch_size / max(now - self._since, 1e-9)
        done = epoch * self.steps + epoch_metrics.steps
        shown = f"loss {epoch_metrics.mean_loss:.3f}, lr {lr:.3g}"
        if speed:
            left = (self.recipe.epochs * self.steps - done) * self.recipe.batch_size / speed
            shown += f", {speed:.0f} images/s, {_time(left)} left"
        where = f"epoch {epoch + 1}/{self.recipe.epochs}, step {epoch_metrics.steps}/{self.steps}"
        if self.console.is_terminal:
            self._bar.update(self._task, completed=done, description=where, shown=shown)
        elif now - self._said > LINE_EVERY:
            self._said = now
            self._say(f"{where}: {shown}")

    def epoch(self, history: History) -> None:
        """An epoch was evaluated."""
        averaged = f", averaged weights {history.ema[-1]:.2%}" if history.ema else ""
        self._say(
            f"epoch {history.epochs}/{self.recipe.epochs}: train loss {history.train_loss[-1]:.3f}, val loss "
            f"{history.loss[-1]:.3f}, top-1 {history.accuracy[-1]:.2%}, top-5 {history.top5[-1]:.2%}{averaged}, "
            f"{_time(history.seconds)} so far"
        )

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
