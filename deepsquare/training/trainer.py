"""A model in training: its optimizer, autocast, EMA and DDP wrapper, with all of their state; and its evaluation."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from deepsquare._memory import explain_memory
from deepsquare.data.loader import NO_LABEL
from deepsquare.preprocessing import Preprocessing
from deepsquare.surgery import set_beta
from deepsquare.training.distributed import SINGLE_PROCESS, DistributedContext
from deepsquare.training.recipe import DEFAULT_CONFIG, Recipe, TrainerConfig


class EvalMetrics(NamedTuple):
    """Mean loss, top-1 and top-5 accuracy on a set of images.

    ``overflows`` counts the images without a finite loss; ``correct`` has one boolean per image, in their order.
    """

    loss: float
    accuracy: float
    top5: float
    overflows: int
    correct: Tensor


class Trainer:
    """A model with everything that its training steps need.

    The model is trained in place; with ``sync_bn``, ``trainer.model`` is a converted one. ``preprocessing`` normalizes
    batches of uint8 images on the device; without it, batches are used as they are, contiguous if not channels_last.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        config: TrainerConfig = DEFAULT_CONFIG,
        distributed: DistributedContext = SINGLE_PROCESS,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        self.config, self.distributed, self.preprocessing = config, distributed, preprocessing
        model.to(distributed.device)
        if preprocessing is not None and config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        self.model = model
        self._beta: float | None = None
        scaled = config.precision == "float16"
        self.optimizer = recipe.optimizer(model, scaled=scaled)
        self.ema = None
        if config.ema is not None:
            average = get_ema_multi_avg_fn(config.ema)  # type: ignore[no-untyped-call]
            self.ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        self.scaler = torch.amp.GradScaler(distributed.device.type, enabled=scaled)
        self._ddp = DistributedDataParallel(model) if distributed.world_size > 1 else None
        wrapped = self._ddp or model
        self._forward: Callable[[Tensor], Tensor] = torch.compile(wrapped) if config.compile else wrapped

    def forward_backward(self, images: Tensor, labels: Tensor) -> tuple[float, int, int, int]:
        """Compute the gradients of a batch, micro-batch by micro-batch.

        Returns the sum of the losses, the number of correct answers and of images, and the number of classes; images
        that cannot be decoded do not count.
        """
        size = self.config.micro_batch_size or len(labels)
        hint = "set a smaller micro_batch_size or batch_size, or run less at the same time"
        with explain_memory(f"a training step of {_describe(images[:size])}", hint):
            return self._forward_backward(images, labels, size)

    def _forward_backward(self, images: Tensor, labels: Tensor, size: int) -> tuple[float, int, int, int]:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        micro_batches = list(zip(torch.split(images, size), torch.split(labels, size), strict=True))
        loss_sum, correct, valid_sum, classes = 0.0, 0, 0, 0
        for number, (inputs, targets) in enumerate(micro_batches, 1):
            targets = targets.to(self.distributed.device)
            # DDP exchanges gradients once per batch, with the last micro-batch.
            with nullcontext() if number == len(micro_batches) or self._ddp is None else self._ddp.no_sync():
                with self._autocast():
                    logits = self._forward(self._prepare(inputs))
                loss = F.cross_entropy(logits.float(), targets, ignore_index=NO_LABEL)
                valid = int((targets != NO_LABEL).sum())
                if not valid:
                    loss = logits.sum() * 0
                weighted = loss * (len(targets) / len(labels)) if len(micro_batches) > 1 else loss
                torch.autograd.backward(self.scaler.scale(weighted))
            loss_sum += loss.item() * valid
            correct += int((logits.argmax(1) == targets).sum())
            valid_sum, classes = valid_sum + valid, logits.shape[1]
        return loss_sum, correct, valid_sum, classes

    def set_beta(self, value: float | None) -> None:
        """Set β of a model equipped with ``init="anneal"`` for the next step; None leaves it as it is."""
        self._beta = value
        if value is not None:
            set_beta(self.model, value)

    def optimizer_step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with explain_memory("the momentum of the weights", "choose a smaller model, or run less at the same time"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
            if self._beta is not None:  # the EMA's buffers are averages too, which would lag behind
                set_beta(self.ema, self._beta)

    def logits(self, images: Tensor, *, ema: bool = False) -> Tensor:
        """The logits of the model, or of its EMA, for evaluation."""
        model = self.ema if ema and self.ema is not None else self.model
        with self._autocast():
            logits: Tensor = model(self._prepare(images))
        return logits.float()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and plain values.

        Parameters are stored as they are, not as in ``state_dict``: √s of Square-Softmin keeps its sign, which its
        momentum refers to.
        """
        return {
            "model": _tensors(self.model),
            "optimizer": self.optimizer.state_dict(),
            "ema": {} if self.ema is None else _tensors(self.ema),
            "scaler": self.scaler.state_dict(),
            "random": self.distributed.all_gather(_random_state(self.distributed.device)),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state; ValueError if it belongs to another model."""
        _load(self.model, state["model"])
        if (self.ema is None) != (not state["ema"]):
            raise ValueError("only one of the two has an EMA of its weights")
        if self.ema is not None:
            _load(self.ema, state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["random"]) == self.distributed.world_size:  # with another number, no process has its own state
            _set_random_state(state["random"][self.distributed.rank], self.distributed.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.distributed.device.type, getattr(torch, self.config.precision))

    def _prepare(self, images: Tensor) -> Tensor:
        if self.preprocessing is None:
            images = images.to(self.distributed.device, non_blocking=True)
            return images if self.config.channels_last else images.contiguous()
        return to_input(images, self.preprocessing, self.distributed.device, self.config.channels_last)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    distributed: DistributedContext = SINGLE_PROCESS,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> EvalMetrics:
    """Loss and accuracies over the batches of all processes, in eval mode; the model's mode is restored.

    An image that could not be decoded is left out of the loss and counts as misclassified; so does one whose logits
    contain NaN.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(6, dtype=torch.float64)  # loss, decoded images, top-1, top-5, all images, overflows
    hits: list[Tensor] = []
    for images, labels in batches:
        with explain_memory(f"the evaluation of {_describe(images)}", "choose a smaller batch, or smaller images"):
            outputs = (logits or model)(images)
        labels = labels.to(outputs.device)
        losses = F.cross_entropy(outputs, labels, reduction="none", ignore_index=NO_LABEL)
        targets = labels.where(~outputs.isnan().any(1), NO_LABEL)
        top5 = outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]
        hits.append((outputs.argmax(1) == targets).cpu())
        counts = ((labels != NO_LABEL).sum(), hits[-1].sum(), top5.sum(), len(labels), (~losses.isfinite()).sum())
        sums += torch.tensor([losses.sum().item(), *map(int, counts)], dtype=torch.float64)
    model.train(training)
    loss, decoded, top1_hits, top5_hits, count, overflows = distributed.all_reduce_sum(sums.tolist())
    if not count:
        raise ValueError("there is nothing to evaluate on; expected at least one batch (an iterator yields them once)")
    if not decoded:
        raise ValueError(f"none of the {count:.0f} images to evaluate on can be decoded; fetch them again")
    correct = torch.empty(round(count), dtype=torch.bool)
    for rank, shard in enumerate(distributed.all_gather(torch.cat(hits) if hits else None)):
        if shard is not None:  # else a process without images
            correct[rank :: distributed.world_size] = shard
    return EvalMetrics(loss / decoded, top1_hits / count, top5_hits / count, round(overflows), correct)


def to_input(images: Tensor, preprocessing: Preprocessing, device: torch.device, channels_last: bool = True) -> Tensor:
    """Move (N, 3, H, W) uint8 images to the device, as bytes, and normalize them there."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return preprocessing.normalize(images.to(device, non_blocking=True).contiguous(memory_format=memory_format))


def _describe(images: Tensor) -> str:
    return f"{len(images)} images of {'×'.join(map(str, images.shape[1:]))}"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in chain(model.named_parameters(), model.named_buffers())}


@torch.no_grad()
def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    tensors = _tensors(model)
    if tensors.keys() != state.keys():
        raise ValueError(f"they differ in {', '.join(sorted(tensors.keys() ^ state.keys())[:4])}")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ValueError(f"{name} is {tuple(state[name].shape)} in one and {tuple(tensor.shape)} in the other")
        tensor.copy_(state[name])


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random state of the CPU at the end of the block."""
    device = torch.device("cpu")
    state = _random_state(device)
    try:
        yield
    finally:
        _set_random_state(state, device)


def _random_state(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),  # dropout
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
