"""What the rows of training runs must hold before anything is judged on them."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from deepsquare._terminal import printable
from deepsquare.paper.regimes import TEST_IMAGES
from deepsquare.results import Row, unpack_bits

TRAINED = ("cifar10", "cifar10_ablation", "tiny_imagenet")
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]


class Signs(msgspec.Struct):
    """Shares of test images with x_k > 0, by class."""

    all: list[Share]


class Reestimated(msgspec.Struct):
    """After new batch statistics."""

    accuracy: Share


class Probes(msgspec.Struct, rename={"means": "M", "pooled": "G", "moments": "M, S²", "control": "M, M²"}):
    """Accuracies of linear probes."""

    means: Share
    pooled: Share
    moments: Share
    control: Share


class Estimate(msgspec.Struct):
    """A mean over seeds with its interval."""

    mean: float
    low: float
    high: float


class AnyMetrics(msgspec.Struct):
    """The metrics that mean the same in the rows of every experiment that has them."""

    accuracy: Share | None = None
    top5: Share | None = None
    ema: Share | None = None
    diverged: str | bool | None = None
    correct: str | None = None
    cpu_seconds: Seconds | None = None
    train_loss: list[float | None] = []
    train_accuracy: list[Share | None] = []
    test_loss: list[float | None] = []
    test_accuracy: list[Share | None] = []
    max_rel_error: float | None = None
    fp32_error: float | None = None
    top1_agreement: Share | None = None
    refused: str | None = None
    undelegated_muls: int | None = None
    overflows: int | None = None
    components: dict[str, int] = {}
    verdicts: dict[str, dict[str, float]] = {}
    means: dict[str, Estimate] = {}
    against_relu: dict[str, Estimate] = {}
    difference: Estimate | UnsetType = UNSET


class AnyRecipe(msgspec.Struct):
    """The same of the fields of a recipe."""

    model: str | None = None
    spec: str | None = None
    schedule: str | None = None
    epochs: Annotated[int, Meta(ge=1)] | None = None
    runtime: str | None = None
    precision: str | None = None
    init: str | None = None
    init_from: str | None = None
    rounds: int | None = None
    threads: int | None = None
    case: str | None = None
    rank: int | None = None
    drawn: int | None = None
    seeds: int = 0
    steps: int | None = None
    task: str = ""
    metric: str = ""


class Metrics(AnyMetrics, kw_only=True):
    """The metrics of a training run that are read."""

    accuracy: Share | None
    diverged: str | bool | None
    softmin_signs: Signs | None = None
    reestimated_bn: Reestimated | None = None
    linear_probe: Probes | None = None


class Conditions(msgspec.Struct):
    """The fields of a recipe that are read."""

    model: str
    spec: str
    schedule: str
    epochs: Annotated[int, Meta(ge=1)]
    held_out: Annotated[int, Meta(ge=0)] = 0


def check_row(row: Row) -> None:
    """Fail if a row, above all a training run's, holds what none can have; ValueError names the row and the field."""
    try:
        msgspec.convert(row.recipe, AnyRecipe)
        msgspec.convert(row.metrics, AnyMetrics)
        if row.experiment not in TRAINED:
            return
        if row.seed < 0:
            raise ValueError(f"seed is {row.seed}; expected at least 0")
        recipe = msgspec.convert(row.recipe, Conditions)
        metrics = msgspec.convert(row.metrics, Metrics)
        if metrics.correct is not None:
            _check_correct(metrics.correct, metrics.accuracy, recipe.held_out or TEST_IMAGES)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(printable(f"{row.row} of {row.experiment}, seed {row.seed}: {error}")) from error


def _check_correct(text: str, accuracy: float | None, images: int) -> None:
    """The bits of the test images that were right must be as many as the images, and agree with the accuracy."""
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("correct is no base64") from None
    if len(packed) != -(-images // 8):
        raise ValueError(f"correct has {8 * len(packed)} bits; expected those of {images} images")
    share = float(unpack_bits(text, images).double().mean())
    if accuracy is not None and abs(share - accuracy) > 1e-4:
        raise ValueError(f"correct says that {share:.4f} of the images were right, and accuracy {accuracy}")
