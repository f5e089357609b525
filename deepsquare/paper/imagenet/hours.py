"""Estimated training time of a recipe on eight GPUs, from the measured throughput of ResNet50."""

from dataclasses import dataclass

from deepsquare.cost import Cost, cost_of
from deepsquare.training import ImageNetRecipe

TRAIN_IMAGES, VAL_IMAGES = 1_281_167, 50_000  # of ImageNet 2012


@dataclass(frozen=True)
class Machine:
    """Peak throughput of a device, and its measured training throughput of ResNet50."""

    name: str
    macs: float  # per second
    bandwidth: float  # bytes per second
    value: int  # bytes per activation
    resnet50: float  # images per second, all devices together
    devices: int = 1


# Peaks from the data sheets; images per second from NVIDIA/DeepLearningExamples (ResNet50 v1.5 for PyTorch, mixed
# precision, pytorch-21.03): 8 × V100 16 GB and 8 × A100 80 GB.
MACHINES = (
    Machine("V100", macs=62.5e12, bandwidth=0.9e12, value=2, resnet50=8322, devices=8),
    Machine("A100", macs=156e12, bandwidth=2.0e12, value=2, resnet50=16621, devices=8),
)
PASSES = 6  # over the saved activations in a step: written, read by the next layer, twice each in the backward pass


def seconds_at_best(cost: Cost, macs: float, bandwidth: float, value: int = 4) -> float:
    """Lower bound for one image's training step: three times the forward MACs, plus the memory traffic."""
    return 3 * cost.macs / macs + PASSES * cost.activation_bytes * value / 4 / bandwidth


def hours(recipe: ImageNetRecipe, machine: Machine) -> float:
    """Estimated hours of a run with evaluation, if data loading keeps up: ResNet50's, scaled by the lower bounds."""
    peaks = machine.macs, machine.bandwidth, machine.value
    resnet50 = seconds_at_best(cost_of("resnet50", ""), *peaks)
    scale = seconds_at_best(cost_of(recipe.model, recipe.spec), *peaks) / resnet50
    return recipe.epochs * (TRAIN_IMAGES + VAL_IMAGES / 3) * scale / machine.resnet50 / 3600
