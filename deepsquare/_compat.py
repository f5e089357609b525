"""Conversion of files and rows written by older versions; all compatibility code is in this file.

``python -m deepsquare._compat results/*.jsonl`` converts stores of rows in place; converting again changes nothing.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepsquare._files import atomic_write

RECIPE_KEYS = {
    "batch": "batch_size",
    "rate": "lr",
    "micro": "micro_batch_size",
    "pictures": "images",
    "optimiser": "optimizer",
    "initialisation": "initialization",
}
EXPORT_KEYS = {"pictures": "preprocessing", "classes": "class_names"}
METRIC_KEYS = {
    "difference": "max_rel_error",
    "rounding": "fp32_error",
    "agreement": "top1_agreement",
    "outside": "undelegated_ops",
    "squares_outside": "undelegated_muls",
    "products": "elementwise_muls",
}

CONTINUED = ", continued"  # at the end of a schedule


def upgrade_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a store with the names of this version."""
    recipe = rename_keys(row["recipe"], RECIPE_KEYS)
    if str(recipe.get("schedule", "")).endswith(CONTINUED):
        recipe |= {"schedule": recipe["schedule"].removesuffix(CONTINUED), "init_from": recipe["model"]}
    upgraded = {**row, "recipe": recipe}
    if row["experiment"] == "spirals":
        upgraded["row"] = row["row"].replace("optimiser", "optimizer")
        upgraded["metrics"] = rename_keys(row["metrics"], RECIPE_KEYS)
    elif row["experiment"] in ("bench", "int8", "parity"):
        upgraded["metrics"] = rename_keys(row["metrics"], METRIC_KEYS)
    return upgraded


def rename_keys(value: Any, names: Mapping[str, str]) -> Any:
    """The same value with the keys of its dictionaries renamed, at any depth."""
    if isinstance(value, dict):
        return {names.get(key, key): rename_keys(inner, names) for key, inner in value.items()}
    return [rename_keys(inner, names) for inner in value] if isinstance(value, list) else value


def upgrade_store(path: Path) -> int:
    """Convert the rows of a store in place; how many lines changed."""
    before = path.read_text(encoding="utf-8").splitlines()
    after = [json.dumps(upgrade_row(json.loads(line)), ensure_ascii=False, allow_nan=False) for line in before]
    if changed := sum(old != new for old, new in zip(before, after, strict=True)):
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in after), encoding="utf-8")
    return changed


def upgrade_header(header: dict[str, Any]) -> dict[str, Any]:
    """The header of a checkpoint in version 2; version 1 had ``arguments``, and ``pictures`` with ``classes``."""
    if header.get("version") != 1:
        return header
    upgraded = {key: value for key, value in header.items() if key not in ("arguments", "pictures")}
    preprocessing = rename_keys(header.get("pictures"), EXPORT_KEYS)
    return {**upgraded, "kwargs": header.get("arguments"), "preprocessing": preprocessing, "version": 2}


def upgrade_training_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A training state (``last.pt``) of version 2 with the names of version 3."""
    names = {"optimiser": "optimizer", "average": "ema"}
    upgraded = {names.get(key, key): value for key, value in state.items()}
    progress_keys = {"tally": "epoch_metrics", "losing": "bad_epochs", "right": "correct"}
    for key, inner_names in (("recipe", RECIPE_KEYS), ("progress", progress_keys)):
        if key in upgraded:
            upgraded[key] = rename_keys(upgraded[key], inner_names)
    return {**upgraded, "version": 3}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {upgrade_store(Path(name))} rows converted")
