"""How long a recipe takes on eight GPUs, from the speed that ResNet50 was measured to train at."""

from __future__ import annotations

from dataclasses import dataclass

from deepsquare.cost import Cost, cost_of
from deepsquare.training import ImageNetRecipe

TRAIN_IMAGES, VAL_IMAGES = 1_281_167, 50_000  # of ImageNet 2012


@dataclass(frozen=True)
class Machine:
    """What a device can do a second, and how many images it was seen to train ResNet50 on."""

    name: str
    macs: float
    bandwidth: float
    value: int  # bytes of a number
    resnet50: float  # images a second, of all devices together
    devices: int = 1


# Peaks by the maker's data sheets; images a second of NVIDIA/DeepLearningExamples (ResNet50 v1.5 for PyTorch, mixed
# precision, pytorch-21.03): 8 × V100 16 GB and 8 × A100 80 GB.
MACHINES = (
    Machine("V100", macs=62.5e12, bandwidth=0.9e12, value=2, resnet50=8322, devices=8),
    Machine("A100", macs=156e12, bandwidth=2.0e12, value=2, resnet50=16621, devices=8),
)
PASSES = 6  # over what a step keeps of the forward pass: written, read by the next layer, and back twice each


def seconds_at_best(cost: Cost, macs: float, bandwidth: float, value: int = 4) -> float:
    """Of a image's training step: three times the forward multiply-accumulates, and the maps through the memory."""
    return 3 * cost.macs / macs + PASSES * cost.activation_bytes * value / 4 / bandwidth


def images_per_second(cost: Cost, machine: Machine) -> float:
    """As many more or fewer than of ResNet50 as its step would take less or more time at best."""
    best = seconds_at_best(cost_of("resnet50", ""), machine.macs, machine.bandwidth, machine.value)
    return machine.resnet50 * best / seconds_at_best(cost, machine.macs, machine.bandwidth, machine.value)


def hours(recipe: ImageNetRecipe, machine: Machine) -> float:
    """To expect of a run, evaluation included, when the images come fast enough."""
    speed = images_per_second(cost_of(recipe.model, recipe.spec), machine)
    return recipe.epochs * (TRAIN_IMAGES + VAL_IMAGES / 3) / speed / 3600
