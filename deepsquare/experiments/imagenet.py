"""Tables 4, 5 and 7: the paper's recipes for ImageNet, by name.

A recipe is called as its model and spec are: ``resnet18``, ``resnet18+pooling+excitation``, and
``resnet18+softmin@200`` for the row of 200 epochs.

NOTE not in paper: which networks count as "the CNNs with DeepSquare" for dropout. All with a spec do; the plain ones
are trained without.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepsquare.cost import Cost, cost_of
from deepsquare.experiments.tables import TABLE_4, TABLE_5, TABLE_7, Entry, PaperTable
from deepsquare.training import ImageNetRecipe

DROPOUT = 0.2
TRAIN_PICTURES, VAL_PICTURES = 1_281_167, 50_000  # of ImageNet 2012


@dataclass(frozen=True)
class Named:
    """A recipe with its row of the paper."""

    name: str
    table: PaperTable
    entry: Entry
    recipe: ImageNetRecipe

    @property
    def command(self) -> str:
        """On one machine of eight GPUs, as the paper's."""
        return f"torchrun --nproc-per-node 8 -m deepsquare train {self.name} --data DIR --precision float16"


def _named(table: PaperTable, entry: Entry) -> Named:
    shuffle = entry.model.startswith("shufflenet")
    recipe = ImageNetRecipe(
        epochs=entry.epochs or (400 if shuffle else 120),
        weight_decay=4e-5 if shuffle else 1e-4,
        model=entry.model,
        spec=entry.spec,
        dropout=DROPOUT if entry.spec else None,
    )
    name = "+".join(filter(None, (entry.model, entry.spec))) + (f"@{entry.epochs}" if entry.epochs else "")
    return Named(name, table, entry, recipe)


@dataclass(frozen=True)
class Machine:
    """What a device can do a second, and how many pictures it was seen to train ResNet50 on."""

    name: str
    macs: float
    bandwidth: float
    value: int  # bytes of a number
    resnet50: float  # pictures a second, of all devices together
    devices: int = 1


# Peaks by the maker's data sheets; pictures a second of NVIDIA/DeepLearningExamples (ResNet50 v1.5 for PyTorch, mixed
# precision, pytorch-21.03): 8 × V100 16 GB and 8 × A100 80 GB.
MACHINES = (
    Machine("V100", macs=62.5e12, bandwidth=0.9e12, value=2, resnet50=8322, devices=8),
    Machine("A100", macs=156e12, bandwidth=2.0e12, value=2, resnet50=16621, devices=8),
)
PASSES = 6  # over what a step keeps of the forward pass: written, read by the next layer, and back twice each


def seconds_at_best(cost: Cost, macs: float, bandwidth: float, value: int = 4) -> float:
    """Of a picture's training step: three times the forward multiply-accumulates, and the maps through the memory."""
    return 3 * cost.macs / macs + PASSES * cost.activation_bytes * value / 4 / bandwidth


def pictures_per_second(cost: Cost, machine: Machine) -> float:
    """As many more or fewer than of ResNet50 as its step would take less or more time at best."""
    best = seconds_at_best(cost_of("resnet50", ""), machine.macs, machine.bandwidth, machine.value)
    return machine.resnet50 * best / seconds_at_best(cost, machine.macs, machine.bandwidth, machine.value)


def hours(named: Named, machine: Machine) -> float:
    """To expect of a run, evaluation included, when the pictures come fast enough."""
    recipe = named.recipe
    speed = pictures_per_second(cost_of(recipe.model, recipe.spec), machine)
    return recipe.epochs * (TRAIN_PICTURES + VAL_PICTURES / 3) / speed / 3600


RECIPES: dict[str, Named] = {
    named.name: named
    for named in (_named(table, entry) for table in (TABLE_4, TABLE_5, TABLE_7) for entry in table.entries)
}


def named_recipe(name: str) -> Named:
    """The recipe of that name; ValueError with all names for another."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; choose from {', '.join(RECIPES)}")
    return RECIPES[name]
