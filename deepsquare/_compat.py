"""Conversion of files and rows written by older versions; all compatibility code is in this file.

``python -m deepsquare._compat results/*.jsonl`` converts stores of rows in place; converting again changes nothing.
"""

from __future__ import annotations

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
    upgraded = {**row, "recipe": _renamed(row["recipe"], RECIPE_KEYS)}
    recipe = upgraded["recipe"]
    if str(recipe.get("schedule", "")).endswith(CONTINUED):
        recipe |= {"schedule": recipe["schedule"].removesuffix(CONTINUED), "init_from": recipe["model"]}
    if row["experiment"] == "spirals":
        upgraded["row"] = row["row"].replace("optimiser", "optimizer")
        upgraded["metrics"] = _renamed(row["metrics"], RECIPE_KEYS)
    elif row["experiment"] in ("bench", "int8", "parity"):
        upgraded["metrics"] = _renamed(row["metrics"], METRIC_KEYS)
    return upgraded


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same value with the keys of its dictionaries renamed, at any depth."""
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(inner, names) for key, inner in value.items()}
    return [_renamed(inner, names) for inner in value] if isinstance(value, list) else value


def upgrade_store(path: Path) -> int:
    """Convert the rows of a store in place; how many lines changed."""
    before = path.read_text(encoding="utf-8").splitlines()
    after = [json.dumps(upgrade_row(json.loads(line)), ensure_ascii=False, allow_nan=False) for line in before]
    if changed := sum(old != new for old, new in zip(before, after, strict=True)):
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in after), encoding="utf-8")
    return changed


# ---- headers of checkpoints, and metadata of exported files ----


def upgrade_header(header: dict[str, Any]) -> dict[str, Any]:
    """The header of a checkpoint in version 2; version 1 had ``arguments``, and ``pictures`` with ``classes``."""
    if header.get("version") != 1:
        return header
    names = {"arguments": "kwargs", "pictures": "preprocessing"}
    upgraded = {names.get(key, key): value for key, value in header.items()}
    preprocessing = _renamed(upgraded.get("preprocessing"), {"classes": "class_names"})
    return {**upgraded, "preprocessing": preprocessing, "version": 2}


def upgrade_metadata(metadata: Any) -> Any:
    """The metadata of an exported file, in which ``preprocessing`` was ``pictures`` with ``classes``."""
    return _renamed(metadata, {"pictures": "preprocessing", "classes": "class_names"})


def upgrade_training_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A training state (``last.pt``) of version 2 with the names of version 3."""
    names = {"optimiser": "optimizer", "average": "ema"}
    upgraded = {names.get(key, key): value for key, value in state.items()}
    progress_keys = {"tally": "epoch_metrics", "losing": "bad_epochs", "right": "correct"}
    for key, inner_names in (("recipe", RECIPE_KEYS), ("progress", progress_keys)):
        if key in upgraded:
            upgraded[key] = _renamed(upgraded[key], inner_names)
    return {**upgraded, "version": 3}


def upgrade_run_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a training run (``run.json``) with the names of this version."""
    return dict(_renamed(dict(summary), RECIPE_KEYS))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {upgrade_store(Path(name))} rows converted")
