"""The progress of a training run: a bar on a terminal, plain lines elsewhere."""

import math
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from deepsquare.training.loop import EpochMetrics, History
from deepsquare.training.recipe import Recipe

LINE_INTERVAL = 60  # seconds, without a terminal


class TrainingProgress:
    """Epoch, loss, images per second and remaining time, if ``enabled``; on a terminal as a bar, to be entered."""

    def __init__(self, recipe: Recipe, steps: int, enabled: bool) -> None:
        self.console = Console(stderr=True, quiet=not enabled)
        self.recipe, self.steps, self._printed_at = recipe, steps, time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.bar.speed_estimate_period = math.inf  # a step may take minutes
        self._task = self.bar.add_task("", total=recipe.epochs * steps, status="")

    def step(self, epoch: int, epoch_metrics: EpochMetrics, lr: float) -> None:
        position = f"epoch {epoch + 1}/{self.recipe.epochs}, step {epoch_metrics.steps}/{self.steps}"
        status = f"loss {epoch_metrics.mean_loss:.3f}, lr {lr:.3g}"
        self.bar.update(self._task, completed=epoch * self.steps + epoch_metrics.steps, description=position)
        (task,) = self.bar.tasks
        if task.speed:
            left = timedelta(seconds=task.time_remaining or 0)
            status += f", {task.speed * self.recipe.batch_size:.0f} images/s, {left} left"
        self.bar.update(self._task, status=status)
        now = time.perf_counter()
        if not self.console.is_terminal and now - self._printed_at > LINE_INTERVAL:
            self._printed_at = now
            self._print(f"{position}: {status}")

    def epoch(self, history: History) -> None:
        ema = f", EMA {history.ema[-1]:.2%}" if history.ema else ""
        self._print(
            f"epoch {history.epochs}/{self.recipe.epochs}: train loss {history.train_loss[-1]:.3f}, val loss "
            f"{history.loss[-1]:.3f}, top-1 {history.accuracy[-1]:.2%}, top-5 {history.top5[-1]:.2%}{ema}, "
            f"{timedelta(seconds=round(history.seconds))} elapsed"
        )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
