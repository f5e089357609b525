"""Old names: files and rows written before the names of this version are read and converted here, and nowhere else.

``python -m deepsquare._compat results/*.jsonl`` converts stores of rows in place; a store that is current stays as it is.
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


def upgrade_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a store with the names of this version."""
    upgraded = {**row, "recipe": _renamed(row["recipe"], RECIPE_KEYS)}
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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {upgrade_store(Path(name))} rows converted")
