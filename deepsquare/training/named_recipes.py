"""The paper's recipes for ImageNet by name: ``resnet18``, ``resnet18+pooling+excitation``, ``resnet18+softmin@200``.

NOTE not in paper: which networks count as "the CNNs with DeepSquare" for dropout. All with a spec do; the plain ones
are trained without.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from deepsquare.models import NETWORKS
from deepsquare.training.config import DEFAULT_LOADER, OUTCOME_FIELDS, LoaderConfig, TrainerConfig
from deepsquare.training.recipe import ImageNetRecipe, convert_fields, override

DROPOUT = 0.2
LONGER = ("resnet18+softmin", 200)  # the one network that Table 4 trains for another number of epochs too


def _recipes() -> dict[str, ImageNetRecipe]:
    recipes = {}
    for network in NETWORKS:
        shufflenet = network.model.startswith("shufflenet")
        recipes[network.name] = ImageNetRecipe(
            epochs=400 if shufflenet else 120,
            weight_decay=4e-5 if shufflenet else 1e-4,
            model=network.model,
            spec=network.spec,
            dropout=DROPOUT if network.spec else None,
        )
        if network.name == LONGER[0]:
            recipes[f"{network.name}@{LONGER[1]}"] = replace(recipes[network.name], epochs=LONGER[1])
    return recipes


RECIPES: dict[str, ImageNetRecipe] = _recipes()


def configure(
    name: str, changes: Mapping[str, Any], file: Path | None = None, loading: LoaderConfig = DEFAULT_LOADER
) -> tuple[ImageNetRecipe, TrainerConfig, list[str]]:
    """A named recipe and the config, changed by a file and then by ``changes``; and notes on fields that follow.

    ``changes`` may have fields of ImageNetRecipe and TrainerConfig, the file those that decide the result.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; choose from {', '.join(RECIPES)}")
    recipe, config, stored = RECIPES[name], TrainerConfig(loading=loading), _read_changes(file) if file else {}
    try:
        _apply(recipe, config, stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return _apply(recipe, config, {**stored, **changes})


def _apply(
    recipe: ImageNetRecipe, config: TrainerConfig, changes: Mapping[str, Any]
) -> tuple[ImageNetRecipe, TrainerConfig, list[str]]:
    names = {field.name for field in fields(TrainerConfig)}
    recipe, notes = override(recipe, {name: value for name, value in changes.items() if name not in names})
    converted = convert_fields(TrainerConfig, {name: value for name, value in changes.items() if name in names})
    return recipe, replace(config, **converted), notes


def _read_changes(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected changes to a recipe as TOML or JSON")
    try:
        changes = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML or, with the suffix .json, JSON: {error}") from error
    if not isinstance(changes, dict):
        raise ValueError(f"{path} contains a {type(changes).__name__}; expected fields of a recipe with their values")
    config_fields = {field.name for kind in (TrainerConfig, LoaderConfig) for field in fields(kind)}
    if misplaced := sorted((config_fields - set(OUTCOME_FIELDS)) & changes.keys()):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise ValueError(f"{path}: {flags} is not part of a recipe; set it on the command line")
    return changes
