"""Each function beside its physical limit, from the rows of ``bench ops``: a summary for the console and the report.

On the maps that all rows have. A function is compared with its limit (one read, one copy, …); in channels_last also
with itself on a contiguous map; in a half type also with itself in float32, per byte of the map: 1.00 means that the
time is in proportion to the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from deepsquare.paper.bench import _common
from deepsquare.paper.statistics import Median, bounds_label

LIMITS = {  # what a forward pass cannot do without
    "square_pooling": "one read",
    "square_excitation": "one copy",
    "square_excitation_add_relu": "one addition",
    "block_end": "one read and one addition",
    "relu_square": "one copy",
}
# The targets: relative to the limit, on maps of 14×14 and more and on smaller ones; channels_last beside contiguous.
TARGETS = {"square_pooling": (1.15, 1.3), "square_excitation": (1.1, 1.25)}
LAYOUT_TARGET = 1.2
SMALL = 14
BYTES_RATIO = 2  # of float32 to bfloat16 and float16


@dataclass(frozen=True)
class LimitLine:
    """A function in one layout and type beside one limit: by map, the ratio and the target, where there is one."""

    function: str
    layout: str
    dtype: str
    limit: str
    ratios: Mapping[str, Median]
    targets: Mapping[str, float]

    def misses(self, name: str) -> bool:
        return name in self.targets and self.ratios[name].value > self.targets[name]


def shared_maps(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The maps that all rows have, in the order of the first."""
    first, *others = measured.values()
    return [name for name in first if all(name in maps for maps in others)]


def limit_lines(measured: Mapping[str, Mapping[str, Any]], names: Sequence[str], kind: str) -> list[LimitLine]:
    """The lines of rows by ``function/layout/dtype``, of the pass ``kind``; a row of older versions has one line."""
    lines = []
    for row, maps in measured.items():
        function, layout, dtype = row.split("/")
        comparisons = {
            "ours / limit": (LIMITS[function], 1, _targets(function, names) if layout == "contiguous" else {}),
            "ours / contiguous": ("contiguous", 1, dict.fromkeys(names, LAYOUT_TARGET)),
            "ours / float32": ("float32, per byte", BYTES_RATIO, {}),
        }
        for key, (limit, factor, targets) in comparisons.items():
            if all(key in maps[name][kind] for name in names):
                ratios = {name: Median(*(factor * value for value in maps[name][kind][key])) for name in names}
                lines.append(LimitLine(function, layout, dtype, limit, ratios, targets))
    return lines


def _targets(function: str, names: Sequence[str]) -> dict[str, float]:
    if function not in TARGETS:
        return {}
    large, small = TARGETS[function]
    return {name: small if int(name.rpartition("×")[2]) < SMALL else large for name in names}


def limits_table(measured: Mapping[str, Mapping[str, Any]], rounds: int, kind: str) -> Table:
    """One line for each function, layout, type and limit; a ratio above its target stands beside it."""
    names = shared_maps(measured)
    table = _common.make_table(
        f"{kind.capitalize()} pass beside the limits",
        f"medians of {rounds} rounds ({bounds_label(rounds)}); > target where it is missed",
        ("function", "layout", "type", "relative to", *names),
    )
    for line in limit_lines(measured, names, kind):
        cells = (
            _common.format_median(line.ratios[name], 2) + (f" > {line.targets[name]:.2f}" if line.misses(name) else "")
            for name in names
        )
        table.add_row(line.function, line.layout, line.dtype, line.limit, *cells)
    return table
