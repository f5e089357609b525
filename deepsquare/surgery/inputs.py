"""The input that a model is traced with: its shape, and what is said where the model cannot be run on it."""

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Other input sizes, tried in this order: networks for CIFAR often end in a pooling with a fixed window; detectors and
# some video networks need more than the usual size.
OTHER_SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((32,),),
    2: ((32, 32), (320, 320)),
    3: ((32, 32, 32), (16, 224, 224)),
}
MAX_VALUES = 2**26  # of one input: 256 MiB in float32, as 64 frames of 1024×1024 in one channel
AXES = {1: "(channels, length)", 2: "(channels, height, width)", 3: "(channels, frames, height, width)"}


def example_shape(model: nn.Module, input_shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """An input shape without the batch: as given, as it was equipped with, timm's, or what fits the first convolution.

    timm's has three channels whatever ``in_chans`` is; in a first convolution a multiple of them is no contradiction,
    since it may read several positions as channels.
    """
    if input_shape is not None:
        try:
            shape = tuple(map(operator.index, input_shape))
        except TypeError:
            message = f"input_shape is {input_shape!r}; expected {_axes(model)} as integers, without the batch"
            raise TypeError(message) from None
        check_sides(shape)
        return shape
    record = getattr(model, "deepsquare_record", None)
    if record is not None:
        return tuple(record.sites.input_shape)
    first = _first_convolution(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("input_size"):
        channels, *size = config["input_size"]
        return (channels if first is None or first.in_channels % channels == 0 else first.in_channels), *size
    if first is None:
        raise ValueError(
            f"{type(model).__name__} has no convolution (looked for nn.Conv1d, nn.Conv2d, nn.Conv3d); "
            "DeepSquare's sites are defined for CNNs only"
        )
    sizes: dict[int, tuple[int, ...]] = {1: (1024,), 2: (224, 224), 3: (16, 112, 112)}
    return first.in_channels, *sizes[len(first.kernel_size)]


def check_sides(shape: Sequence[int]) -> None:
    """Raise unless an input of ``shape`` can be: every side at least 1, and of the size of images and clips."""
    if len(shape) > 5 or min(shape, default=0) < 1 or math.prod(shape) > MAX_VALUES:
        raise ValueError(
            f"input_shape is {tuple(shape[:6])}; expected up to 5 sides of at least 1, with up to 2**26 values in all"
        )


def _first_convolution(model: nn.Module) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    return next((module for module in model.modules() if isinstance(module, CONVOLUTIONS)), None)


def _axes(model: nn.Module) -> str:
    first = _first_convolution(model)
    return AXES[len(first.kernel_size) if first else 2]


def float_tensor(model: nn.Module) -> Tensor:
    """A tensor on the device and in the floating-point type of the model's parameters."""
    return next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))


@contextmanager
def explain_shape(model: nn.Module, shape: tuple[int, ...]) -> Iterator[None]:
    """Turn an error of the model's forward pass on a batch of ``shape`` into one that asks for ``input_shape``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            raise ValueError(_depends_on_values(model, str(error))) from error
        advice = f"Give the shape of one input without the batch as input_shape={_axes(model)}"
        if isinstance(error, (TypeError, KeyError, IndexError, AttributeError)):  # of a dict, a list, two tensors
            advice += ". If it takes anything else than one tensor, equip a part of it that takes one"
        message = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{type(model).__name__} could not be run on an input of shape {shape}: {message}. {advice}"
        ) from error


def _depends_on_values(model: nn.Module, op: str) -> str:
    def convolutions(module: nn.Module) -> int:
        return sum(isinstance(m, CONVOLUTIONS) for m in module.modules())

    counts = {name: convolutions(child) for name, child in model.named_children()}
    largest = max(counts, key=lambda name: counts[name], default="")
    part = f"model.{largest}" if largest and 2 * counts[largest] > convolutions(model) else "model.PART"
    return (
        f"the forward of {type(model).__name__} cannot be traced, since it depends on the values of its input ({op}). "
        f"Equip (or fold) a part of it that does not: equip({part}, spec, input_shape={_axes(model)})"
    )
