"""A grid of training runs that goes on where it stopped, in local processes or on a Ray cluster.

A run that is done is a row of the store. One that was stopped left a checkpoint of its last epoch, from which it
goes on to the same result. A lock keeps two grids on one store from doing the same run at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepsquare._files import ensure_writable
from deepsquare._threads import cores
from deepsquare.models import create_model
from deepsquare.paper.grid.backend import Backend, LocalBackend, RayBackend
from deepsquare.paper.grid.progress import Progress
from deepsquare.results import Row, Store, key
from deepsquare.training import Batches, DivergedError, Evaluation, History, Recipe, Trainer, fit

try:
    import fcntl
except ImportError:  # Windows: one grid at a time
    fcntl = None  # type: ignore[assignment]

Report = Callable[[str, Mapping[str, Any]], None]
DataSource = Callable[["TrainingRun"], tuple[Batches, Evaluation]]
Work = Callable[["TrainingRun", Path, Report], Row]  # does a run, or goes on with it from the checkpoint at that path


@dataclass(frozen=True)
class TrainingRun:
    """One training run: a row of an experiment under one seed, by a named schedule."""

    experiment: str
    row: str
    seed: int
    model: str
    spec: str
    schedule: str
    recipe: Recipe

    @property
    def described(self) -> dict[str, Any]:
        """What is stored as the recipe."""
        return {"model": self.model, "spec": self.spec, "schedule": self.schedule, **asdict(self.recipe)}

    @property
    def key(self) -> str:
        """The identity of the run in the store."""
        return key(self.experiment, self.row, self.seed, self.described)

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.row}, {self.schedule}, seed {self.seed}"


@dataclass(frozen=True)
class Task:
    """A run with what a worker needs to do it, wherever it is."""

    run: TrainingRun
    work: Work
    store: Path

    def __call__(self, report: Report) -> Row | None:
        """Do the run, or go on with it; None where another grid does it or has done it."""
        torch.set_num_threads(1)
        with _claim(checkpoint_of(self.run, self.store).with_suffix(".lock")) as mine:
            if not mine or self.run.key in {row.key for row in Store(self.store).rows()}:
                return None
            return self.work(self.run, checkpoint_of(self.run, self.store), report)


def checkpoint_of(run: TrainingRun, store: Path) -> Path:
    """Where a run keeps its last epoch: in a hidden folder beside the store."""
    return store.parent / ".runs" / f"{hashlib.sha256(run.key.encode()).hexdigest()[:24]}.pt"


@dataclass(frozen=True)
class InMemoryTraining:
    """A run on batches in memory. The same seed means the same first weights, batches, crops and flips."""

    data: DataSource

    def __call__(self, run: TrainingRun, checkpoint: Path | None, report: Report) -> Row:
        """Train one model and make its row."""
        batches, evaluation = self.data(run)
        torch.manual_seed(run.seed)
        model = create_model(run.model, run.spec).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return train_to_row(run, model, batches, evaluation, checkpoint, report)


def train_to_row(
    run: TrainingRun,
    trainer: nn.Module | Trainer,
    batches: Batches,
    evaluation: Evaluation,
    checkpoint: Path | None,
    report: Report,
) -> Row:
    """Do a run, divergence being a result too."""
    diverged = None

    def on_epoch(history: History) -> None:
        report(run.key, {"epochs": history.epochs, "accuracy": history.accuracy[-1], "seconds": history.seconds})

    try:
        history = fit(
            trainer, batches, run.recipe, evaluation, checkpoint=checkpoint, identity=run.key, on_epoch=on_epoch
        )
    except DivergedError as error:
        history, diverged = error.history, str(error)
    metrics = history.metrics(diverged)
    return Row(run.experiment, run.row, run.seed, run.described, metrics, round(history.seconds, 1))


def run_grid(
    runs: Sequence[TrainingRun], work: Work, store: Store, *, processes: int | None = None, ray: str | None = None
) -> None:
    """Do every run that the store has no row of, and add the rows as they come."""
    present = {row.key for row in store.rows()}
    waiting = [run for run in runs if run.key not in present]
    progress = Progress(runs=len(runs), done=len(runs) - len(waiting))
    if not waiting:
        progress.say(f"all {len(runs)} runs are in {store.path}")
        return
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}; expected at least 1")
    ensure_writable(store.path.parent)
    checkpoint_of(waiting[0], store.path).parent.mkdir(exist_ok=True)
    workers = min(processes or cores(), len(waiting))
    tasks = {run.key: Task(run, work, store.path) for run in waiting}
    backend: Backend = LocalBackend(workers) if ray is None else RayBackend(ray)
    failures: list[str] = []
    try:
        with progress.shown(waiting, backend.workers):
            for done in backend.results(tasks, progress.epoch):
                run = tasks[done.key].run
                if done.error is not None:
                    failures.append(f"{run.name}: {done.error}")
                elif done.row is not None:
                    store.append(done.row)
                    for suffix in (".pt", ".lock"):
                        checkpoint_of(run, store.path).with_suffix(suffix).unlink(missing_ok=True)
                progress.finish(run, done)
    except KeyboardInterrupt:
        left = len(runs) - progress.done
        progress.say(f"stopped with {left} of {len(runs)} runs left; the same command goes on from the last epochs")
        raise
    finally:
        backend.stop()
    if failures:
        raise OSError(f"{len(failures)} of {len(runs)} runs failed:\n" + "\n".join(failures))


@contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Whether the lock of a run could be had; the file goes with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
