"""How a run is computed on this machine; what it computes is the recipe's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deepsquare.training.recipe import Check, ImageNetRecipe, Recipe, Validated

OUTCOME_FIELDS = ("precision", "ema", "sync_bn")  # of TrainerConfig: they influence the result


@dataclass(frozen=True)
class LoaderConfig(Validated):
    """How images are read.

    Attributes:
        pipeline: Decoder: fast, torchvision or dali.
        workers: Decoding processes per training process, or 0 to decode in the training process; None for 0 on the
            CPU, and for a share of the cores with a GPU.
        damaged: Share of the images that may be undecodable before it is an error.
    """

    pipeline: str = "fast"
    workers: int | None = None
    damaged: float = 0.001

    def _checks(self) -> Iterable[Check]:
        yield "workers", self.workers is None or self.workers >= 0, "0 or more"
        yield "damaged", 0 <= self.damaged <= 1, "a share of the images, 0 to 1"


DEFAULT_LOADER = LoaderConfig()


@dataclass(frozen=True)
class TrainerConfig(Validated):
    """How a run is computed. The result depends on ``precision``, ``ema`` and ``sync_bn`` too: see describe_run.

    Attributes:
        precision: Precision of the forward and backward pass; bfloat16 and float16 use autocast, float16 also scales
            the loss.
        ema: Decay of an exponential moving average of the weights, which is evaluated and saved too; None for no EMA.
        sync_bn: Compute batch statistics over all processes instead of each process's part (GPU only).
        micro_batch_size: Images per forward and backward pass of a process, whose gradients accumulate over a batch;
            None for the whole batch.
        channels_last: Store images and weights in channels_last, which is the fastest format for convolutions.
        compile: Use torch.compile.
        checkpoint_minutes: Minutes between two checkpoints within an epoch.
        tensorboard: Write TensorBoard event files.
        loading: How images are read.
    """

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    ema: float | None = None
    sync_bn: bool = False
    micro_batch_size: int | None = None
    channels_last: bool = True
    compile: bool = False
    checkpoint_minutes: float = 15.0
    tensorboard: bool = False
    loading: LoaderConfig = DEFAULT_LOADER

    def _checks(self) -> Iterable[Check]:
        yield "ema", self.ema is None or 0 < self.ema < 1, "0 < ema < 1"
        yield "micro_batch_size", self.micro_batch_size is None or self.micro_batch_size >= 1, "at least 1"
        yield "checkpoint_minutes", self.checkpoint_minutes >= 0, "0 or more"


DEFAULT_CONFIG = TrainerConfig()


def describe_run(recipe: Recipe, config: TrainerConfig = DEFAULT_CONFIG) -> dict[str, Any]:
    """What rows store as the recipe, and what must match when a run is resumed.

    Runs by an ImageNetRecipe include the outcome fields of the config; other recipes are used with the defaults.
    """
    outcome = OUTCOME_FIELDS if isinstance(recipe, ImageNetRecipe) else ()
    return {**asdict(recipe), **{name: getattr(config, name) for name in outcome}}
