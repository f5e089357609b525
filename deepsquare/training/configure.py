"""The recipe of a network, with the changes of a file and of the command line."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from deepsquare.models import find_builder
from deepsquare.surgery import parse_spec
from deepsquare.training.recipe import (
    DEFAULT_LOADER,
    OUTCOME_FIELDS,
    RECIPES,
    ImageNetRecipe,
    LoaderConfig,
    TrainerConfig,
    convert_fields,
    convert_recipe_fields,
    recipe_for,
)


def override(recipe: ImageNetRecipe, changes: Mapping[str, Any]) -> tuple[ImageNetRecipe, list[str]]:
    """The recipe with some fields changed, and notes on others that follow.

    The lr scales with the batch size; images are evaluated at the size that they are trained at, resized in the
    recipe's ratio (256 for 224) before the crop.
    """
    changes, notes = convert_recipe_fields(type(recipe), changes), []
    batch_size, epochs = (changes.get(name, getattr(recipe, name)) for name in ("batch_size", "epochs"))
    if batch_size != recipe.batch_size and batch_size >= 1 and "lr" not in changes:
        changes["lr"] = recipe.lr * batch_size / recipe.batch_size
        notes.append(
            f"the lr follows the batch size: {recipe.lr:g} for {recipe.batch_size} is {changes['lr']:g} for "
            f"{batch_size}; set lr to choose another"
        )
    if epochs < recipe.warmup and "warmup" not in changes:
        changes["warmup"] = float(epochs)
        notes.append(f"the warm-up of {recipe.warmup:g} epochs is shortened to the {epochs} epochs of the run")
    if "size" in changes:
        changes.setdefault("eval_size", changes["size"])
    if "eval_size" in changes:
        changes.setdefault("eval_resize", round(changes["eval_size"] * recipe.eval_resize / recipe.eval_size))
    return replace(recipe, **changes), notes


def configure(
    name: str, changes: Mapping[str, Any], file: Path | None = None, loading: LoaderConfig = DEFAULT_LOADER
) -> tuple[ImageNetRecipe, TrainerConfig, list[str]]:
    """The recipe of a network and the config, changed by a file and then by ``changes``; and notes on what follows.

    ``name`` is one of RECIPES, or MODEL or MODEL+SPEC with the name of any model of torchvision or timm.
    ``changes`` may have fields of ImageNetRecipe and TrainerConfig, the file those that decide the result.
    """
    recipe, config = RECIPES.get(name) or _recipe_of_any(name), TrainerConfig(loading=loading)
    stored = _read_changes(file) if file else {}
    try:
        _apply(recipe, config, stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return _apply(recipe, config, {**stored, **changes})


def _recipe_of_any(name: str) -> ImageNetRecipe:
    """The recipe of a network that the paper does not train; ValueError if there is no such model or spec."""
    model, plus, spec = name.partition("+")
    find_builder(model)
    parse_spec(spec or plus)
    return recipe_for(model, spec)


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
