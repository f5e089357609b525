"""Recipes: the hyperparameters that decide the result of a run, with the data and the seed; and how it is computed.

``RECIPES`` has the paper's for ImageNet by name: ``resnet18``, ``resnet18+pooling``, ``resnet18+softmin@200``.

NOTE not in paper: which networks count as "the CNNs with DeepSquare" for dropout. All with a spec do; the plain ones
are trained without. Networks that the paper does not train take the recipe of the ResNets, the ShuffleNets that of
ShuffleNetV2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from inspect import formatannotation
from typing import Any, Literal, get_type_hints

import msgspec
import torch
from torch import nn

from deepsquare.models import NETWORKS
from deepsquare.surgery import Init, param_groups

Check = tuple[str, bool, str]  # a field, whether its value is valid, and what is expected
OUTCOME_FIELDS = ("precision", "ema", "sync_bn")  # of TrainerConfig: they influence the result
ADDED_FIELDS = ("decay_1d", "init", "anneal_epochs")  # of recipes: they came after the first rows
ANNEAL_EPOCHS = 5.0
DROPOUT = 0.2
LONGER = ("resnet18+softmin", 200)  # the one network that Table 4 trains for another number of epochs too


def convert_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from a file to the types of a dataclass's fields; TypeError names the first that does not fit.

    An int may stand for a float and a list for a tuple, but a bool for neither, and a string for nothing else.
    """
    hints, converted = get_type_hints(kind), {}
    for name, value in values.items():
        try:
            converted[name] = msgspec.convert(value, hints[name], strict=True)
        except msgspec.ValidationError as error:
            raise TypeError(f"{name} is {value!r}; expected {formatannotation(hints[name])}") from error
    return converted


def convert_recipe_fields(kind: type[Recipe], values: Mapping[str, Any]) -> dict[str, Any]:
    """As convert_fields; ValueError for a field that recipes of this kind do not have."""
    known = {field.name for field in fields(kind)}
    if unknown := values.keys() - known:
        names = ", ".join(sorted(known))
        raise ValueError(f"a recipe has no field {', '.join(sorted(unknown))}; its fields are {names}")
    return convert_fields(kind, values)


class Validated:
    """Base class of dataclasses that check the types of their fields, and the values by ``_checks``."""

    def __post_init__(self) -> None:
        convert_fields(type(self), vars(self))
        for name, valid, expected in self._checks():
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")

    def _checks(self) -> Iterable[Check]:
        return ()


@dataclass(frozen=True)
class Recipe(Validated):
    """SGD with momentum; the learning rate rises linearly during the warm-up and then decays by a cosine to zero.

    NOTE not in paper: which parameters decay. All do, which is what torch.optim.SGD does with a model's parameters.

    Attributes:
        epochs: Number of epochs.
        batch_size: Images per step, over all processes.
        lr: The highest learning rate.
        warmup: Epochs of warm-up.
        momentum: Momentum of SGD.
        nesterov: Use Nesterov momentum.
        weight_decay: Weight decay, as in torch.optim.SGD.
        decay_1d: Let 1-D parameters decay too: biases, normalization, α and √s. β of ``init`` never decays.
    """

    epochs: int
    batch_size: int = 128
    lr: float = 0.1
    warmup: float = 1.0
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    decay_1d: bool = True

    def _checks(self) -> Iterable[Check]:
        yield "epochs", self.epochs >= 1, "at least 1"
        yield "batch_size", self.batch_size >= 1, "at least 1"
        yield "lr", 0 < self.lr < math.inf, "above 0"
        yield "warmup", 0 <= self.warmup <= self.epochs, f"between 0 and the {self.epochs} epochs"
        yield "momentum", 0 <= self.momentum < 1, "0 ≤ momentum < 1"
        yield "nesterov", self.momentum > 0 or not self.nesterov, "False where momentum is 0"
        yield "weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"

    def lr_at(self, progress: float) -> float:
        """The learning rate after ``progress`` epochs, which may be a fraction."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        if self.epochs == self.warmup:
            return self.lr
        decayed = min((progress - self.warmup) / (self.epochs - self.warmup), 1.0)
        return self.lr * (1 + math.cos(math.pi * decayed)) / 2

    def beta_at(self, progress: float) -> float | None:
        """β of the inserted modules in the step that ends after ``progress`` epochs; None if nothing sets it."""
        return None

    def optimizer(self, model: nn.Module, *, scaled: bool = False) -> torch.optim.SGD:
        """The optimizer of a model; the training loop sets its learning rate at every step.

        With ``scaled`` gradients it is not fused: if the very first step is skipped because a gradient is not finite,
        the fused optimizer of torch 2.13 reads uninitialized memory as its momentum.
        """
        options: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov, "fused": not scaled}
        groups = param_groups(model, self.weight_decay, decay_1d=self.decay_1d)
        return torch.optim.SGD(groups, self.lr, **options)


@dataclass(frozen=True)
class CifarRecipe(Recipe):
    """A recipe for small images.

    Attributes:
        pad: Width of the reflected border from which random crops are taken.
        flip: Flip images horizontally with probability 0.5.
    """

    pad: int = 4
    flip: bool = True

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "pad", self.pad >= 0, "at least 0"


@dataclass(frozen=True)
class ImageNetRecipe(Recipe):
    """The paper's recipe for ImageNet (Section 5).

    NOTE not in paper: the ranges of area and aspect ratio of the random crops. They are torchvision's, the usual
    meaning of "the standard ResNet data augmentation"; images are resized with antialiasing.

    Attributes:
        model: Name of the base network.
        spec: Spec that the network is equipped with; empty for the base network.
        dropout: Dropout ratio before the last FC; the model's default if None.
        size: Side of the training images.
        crop_area: Range of a random crop's share of the image's area.
        crop_ratio: Range of a random crop's width / height.
        flip: Flip images horizontally with probability 0.5.
        eval_resize: Shorter side of an evaluated image, before the center crop.
        eval_size: Side of the center crop.
        pretrained: Weights to fine-tune, of the base network or an equipped one: a safetensors file or a state_dict
            that torch.save wrote; None for random weights.
        init: How the modules of the spec start: as the paper's, or as the identity with β learned from 0, or with β
            annealed from 0 to 1 in the first epochs.
        anneal_epochs: Epochs in which β rises; None for 5, but at most half of all.
    """

    epochs: int = 120
    batch_size: int = 1024
    lr: float = 0.4
    warmup: float = 5.0
    model: str = "resnet18"
    spec: str = ""
    dropout: float | None = None
    size: int = 224
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    eval_resize: int = 256
    eval_size: int = 224
    pretrained: str | None = None
    init: Init = "paper"
    anneal_epochs: float | None = None

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "dropout", self.dropout is None or 0 <= self.dropout < 1, "0 ≤ dropout < 1"
        yield "size", self.size >= 1, "at least 1"
        yield "crop_area", 0 < self.crop_area[0] <= self.crop_area[1] <= 1, "0 < low ≤ high ≤ 1"
        yield "crop_ratio", 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf, "0 < low ≤ high"
        yield "eval_size", self.eval_size >= 1, "at least 1"
        yield "eval_resize", self.eval_resize >= self.eval_size, f"at least eval_size, {self.eval_size}"
        yield "init", self.init == "paper" or self.spec != "", "'paper' without a spec: nothing else has a β"
        anneal = self.anneal_epochs
        yield "anneal_epochs", anneal is None or 0 < anneal <= self.epochs, f"above 0, at most the {self.epochs} epochs"
        yield "anneal_epochs", anneal is None or self.init == "anneal", "None unless init is 'anneal'"

    def beta_at(self, progress: float) -> float | None:
        """β rises linearly, step by step, and is exactly 1 at the end of ``anneal_epochs``.

        NOTE not in paper: five epochs, as the warm-up, so that β has its last value when the learning rate is highest;
        and at most half of a short run, whose other half trains the network that is evaluated.
        """
        if self.init != "anneal":
            return None
        return min(progress / (self.anneal_epochs or min(ANNEAL_EPOCHS, self.epochs / 2)), 1.0)


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

    Runs by an ImageNetRecipe include the outcome fields of the config; other recipes are used with the defaults. The
    added fields are left out where they have their defaults: a run of an earlier version is the same run.
    """
    outcome = OUTCOME_FIELDS if isinstance(recipe, ImageNetRecipe) else ()
    described = {**asdict(recipe), **{name: getattr(config, name) for name in outcome}}
    defaults = added_defaults()
    return {name: value for name, value in described.items() if name not in defaults or value != defaults[name]}


def added_defaults() -> dict[str, Any]:
    """What the fields mean that :func:`describe_run` leaves out."""
    return {field.name: field.default for field in fields(ImageNetRecipe) if field.name in ADDED_FIELDS}


def recipe_for(model: str, spec: str = "") -> ImageNetRecipe:
    """The paper's recipe for a network: that of the ShuffleNets for these, of the ResNets for all others."""
    shufflenet = model.startswith("shufflenet")
    return ImageNetRecipe(
        epochs=400 if shufflenet else 120,
        weight_decay=4e-5 if shufflenet else 1e-4,
        model=model,
        spec=spec,
        dropout=DROPOUT if spec else None,
    )


def _recipes() -> dict[str, ImageNetRecipe]:
    recipes = {}
    for network in NETWORKS:
        recipes[network.name] = recipe_for(network.model, network.spec)
        if network.name == LONGER[0]:
            recipes[f"{network.name}@{LONGER[1]}"] = replace(recipes[network.name], epochs=LONGER[1])
    return recipes


RECIPES: dict[str, ImageNetRecipe] = _recipes()
