"""A model that learns: with its optimiser, precision, average of weights and team, and all of that as plain state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from deepsquare.data.loader import NO_LABEL
from deepsquare.training.distributed import SINGLE_PROCESS, DistributedContext
from deepsquare.training.recipe import Recipe

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Engine:
    """How steps are computed; what they compute is the recipe's.

    Attributes:
        team: the processes that share each batch.
        micro_batch_size: images that a process takes at a time; a batch of more is done in several goes, gradients added up.
        precision: of the forward and backward pass; bfloat16 and float16 mean autocast, float16 with scaled gradients.
        compile: by torch.compile.
        ema: the decay of an exponential average of the weights; none if not given.
        sync_bn: batch statistics over the whole team instead of each process's own part.
        prepare: images as the loader gives them → as the model wants them, on its device.
    """

    distributed: DistributedContext = SINGLE_PROCESS
    micro_batch_size: int | None = None
    precision: Precision = "float32"
    compile: bool = False
    ema: float | None = None
    sync_bn: bool = False
    prepare: Callable[[Tensor], Tensor] = lambda images: images


class Trainer:
    """A model in training on an engine."""

    def __init__(self, model: nn.Module, recipe: Recipe, engine: Engine) -> None:
        self.engine, distributed = engine, engine.distributed
        model.to(distributed.device)
        if engine.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        self.model = model
        scaled = engine.precision == "float16"
        self.optimizer = recipe.optimizer(model, scaled=scaled)
        self.ema = None
        if engine.ema is not None:
            rule = get_ema_multi_avg_fn(engine.ema)  # type: ignore[no-untyped-call]
            self.ema = AveragedModel(model, multi_avg_fn=rule, use_buffers=True)
        self.scaler = torch.amp.GradScaler(distributed.device.type, enabled=scaled)
        self._shared = DistributedDataParallel(model) if distributed.world_size > 1 else model
        self._run: Callable[[Tensor], Tensor] = torch.compile(self._shared) if engine.compile else self._shared

    def forward_backward(self, images: Tensor, labels: Tensor) -> tuple[float, int, int, int]:
        """Add the gradients of a batch; the summed loss, how many were right, how many counted, and the classes."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        micro_batch_size = self.engine.micro_batch_size or len(labels)
        parts = list(zip(torch.split(images, micro_batch_size), torch.split(labels, micro_batch_size), strict=True))
        total, right, counted, classes = 0.0, 0, 0, 0
        for number, (some, own) in enumerate(parts, 1):
            own = own.to(self.engine.distributed.device)
            with self._exchanging(number == len(parts)):
                with self._autocast():
                    logits = self._run(self.engine.prepare(some))
                loss = F.cross_entropy(logits.float(), own, ignore_index=NO_LABEL)
                valid = int((own != NO_LABEL).sum())
                if not valid:
                    loss = logits.sum() * 0
                torch.autograd.backward(self.scaler.scale(loss * (len(own) / len(labels)) if len(parts) > 1 else loss))
            total += loss.item() * valid
            right += int((logits.argmax(1) == own).sum())
            counted, classes = counted + valid, logits.shape[1]
        return total, right, counted, classes

    def optimizer_step(self, lr: float) -> None:
        """One step of the optimiser along the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def logits(self, images: Tensor, *, averaged: bool = False) -> Tensor:
        """What the model, or its average, says of images; for evaluation."""
        with self._autocast():
            model = self.ema if averaged and self.ema is not None else self.model
            logits: Tensor = model(self.engine.prepare(images))
        return logits.float()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and plain values.

        Parameters as they are, not as ``state_dict`` shows them: √s of Square-Softmin keeps its sign, to which the
        momentum belongs.
        """
        return {
            "model": _tensors(self.model),
            "optimizer": self.optimizer.state_dict(),
            "ema": {} if self.ema is None else _tensors(self.ema),
            "scaler": self.scaler.state_dict(),
            "random": self.engine.distributed.all_gather(_random_state(self.engine.distributed.device)),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state; ValueError where it is another model's."""
        _fill(self.model, state["model"])
        if (self.ema is None) != (not state["ema"]):
            raise ValueError("one has an average of its weights, the other has none")
        if self.ema is not None:
            _fill(self.ema, state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        distributed = self.engine.distributed
        if len(state["random"]) == distributed.world_size:  # another number of processes has drawn other numbers
            _set_random_state(state["random"][distributed.rank], distributed.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.engine.precision == "float32":
            return nullcontext()
        return torch.autocast(self.engine.distributed.device.type, getattr(torch, self.engine.precision))

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged once for a batch, with its last part."""
        if last or not isinstance(self._shared, DistributedDataParallel):
            return nullcontext()
        return self._shared.no_sync()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in _named(model)}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    own = dict(_named(model))
    if own.keys() != state.keys():
        raise ValueError(f"they differ in {', '.join(sorted(own.keys() ^ state.keys())[:4])}")
    for name, value in own.items():
        if value.shape != state[name].shape:
            raise ValueError(f"{name} is {tuple(state[name].shape)} in one and {tuple(value.shape)} in the other")
        value.copy_(state[name])


def _random_state(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),  # of dropout
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
