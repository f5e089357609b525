"""The input that a model is traced with: its shape, and what is said where the model cannot be run on it."""

from collections.abc import Iterator
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


def example_shape(model: nn.Module) -> tuple[int, ...]:
    """An input shape without the batch: the one it was equipped with, timm's, or what fits the first convolution."""
    record = getattr(model, "deepsquare_record", None)
    if record is not None:
        return tuple(record.sites.input_shape)
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("input_size"):
        return tuple(config["input_size"])
    sizes: dict[int, tuple[int, ...]] = {1: (1024,), 2: (224, 224), 3: (16, 112, 112)}
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            return module.in_channels, *sizes[len(module.kernel_size)]
    raise ValueError(
        f"{type(model).__name__} has no convolution (looked for nn.Conv1d, nn.Conv2d, nn.Conv3d); "
        "DeepSquare's sites are defined for CNNs only"
    )


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
        raise ValueError(
            f"{type(model).__name__} could not be run on an input of shape {shape}: {str(error).rstrip('.')}. "
            "Give the shape of one input without the batch as input_shape=(channels, height, width)"
        ) from error


def _depends_on_values(model: nn.Module, op: str) -> str:
    def convolutions(module: nn.Module) -> int:
        return sum(isinstance(m, CONVOLUTIONS) for m in module.modules())

    counts = {name: convolutions(child) for name, child in model.named_children()}
    largest = max(counts, key=lambda name: counts[name], default="")
    part = f"model.{largest}" if largest and 2 * counts[largest] > convolutions(model) else "model.PART"
    return (
        f"the forward of {type(model).__name__} cannot be traced, since it depends on the values of its input ({op}). "
        f"Equip a part of it that does not: equip({part}, spec, input_shape=(channels, height, width))"
    )
