"""The training loop: epochs of steps, evaluation, checkpoints, and an end when the loss has lost its way."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare._bits import pack_bits
from deepsquare.data.loader import NO_LABEL
from deepsquare.results import round_for_json
from deepsquare.training.distributed import SINGLE_PROCESS, DistributedContext
from deepsquare.training.recipe import Recipe
from deepsquare.training.state import load_progress, save_progress
from deepsquare.training.trainer import Engine, Trainer

logger = logging.getLogger("deepsquare")
PATIENCE = 3  # epochs in a row after the warm-up that may be no better than a guess, before a run counts as diverged
Evaluation = Callable[[], Iterable[tuple[Tensor, Tensor]]]


class Batches(Protocol):
    """Training data: a number of batches per epoch, and the batches of each epoch, always the same ones."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
        """The batches of epoch ``number`` from batch ``start`` on, both counted from 0."""
        ...


@dataclass
class History:
    """What a run showed, one value per epoch; loss, accuracy and top5 are the evaluation's, ema the average's."""

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    top5: list[float] = field(default_factory=list)
    ema: list[float] = field(default_factory=list)
    correct: str = ""  # which images of the last evaluation were right, as pack_bits writes them
    seconds: float = 0.0

    @property
    def epochs(self) -> int:
        """Epochs done."""
        return len(self.train_loss)

    def metrics(self, diverged: str | None = None) -> dict[str, Any]:
        """What a row stores of it: the final values, and the curves."""
        final: dict[str, Any] = {
            name: values[-1] for name, values in (("top5", self.top5), ("ema", self.ema)) if values
        }
        if self.correct:
            final["correct"] = self.correct
        curves = {
            "train_loss": self.train_loss,
            "train_accuracy": self.train_accuracy,
            "test_loss": self.loss,
            "test_accuracy": self.accuracy,
        }
        rounded = {name: round_for_json(curve, 5) for name, curve in curves.items()}
        return {"accuracy": self.accuracy[-1] if self.accuracy else None, **final, "diverged": diverged, **rounded}


@dataclass
class EpochMetrics:
    """The steps of an epoch so far: loss and right answers summed over the images that counted."""

    steps: int = 0
    loss: float = 0.0
    right: float = 0.0
    images: float = 0.0
    classes: int = 1

    @property
    def mean_loss(self) -> float:
        """Of an image."""
        return self.loss / max(self.images, 1)

    @property
    def accuracy(self) -> float:
        """While training."""
        return self.right / max(self.images, 1)


class EvalMetrics(NamedTuple):
    """What a model showed on images: the mean loss, and the share of right answers, first and among five.

    ``overflows`` counts the images without a finite loss; ``correct`` has one truth value per image, in their order.
    """

    loss: float
    accuracy: float
    top5: float
    overflows: int
    correct: Tensor


class NotFiniteError(ArithmeticError):
    """The loss of a step is not finite."""


class DivergedError(ArithmeticError):
    """The loss is not finite, or stayed above the loss of a guess; ``history`` holds what came before."""

    def __init__(self, message: str, history: History) -> None:
        super().__init__(message)
        self.history = history


class StoppedError(Exception):
    """The run was asked to stop, and did so after writing a checkpoint."""


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
    on_step: Callable[[int, EpochMetrics, float], None] = lambda epoch, epoch_metrics, lr: None,
    stop: Callable[[], bool] = lambda: False,
    judge_end: bool = True,
) -> History:
    """Train a model in place by the recipe, or a learner as its engine says, and return the history.

    With a ``checkpoint`` path every epoch is kept there, and within an epoch every ``checkpoint_interval`` seconds. A run of the
    same ``identity`` goes on from it: on one machine with the same number of threads it ends with the same weights as
    one that was not stopped. When ``stop`` says yes after a step, a checkpoint is written and StoppedError raised.
    A loss no better than a guess over some epochs after the warm-up is divergence; with ``judge_end``, at the end so is
    one.
    """
    if not len(batches):
        raise ValueError("an epoch has no batches; expected at least one: a smaller batch, or more data")
    tune_malloc()
    if not isinstance(trainer, Trainer):
        trainer = Trainer(trainer, recipe, Engine())
    distributed, history, epoch_metrics, bad_epochs = trainer.engine.distributed, History(), EpochMetrics(), 0
    place = None if checkpoint is None else Path(checkpoint)
    if place is not None and place.exists():
        progress = load_progress(place, trainer, identity, recipe)
        history, epoch_metrics, bad_epochs = (
            History(**progress["history"]),
            EpochMetrics(**progress["epoch_metrics"]),
            progress["bad_epochs"],
        )
    since = kept = time.perf_counter()

    def keep() -> None:
        nonlocal since, kept
        history.seconds, since = history.seconds + time.perf_counter() - since, time.perf_counter()
        if place is not None:
            progress = {
                "identity": identity,
                "history": asdict(history),
                "epoch_metrics": asdict(epoch_metrics),
                "bad_epochs": bad_epochs,
            }
            save_progress(place, trainer, recipe, progress)
            kept = time.perf_counter()

    while history.epochs < recipe.epochs:
        epoch, count = history.epochs, len(batches)
        with closing(
            batches.epoch(epoch, epoch_metrics.steps)
        ) as given:  # an error's traceback would keep its workers alive
            for images, labels in given:
                lr = recipe.lr_at(epoch + (epoch_metrics.steps + 1) / count)
                due = distributed.is_main_process and time.perf_counter() - kept > checkpoint_interval
                try:
                    asked, late = step(trainer, images, labels, lr, epoch_metrics, stop(), due)
                except NotFiniteError as error:
                    reason = f"epoch {epoch + 1}: {error}; try a lower lr or a longer warm-up"
                    raise DivergedError(reason, history) from error
                on_step(epoch, epoch_metrics, lr)
                if asked or late:
                    keep()
                if asked:
                    raise StoppedError(f"stopped after step {epoch_metrics.steps} of {count} in epoch {epoch + 1}")
        bad_epochs = (
            bad_epochs + 1
            if epoch >= recipe.warmup and epoch_metrics.mean_loss >= math.log(epoch_metrics.classes)
            else 0
        )
        _conclude(trainer, evaluation, history, epoch_metrics)
        if bad_epochs >= PATIENCE or (judge_end and bad_epochs and history.epochs == recipe.epochs):
            guess = math.log(epoch_metrics.classes)
            reason = (
                f"epoch {history.epochs}: the loss was {epoch_metrics.mean_loss:.3g}, that of a guess is {guess:.3g}"
            )
            raise DivergedError(f"{reason}; try a lower lr", history)
        epoch_metrics = EpochMetrics()
        keep()
        on_epoch(history)
        if history.epochs < recipe.epochs and any(distributed.all_reduce_sum([stop()])):
            raise StoppedError(f"stopped after epoch {history.epochs}")
    return history


def step(
    trainer: Trainer, images: Tensor, labels: Tensor, lr: float, epoch_metrics: EpochMetrics, *flags: bool
) -> list[bool]:
    """One step of the whole team, added to the tally; of the flags, those that any process has raised.

    A loss that is not finite raises :class:`NotFiniteError` on every process, before it reaches the weights.
    """
    *sums, epoch_metrics.classes = trainer.forward_backward(images, labels)
    loss, right, counted, *raised = trainer.engine.distributed.all_reduce_sum([*sums, *flags])
    epoch_metrics.steps += 1
    if not math.isfinite(loss):
        raise NotFiniteError(f"the loss is {loss} at step {epoch_metrics.steps}, lr {lr:.3g}")
    trainer.optimizer_step(lr)
    epoch_metrics.loss, epoch_metrics.right, epoch_metrics.images = (
        epoch_metrics.loss + loss,
        epoch_metrics.right + right,
        epoch_metrics.images + counted,
    )
    return [flag > 0 for flag in raised]


def _conclude(trainer: Trainer, evaluation: Evaluation, history: History, epoch_metrics: EpochMetrics) -> None:
    """Evaluate after an epoch, and add it to the history."""
    distributed = trainer.engine.distributed
    shown = evaluate(trainer.model, evaluation(), distributed=distributed, logits=trainer.logits)
    history.train_loss.append(epoch_metrics.mean_loss)
    history.train_accuracy.append(epoch_metrics.accuracy)
    history.loss.append(shown.loss)
    history.accuracy.append(shown.accuracy)
    history.top5.append(shown.top5)
    history.correct = pack_bits(shown.correct)
    if shown.overflows and distributed.is_main_process:
        # No divergence: running statistics lag behind the weights, and every square after them squares the error.
        logger.warning("epoch %d: %d images have no finite loss in the evaluation", history.epochs, shown.overflows)
    if trainer.ema is not None:
        averaged = partial(trainer.logits, averaged=True)
        history.ema.append(evaluate(trainer.ema, evaluation(), distributed=distributed, logits=averaged).accuracy)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    distributed: DistributedContext = SINGLE_PROCESS,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> EvalMetrics:
    """Loss and accuracies over the batches of all processes, the model in eval mode and then back.

    An image that could not be read has no part in the loss, and counts as answered wrong; so does one whose logits are
    not numbers.
    """
    training = model.training
    model.eval()
    total, read, right, among, seen, overflows = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    answers: list[Tensor] = []
    for images, labels in batches:
        said = (logits or model)(images)
        labels = labels.to(said.device)
        losses = F.cross_entropy(said, labels, reduction="none", ignore_index=NO_LABEL)
        total, overflows = total + losses.sum().item(), overflows + int((~losses.isfinite()).sum())
        told = labels.where(~said.isnan().any(1), NO_LABEL)
        hits = said.topk(min(5, said.shape[1])).indices == told[:, None]
        read, seen = read + int((labels != NO_LABEL).sum()), seen + len(labels)
        answers.append((said.argmax(1) == told).cpu())
        right, among = right + int(answers[-1].sum()), among + int(hits.sum())
    model.train(training)
    total, read, right, among, seen, overflows = distributed.all_reduce_sum(
        [total, read, right, among, seen, overflows]
    )
    if not seen:
        raise ValueError("there is nothing to evaluate on; expected at least one batch (an iterator gives them once)")
    if not read:
        raise ValueError(f"none of the {seen:.0f} images to evaluate on can be read; fetch them again")
    correct = torch.empty(round(seen), dtype=torch.bool)
    for rank, own in enumerate(distributed.all_gather(torch.cat(answers) if answers else None)):
        if own is not None:  # else a process without images
            correct[rank :: distributed.world_size] = own
    return EvalMetrics(total / read, right / seen, among / seen, round(overflows), correct)


@cache
def tune_malloc() -> bool:
    """Have the C library keep freed memory instead of giving it back and faulting it in again at every step.

    Whether it could be set: glibc only; elsewhere nothing is changed.
    """
    trim_threshold, mmap_threshold, most, half_heap = -1, -3, 2**31 - 1, 32 * 2**20  # of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Some versions of glibc take no more than half a heap.
    mapped = mallopt(mmap_threshold, most) or mallopt(mmap_threshold, half_heap)
    return bool(mapped and mallopt(trim_threshold, most))
