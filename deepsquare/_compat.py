"""Conversion of files written by older versions; all compatibility code is in this file."""

from collections.abc import Mapping
from typing import Any

RECIPE_KEYS = {
    "batch": "batch_size",
    "rate": "lr",
    "micro": "micro_batch_size",
    "pictures": "images",
    "optimiser": "optimizer",
    "initialisation": "initialization",
    "start": "pretrained",
}
EXPORT_KEYS = {"pictures": "preprocessing", "classes": "class_names"}


def rename_keys(value: Any, names: Mapping[str, str]) -> Any:
    """The same value with the keys of its dictionaries renamed, at any depth."""
    if isinstance(value, dict):
        return {names.get(key, key): rename_keys(inner, names) for key, inner in value.items()}
    return [rename_keys(inner, names) for inner in value] if isinstance(value, list) else value


def upgrade_header(header: dict[str, Any]) -> dict[str, Any]:
    """The header of a checkpoint in version 2; version 1 had ``arguments``, and ``pictures`` with ``classes``."""
    if header.get("version") != 1:
        return header
    upgraded = {key: value for key, value in header.items() if key not in ("arguments", "pictures")}
    preprocessing = rename_keys(header.get("pictures"), EXPORT_KEYS)
    return {**upgraded, "kwargs": header.get("arguments"), "preprocessing": preprocessing, "version": 2}


def upgrade_training_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A training state (``last.pt``) of version 2 or 3 with the names of today; version 4 added a checksum."""
    names = {"optimiser": "optimizer", "average": "ema"}
    upgraded = {names.get(key, key): value for key, value in state.items()}
    progress_keys = {"tally": "epoch_metrics", "losing": "bad_epochs", "right": "correct"}
    for key, inner_names in (("recipe", RECIPE_KEYS), ("progress", progress_keys)):
        if key in upgraded:
            upgraded[key] = rename_keys(upgraded[key], inner_names)
    return {**upgraded, "version": 4}
