"""The training loop: epochs of steps, evaluation, checkpoints, and a stop when the run diverges."""

import ctypes
import json
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor, nn

from deepsquare.results import pack_bits, round_for_json
from deepsquare.training.recipe import Recipe, added_defaults, describe_run
from deepsquare.training.state_file import read_state, write_state
from deepsquare.training.trainer import Trainer, evaluate

logger = logging.getLogger("deepsquare")
PATIENCE = 3  # a run has diverged after this many epochs in a row, past the warm-up, with a loss of chance level
Evaluation = Callable[[], Iterable[tuple[Tensor, Tensor]]]


class Batches(Protocol):
    """Training data: the number of batches per epoch, and the batches of each epoch, the same in every call."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
        """The batches of epoch ``number`` from batch ``start`` on, both counted from 0."""


@dataclass
class History:
    """The metrics of a run; the lists have one value per epoch."""

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # in the evaluation, like accuracy and top5
    accuracy: list[float] = field(default_factory=list)
    top5: list[float] = field(default_factory=list)
    ema: list[float] = field(default_factory=list)  # accuracy of the EMA of the weights; empty without one
    correct: str = ""  # one bit per image of the last evaluation: whether it was classified correctly (pack_bits)
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process: unlike seconds, the same on a busy machine

    @property
    def epochs(self) -> int:
        return len(self.train_loss)

    def metrics(self, diverged: str | None = None) -> dict[str, Any]:
        final: dict[str, Any] = {"accuracy": self.accuracy[-1] if self.accuracy else None}
        final |= {name: values[-1] for name, values in (("top5", self.top5), ("ema", self.ema)) if values}
        if self.correct:
            final["correct"] = self.correct
        curves = {
            "train_loss": self.train_loss,
            "train_accuracy": self.train_accuracy,
            "test_loss": self.loss,
            "test_accuracy": self.accuracy,
        }
        final |= {"diverged": diverged, "cpu_seconds": round(self.cpu_seconds, 1)}
        return {**final, **{name: round_for_json(curve, 5) for name, curve in curves.items()}}


@dataclass
class EpochMetrics:
    """The steps of an epoch so far: loss and correct answers, summed over the images that could be decoded."""

    steps: int = 0
    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0
    classes: int = 1

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.images, 1)

    @property
    def accuracy(self) -> float:
        """The accuracy on the training batches so far, each before its step."""
        return self.correct / max(self.images, 1)


@dataclass
class _Progress:
    """How far a run is, as its checkpoint stores it."""

    identity: str
    history: History
    epoch_metrics: EpochMetrics
    bad_epochs: int


class DivergedError(ArithmeticError):
    """The loss is not finite, or stayed above chance level; ``history`` holds the epochs before."""

    def __init__(self, message: str, history: History) -> None:
        super().__init__(message)
        self.history = history


class StoppedError(Exception):
    """The run stopped on request, after writing a checkpoint."""


class _Run:
    """A trainer with the progress of its run, and the checkpoint that stores both.

    On the same machine a run resumes from it bit for bit.
    """

    def __init__(self, trainer: Trainer, recipe: Recipe, identity: str, path: Path | None) -> None:
        self.trainer, self.recipe, self.identity, self.path = trainer, recipe, identity, path
        self.described = describe_run(recipe, trainer.config)
        self.history, self.epoch_metrics, self.bad_epochs = History(), EpochMetrics(), 0
        self.keep_previous = True
        if path is not None and path.exists():
            self._restore(path)
        self.counted_until = self.saved_at = time.perf_counter()
        self.cpu_counted_until = time.process_time()

    def save(self) -> None:
        """Update the elapsed time, and write a checkpoint if there is a path; called by every process."""
        now = time.perf_counter()
        self.history.seconds, self.counted_until = self.history.seconds + now - self.counted_until, now
        now = time.process_time()
        self.history.cpu_seconds, self.cpu_counted_until = self.history.cpu_seconds + now - self.cpu_counted_until, now
        if self.path is None:
            return
        progress = asdict(_Progress(self.identity, self.history, self.epoch_metrics, self.bad_epochs))
        state = {**self.trainer.state(), "recipe": self.described, "progress": progress}
        if self.trainer.distributed.is_main_process:
            write_state(self.path, state, self.keep_previous)
        self.keep_previous = True
        self.saved_at = time.perf_counter()

    def _restore(self, path: Path) -> None:
        """Continue from a checkpoint; one of another identity, recipe or model is refused."""
        # A damaged file must not take the place of the good one before it.
        state, self.keep_previous = read_state(path)
        try:
            json.dumps([state["progress"], state["recipe"]])  # no tensors, which have no one truth value
            progress = msgspec.convert(state["progress"], _Progress)
            recipe = msgspec.convert(state["recipe"], dict[str, Any])
        except (TypeError, ValueError) as error:  # of json or msgspec
            raise ValueError(f"the progress of {path} is damaged ({error}); remove it to start again") from error
        expected = {"identity": self.identity, **added_defaults(), **self.described}
        stored = {"identity": progress.identity, **added_defaults(), **recipe}
        if different := [name for name in expected if stored.get(name) != expected[name]]:
            names = "; ".join(f"its {name} is {stored.get(name)}, expected {expected[name]}" for name in different)
            raise ValueError(f"{path} belongs to another run: {names}. Remove it or choose another path")
        try:
            self.trainer.restore(state)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path} belongs to another model: {error}. Remove it or choose another path") from error
        self.history, self.epoch_metrics = progress.history, progress.epoch_metrics
        self.bad_epochs = progress.bad_epochs


OnStep = Callable[[int, EpochMetrics, float], None]  # epoch, metrics so far, learning rate


def fit(
    trainer: nn.Module | Trainer,
    batches: Batches,
    recipe: Recipe,
    evaluation: Evaluation,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_interval: float = math.inf,
    identity: str = "",
    on_epoch: Callable[[History], None] = lambda history: None,
    on_step: OnStep = lambda epoch, epoch_metrics, lr: None,
    stop: Callable[[], bool] = lambda: False,
    judge_end: bool = True,
) -> History:
    """Train a model in place by the recipe, with the default config unless it comes in a Trainer.

    Args:
        trainer: the model, or a Trainer with it.
        batches: training data.
        recipe: gives the epochs, the learning rates and, for a plain model, the optimizer.
        evaluation: yields the batches of the evaluation after each epoch.
        checkpoint: file that is written after every epoch. If it exists, the run resumes from it: on the same machine
            with the same number of threads it ends with the same weights as a run that was not stopped.
        checkpoint_interval: seconds after which the checkpoint is also written within an epoch.
        identity: stored in the checkpoint; one of another identity or recipe is refused.
        on_epoch, on_step: called after every epoch, and after every step.
        stop: polled after every step; if true, a checkpoint is written and StoppedError raised.
        judge_end: whether a last epoch no better than chance counts as divergence. Otherwise it takes several
            consecutive epochs after the warm-up.
    """
    if not len(batches):
        raise ValueError("an epoch has no batches; expected at least one: choose a smaller batch, or more data")
    tune_malloc()
    if not isinstance(trainer, Trainer):
        trainer = Trainer(trainer, recipe)
    run = _Run(trainer, recipe, identity, None if checkpoint is None else Path(checkpoint))
    history = run.history
    while history.epochs < recipe.epochs:
        _train_epoch(run, batches, checkpoint_interval, on_step, stop)
        metrics, chance = run.epoch_metrics, math.log(run.epoch_metrics.classes)  # the loss of equal probabilities
        bad = history.epochs >= recipe.warmup and metrics.mean_loss >= chance
        run.bad_epochs = run.bad_epochs + 1 if bad else 0
        _evaluate_epoch(trainer, evaluation, history, metrics)
        if run.bad_epochs >= PATIENCE or (judge_end and bad and history.epochs == recipe.epochs):
            raise DivergedError(
                f"epoch {history.epochs}: the loss is {metrics.mean_loss:.3g}, no better than chance "
                f"({chance:.3g}); try a lower lr",
                history,
            )
        run.epoch_metrics = EpochMetrics()
        run.save()
        on_epoch(history)
        if history.epochs < recipe.epochs and any(trainer.distributed.all_reduce_sum([stop()])):
            raise StoppedError(f"stopped after epoch {history.epochs}")
    return history


def _train_epoch(
    run: _Run, batches: Batches, checkpoint_interval: float, on_step: OnStep, stop: Callable[[], bool]
) -> None:
    """The steps of an epoch, or the remaining ones of a resumed epoch."""
    metrics, epoch, is_main_process = run.epoch_metrics, run.history.epochs, run.trainer.distributed.is_main_process
    with closing(batches.epoch(epoch, metrics.steps)) as remaining:  # an error's traceback would keep its workers alive
        for images, labels in remaining:
            progress = epoch + (metrics.steps + 1) / len(batches)
            lr = run.recipe.lr_at(progress)
            run.trainer.set_beta(run.recipe.beta_at(progress))
            due = is_main_process and time.perf_counter() - run.saved_at > checkpoint_interval
            try:
                stopping, due = step(run.trainer, images, labels, lr, metrics, stop(), due)
            except FloatingPointError as error:
                message = f"epoch {epoch + 1}: {error}; try a lower lr or a longer warm-up"
                raise DivergedError(message, run.history) from error
            on_step(epoch, metrics, lr)
            if stopping or due:
                run.save()
            if stopping:
                raise StoppedError(f"stopped after step {metrics.steps} of {len(batches)} in epoch {epoch + 1}")


def step(
    trainer: Trainer, images: Tensor, labels: Tensor, lr: float, epoch_metrics: EpochMetrics, *flags: bool
) -> list[bool]:
    """One optimizer step of all processes, added to the metrics; returns each flag or-ed over the processes.

    A loss that is not finite raises FloatingPointError on every process, before it reaches the weights.
    """
    *sums, epoch_metrics.classes = trainer.forward_backward(images, labels)
    loss, correct, count, *raised = trainer.distributed.all_reduce_sum([*sums, *flags])
    epoch_metrics.steps += 1
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {epoch_metrics.steps}, lr {lr:.3g}")
    trainer.optimizer_step(lr)
    epoch_metrics.loss += loss
    epoch_metrics.correct += correct
    epoch_metrics.images += count
    return [flag > 0 for flag in raised]


def _evaluate_epoch(trainer: Trainer, evaluation: Evaluation, history: History, epoch_metrics: EpochMetrics) -> None:
    """Evaluate the model and its EMA after an epoch, and append the metrics to the history."""
    distributed = trainer.distributed
    metrics = evaluate(trainer.model, evaluation(), distributed=distributed, logits=trainer.logits)
    history.train_loss.append(epoch_metrics.mean_loss)
    history.train_accuracy.append(epoch_metrics.accuracy)
    history.loss.append(metrics.loss)
    history.accuracy.append(metrics.accuracy)
    history.top5.append(metrics.top5)
    history.correct = pack_bits(metrics.correct)
    if metrics.overflows and distributed.is_main_process:
        # Not a divergence: running statistics lag behind the weights, and every square after them squares the error.
        logger.warning("epoch %d: %d images have no finite loss in the evaluation", history.epochs, metrics.overflows)
    if trainer.ema is not None:
        logits = partial(trainer.logits, ema=True)
        history.ema.append(evaluate(trainer.ema, evaluation(), distributed=distributed, logits=logits).accuracy)


@cache
def tune_malloc() -> bool:
    """Make malloc keep freed memory instead of returning it to the system and faulting it in again at every step.

    Returns whether it could be set: on glibc only.
    """
    trim_threshold, mmap_threshold, maximum, half_heap = -1, -3, 2**31 - 1, 32 * 2**20  # of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Some versions of glibc accept at most half a heap.
    mapped = mallopt(mmap_threshold, maximum) or mallopt(mmap_threshold, half_heap)
    return bool(mapped and mallopt(trim_threshold, maximum))
