"""A resumable grid of training runs, in local processes or on a Ray cluster.

A finished run is a row of the store. An interrupted one left a checkpoint of its last epoch, from which it resumes
to the same result. A lock per run keeps two grids that share a store from training the same run at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from deepsquare._files import InUseError, ensure_writable, exclusive, remove_stale_temps
from deepsquare._memory import explain_memory
from deepsquare._threads import use_threads
from deepsquare.models import create_model
from deepsquare.paper.grid.after_training import measure
from deepsquare.paper.grid.backend import LOCAL, OnProgress, Workers
from deepsquare.paper.grid.progress import Progress
from deepsquare.results import Row, Store, conditions, run_key
from deepsquare.training import Batches, DivergedError, Evaluation, History, Recipe, Trainer, fit
from deepsquare.training.recipe import describe_run
from deepsquare.training.step_config import (
    StepChoice,
    choose_step,
    make_trainer,
    resume_or_choose,
    without_failing_compiler,
)

DataSource = Callable[["TrainingRun"], tuple[Batches, Evaluation]]
TrainFunction = Callable[["TrainingRun", Path, OnProgress], Row]  # resumes from the checkpoint at the path
RUNS = ".runs"  # the folder of the checkpoints, beside a store


@dataclass(frozen=True)
class TrainingRun:
    """One training run: a row of an experiment with one seed and a named schedule.

    ``init_from`` is the row whose trained model (same seed) gives the initial weights, if any; ``kwargs`` are those of
    the model's builder.
    """

    experiment: str
    row: str
    seed: int
    model: str
    spec: str
    schedule: str
    recipe: Recipe
    init_from: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_recipe(self) -> dict[str, Any]:
        recipe = {"model": self.model, "spec": self.spec, "schedule": self.schedule, **describe_run(self.recipe)}
        optional = {"init_from": self.init_from, "kwargs": dict(self.kwargs)}
        return recipe | {name: value for name, value in optional.items() if value}

    @property
    def key(self) -> str:
        return run_key(self.experiment, self.row, self.seed, self.to_recipe())

    @property
    def name(self) -> str:
        continued = "" if self.init_from is None else ", continued"
        return f"{self.row}, {self.schedule}{continued}, seed {self.seed}"


@dataclass(frozen=True)
class Task:
    """A run with everything a worker needs, on any machine."""

    run: TrainingRun
    train: TrainFunction
    store: Path

    def __call__(self, on_progress: OnProgress) -> Row | None:
        """Train the run, or resume it; None if another grid trains it or has stored its row."""
        torch.set_num_threads(1)
        checkpoint = checkpoint_of(self.run, self.store)
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(checkpoint.with_suffix(".lock"), self.run.name, "wait for it"))
            except InUseError:
                return None
            row, stored = None, Store(self.store).rows()
            if self.run.key not in {other.key for other in stored}:
                _reuse_choice(self.run, stored, checkpoint)
                with explain_memory(f"the run {self.run.name}", "use fewer --processes"):
                    row = self.train(self.run, checkpoint, on_progress)
                Store(self.store).append(row)  # while locked, so that no other grid repeats the run
            remove_checkpoint(self.run, self.store)
            return row


def _reuse_choice(run: TrainingRun, rows: Sequence[Row], checkpoint: Path) -> None:
    """Keep the step that another seed of this run chose on this machine, instead of measuring again."""
    path, here = checkpoint.with_suffix(".json"), conditions()
    if path.exists() or checkpoint.exists():
        return
    for row in rows:
        is_same_run = run_key(row.experiment, row.row, run.seed, row.recipe) == run.key
        is_here = (row.hardware, row.versions, row.commit) == (here["hardware"], here["versions"], here["commit"])
        choice = StepChoice.from_metrics(row.metrics.get("step")) if is_same_run and is_here else None
        if choice is not None:
            choice.save(path)
            return


def checkpoint_of(run: TrainingRun, store: Path) -> Path:
    """The checkpoint of a run's last epoch, in a hidden folder beside the store."""
    return store.parent / RUNS / f"{hashlib.sha256(run.key.encode()).hexdigest()[:24]}.pt"


def remove_checkpoint(run: TrainingRun, store: Path) -> None:
    """Remove the checkpoint, the choice of a step and the lock of a run whose row is stored."""
    checkpoint = checkpoint_of(run, store)
    for suffix in (".pt", ".previous.pt", ".json", ".lock"):
        path = checkpoint.with_suffix(suffix)
        remove_stale_temps(path)
        path.unlink(missing_ok=True)


def build_model(run: TrainingRun) -> nn.Module:
    """The run's model, equipped."""
    return create_model(run.model, run.spec)


@dataclass(frozen=True)
class InMemoryTraining:
    """Trains on batches in memory, and measures what the trained network calls for (``after_training``).

    The seed determines the initial weights, batches, crops and flips.

    How steps are computed is chosen for the network and the machine, kept beside the checkpoint, and stored in the row,
    from where other seeds take it.
    """

    data: DataSource
    build: Callable[[TrainingRun], nn.Module] = build_model

    def __call__(self, run: TrainingRun, checkpoint: Path | None, on_progress: OnProgress) -> Row:
        batches, evaluation = self.data(run)
        torch.manual_seed(run.seed)
        model = self.build(run)
        path, resumed = (None, False) if checkpoint is None else (checkpoint.with_suffix(".json"), checkpoint.exists())
        is_stored = path is not None and path.exists()
        choice = resume_or_choose(path, resumed, lambda: choose_step(model, run.recipe, batches))
        with use_threads(choice.step.threads):
            if is_stored:
                choice = without_failing_compiler(choice, model, run.recipe, batches)
            trainer = make_trainer(model, run.recipe, choice.step)
            row = train_to_row(run, trainer, batches, evaluation, checkpoint, on_progress, step=choice.metrics())
            measured = {} if row.metrics["diverged"] else measure(run, trainer.model, batches, evaluation)
            return msgspec.structs.replace(row, metrics={**row.metrics, **measured})


def train_to_row(
    run: TrainingRun,
    trainer: nn.Module | Trainer,
    batches: Batches,
    evaluation: Evaluation,
    checkpoint: Path | None,
    on_progress: OnProgress,
    **more_metrics: Any,
) -> Row:
    """Train a run and return its row, with further metrics if given; divergence is a result too."""
    diverged = None

    def on_epoch(history: History) -> None:
        on_progress(run.key, {"epochs": history.epochs, "accuracy": history.accuracy[-1], "seconds": history.seconds})

    options: dict[str, Any] = {"checkpoint": checkpoint, "identity": run.key, "on_epoch": on_epoch}
    try:
        history = fit(trainer, batches, run.recipe, evaluation, **options)
    except DivergedError as error:
        history, diverged = error.history, str(error)
    metrics = {**history.metrics(diverged), **more_metrics}
    return Row(run.experiment, run.row, run.seed, run.to_recipe(), metrics, round(history.seconds, 1))


def run_grid(runs: Sequence[TrainingRun], train: TrainFunction, store: Store, workers: Workers = LOCAL) -> None:
    """Train every run without a row in the store, and append the rows as the runs finish."""
    run_tasks([Task(run, train, store.path) for run in runs], workers)


def run_tasks(planned: Sequence[Task], workers: Workers = LOCAL, hours: Mapping[str, float] | None = None) -> None:
    """Train every run without a row in its store, in this order, and append the rows as the runs finish.

    ``hours`` are the expected core-hours of the runs by their keys, for the display.
    """
    present = {path: {row.key for row in Store(path).rows()} for path in dict.fromkeys(task.store for task in planned)}
    waiting = [task for task in planned if task.run.key not in present[task.store]]
    for task in planned:
        if task.run.key in present[task.store]:  # a grid that was killed may have left its checkpoint
            remove_checkpoint(task.run, task.store)
    progress = Progress(len(planned), len(planned) - len(waiting), hours)
    if not waiting:
        progress.log(f"all {len(planned)} runs are in {', '.join(map(str, present))}")
        return
    for store in present:
        ensure_writable(store.parent)
        (store.parent / RUNS).mkdir(exist_ok=True)
    tasks = {task.run.key: task for task in waiting}
    backend = workers.start(len(waiting))
    failures: list[str] = []
    try:
        with progress.live([task.run for task in waiting], backend.workers):
            for key, row, error in backend.results(tasks, progress.update):
                run = tasks[key].run
                if error is not None:
                    failures.append(f"{run.name}: {str(error) or repr(error)}")
                elif row is not None:
                    Store(tasks[key].store).append(row)  # if the worker shares no file system with this process
                progress.complete(run, row, error)
    except KeyboardInterrupt:
        left = len(planned) - progress.done
        progress.log(f"stopped with {left} of {len(planned)} runs left; the same command resumes from the last epochs")
        raise
    finally:
        backend.stop()
    if failures:
        raise OSError(f"{len(failures)} of {len(planned)} runs failed:\n" + "\n".join(failures))
