"""The paper's recipes for ImageNet by name: ``resnet18``, ``resnet18+pooling+excitation``, ``resnet18+softmin@200``.

NOTE not in paper: which networks count as "the CNNs with DeepSquare" for dropout. All with a spec do; the plain ones
are trained without.
"""

from __future__ import annotations

from dataclasses import replace

from deepsquare.models import NETWORKS, Network
from deepsquare.training.recipe import ImageNetRecipe

DROPOUT = 0.2
LONGER = ("resnet18+softmin", 200)  # the one network that Table 4 trains for another number of epochs too


def _recipe(network: Network) -> ImageNetRecipe:
    shufflenet = network.model.startswith("shufflenet")
    return ImageNetRecipe(
        epochs=400 if shufflenet else 120,
        weight_decay=4e-5 if shufflenet else 1e-4,
        model=network.model,
        spec=network.spec,
        dropout=DROPOUT if network.spec else None,
    )


def _named() -> dict[str, ImageNetRecipe]:
    recipes = {}
    for network in NETWORKS:
        recipes[network.name] = _recipe(network)
        if network.name == LONGER[0]:
            recipes[f"{network.name}@{LONGER[1]}"] = replace(recipes[network.name], epochs=LONGER[1])
    return recipes


RECIPES: dict[str, ImageNetRecipe] = _named()


def named_recipe(name: str) -> ImageNetRecipe:
    """The recipe of that name; ValueError with all names for another."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; choose from {', '.join(RECIPES)}")
    return RECIPES[name]
