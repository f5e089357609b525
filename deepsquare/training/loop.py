"""The training loop: epochs of steps, evaluation, checkpoints, and an end when the loss has lost its way."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare.training.checkpoints import load_progress, save_progress
from deepsquare.training.recipe import Recipe

PATIENCE = 3  # epochs in a row that may be no better than a guess, before a run counts as diverged


class Batches(Protocol):
    """Training data: a number of batches per epoch, and the batches of each epoch, always the same ones."""

    def __len__(self) -> int: ...

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number``, counted from 0."""
        ...


@dataclass
class History:
    """What a run showed, one value per epoch; loss and accuracy are the evaluation's."""

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def epochs(self) -> int:
        """Epochs done."""
        return len(self.train_loss)


class Steps(NamedTuple):
    """What some steps showed: the mean loss, the accuracy while training, and the loss of a guess."""

    loss: float
    accuracy: float
    guess: float


class NotFiniteError(ArithmeticError):
    """The loss of a step is not finite."""


class DivergedError(ArithmeticError):
    """The loss is not finite, or stayed above the loss of a guess; ``history`` holds what came before."""

    def __init__(self, message: str, history: History) -> None:
        super().__init__(message)
        self.history = history


def fit(
    model: nn.Module,
    batches: Batches,
    recipe: Recipe,
    evaluation: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    identity: str = "",
    on_epoch: Callable[[History], None] = lambda history: None,
) -> History:
    """Train in place by the recipe and return the history.

    With a ``checkpoint`` path every epoch is kept there, and a run of the same ``identity`` goes on from it: on
    one machine with the same number of threads it ends with the same weights as one that was not stopped.
    """
    if not len(batches):
        raise ValueError("an epoch has no batches; expected at least one: a smaller batch, or more data")
    keep_buffers()
    optimiser = recipe.optimiser(model)
    history, losing = History(), 0
    place = None if checkpoint is None else Path(checkpoint)
    if place is not None and place.exists():
        progress = load_progress(place, model, optimiser, identity, recipe)
        history, losing = History(**progress["history"]), progress["losing"]
    while history.epochs < recipe.epochs:
        start = time.perf_counter()
        epoch, count = history.epochs, len(batches)

        def rate(step: int, epoch: int = epoch, count: int = count) -> float:
            return recipe.rate_at(epoch + (step + 1) / count)

        try:
            seen = train_steps(model, batches.epoch(epoch), optimiser, rate)
        except NotFiniteError as error:
            reason = f"epoch {epoch + 1}: {error}; try a lower rate or a longer warm-up"
            raise DivergedError(reason, history) from error
        history.train_loss.append(seen.loss)
        history.train_accuracy.append(seen.accuracy)
        loss, accuracy = evaluate(model, evaluation())
        history.loss.append(loss)
        history.accuracy.append(accuracy)
        history.seconds += time.perf_counter() - start
        if not math.isfinite(loss):
            raise DivergedError(f"epoch {history.epochs}: the evaluation's loss is {loss}; try a lower rate", history)
        losing = losing + 1 if seen.loss >= seen.guess else 0
        if losing >= PATIENCE or (losing and history.epochs == recipe.epochs):
            reason = f"epoch {history.epochs}: the loss was {seen.loss:.3g}, that of a guess is {seen.guess:.3g}"
            raise DivergedError(f"{reason}; try a lower rate", history)
        if place is not None:
            progress = {"identity": identity, "history": asdict(history), "losing": losing}
            save_progress(place, model, optimiser, recipe, progress)
        on_epoch(history)
    return history


def train_steps(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimiser: torch.optim.Optimizer,
    rate: Callable[[int], float],
) -> Steps:
    """One step per batch, each with the rate of its number, counted from 0.

    A loss that is not finite raises :class:`NotFiniteError` before it reaches the weights.
    """
    model.train()
    total, correct, seen, guess = 0.0, 0, 0, math.nan
    for step, (images, labels) in enumerate(batches):
        for group in optimiser.param_groups:
            group["lr"] = rate(step)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        value = loss.item()
        if not math.isfinite(value):
            raise NotFiniteError(f"the loss is {value} at step {step + 1}, rate {rate(step):.3g}")
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimiser.step()
        total += value * len(labels)
        correct += int((logits.argmax(1) == labels).sum())
        seen, guess = seen + len(labels), math.log(logits.shape[1])
    return Steps(total / seen, correct / seen, guess)


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean loss and accuracy over the batches, the model in eval mode and then back."""
    training = model.training
    model.eval()
    total, correct, seen = 0.0, 0, 0
    for images, labels in batches:
        logits = model(images)
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        seen += len(labels)
    model.train(training)
    if not seen:
        raise ValueError("there is nothing to evaluate on; expected at least one batch (an iterator gives them once)")
    return total / seen, correct / seen


@cache
def keep_buffers() -> bool:
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
