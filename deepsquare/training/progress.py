"""The progress of a training run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from deepsquare.training.loop import EpochMetrics, History
from deepsquare.training.recipe import Recipe

LINE_INTERVAL = 60  # seconds, without a terminal


class TrainingProgress:
    """Epoch, loss, images per second and remaining time; prints nothing unless ``enabled``. Enter its ``bar``."""

    def __init__(self, recipe: Recipe, steps: int, enabled: bool) -> None:
        self.console = Console(stderr=True, quiet=not enabled)
        self.recipe, self.steps = recipe, steps
        self._timed = 0
        self._since = self._printed_at = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
        disable = not self.console.is_terminal
        self.bar = Progress(*columns, console=self.console, transient=True, disable=disable)
        self._task = self.bar.add_task("", total=recipe.epochs * steps, status="")

    def step(self, epoch: int, epoch_metrics: EpochMetrics, lr: float) -> None:
        """Report a step of an epoch, counted from 0."""
        now = time.perf_counter()
        if not self._timed:  # the first step includes one-time costs
            self._since = now
        self._timed += 1
        speed = (self._timed - 1) * self.recipe.batch_size / max(now - self._since, 1e-9)
        done = epoch * self.steps + epoch_metrics.steps
        status = f"loss {epoch_metrics.mean_loss:.3f}, lr {lr:.3g}"
        if speed:
            remaining = (self.recipe.epochs * self.steps - done) * self.recipe.batch_size / speed
            status += f", {speed:.0f} images/s, {_time(remaining)} left"
        position = f"epoch {epoch + 1}/{self.recipe.epochs}, step {epoch_metrics.steps}/{self.steps}"
        if self.console.is_terminal:
            self.bar.update(self._task, completed=done, description=position, status=status)
        elif now - self._printed_at > LINE_INTERVAL:
            self._printed_at = now
            self._print(f"{position}: {status}")

    def epoch(self, history: History) -> None:
        """Report an evaluated epoch."""
        ema = f", EMA {history.ema[-1]:.2%}" if history.ema else ""
        self._print(
            f"epoch {history.epochs}/{self.recipe.epochs}: train loss {history.train_loss[-1]:.3f}, val loss "
            f"{history.loss[-1]:.3f}, top-1 {history.accuracy[-1]:.2%}, top-5 {history.top5[-1]:.2%}{ema}, "
            f"{_time(history.seconds)} elapsed"
        )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
