"""The times of the functions relative to the memory-bandwidth limit, as ``deepsquare bench ops`` stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepsquare.paper.report.evidence import bench_rows
from deepsquare.results import Row

TITLES = {
    "square_pooling": "Square-Pooling",
    "square_excitation": "Square-Excitation",
    "square_excitation_add_relu": "Square-Excitation + residual, ReLU",
    "relu_square": "ReLU-Square",
}
MAPS_MOVED = {"square_pooling": 1, "square_excitation": 2, "square_excitation_add_relu": 3, "relu_square": 2}


@dataclass(frozen=True)
class OpTimes:
    """A function in one memory layout and dtype, measured on feature maps of several sizes."""

    function: str
    layout: str
    dtype: str
    maps: Mapping[str, Any]  # measurements by the shape of the map
    recipe: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The function's name in the paper."""
        return TITLES[self.function]

    @property
    def passes(self) -> list[str]:
        """What was timed: the forward pass, and forward and backward."""
        return [name for name, value in next(iter(self.maps.values())).items() if isinstance(value, Mapping)]

    @property
    def alternatives(self) -> list[str]:
        """The implementations that ours is compared with."""
        times = next(iter(self.maps.values()))[self.passes[0]]
        return [name.removesuffix(" / ours") for name in times if name.endswith(" / ours")]

    def memory(self, shape: str, implementation: str) -> float:
        """Bytes that the forward pass allocates, divided by the bytes of the map."""
        times = self.maps[shape]
        return float(times[self.passes[0]]["allocated"][implementation] / times["bytes"])

    def bandwidths(self) -> dict[str, list[tuple[float, float]]]:
        """By implementation, (bytes of the map, GB/s of the forward pass) in the order of the sizes."""
        by_size = {times["bytes"]: times for times in reversed(list(self.maps.values()))}  # the first of each size
        points: dict[str, list[tuple[float, float]]] = {}
        for size, measured in sorted(by_size.items()):
            times = measured[self.passes[0]]
            ours = times["seconds"][0]
            seconds = {"limit": times["limit"][0], "ours": ours}
            seconds |= {name: ours * times[f"{name} / ours"][0] for name in ("compiled", "formula")}
            for name, value in seconds.items():
                points.setdefault(name, []).append((size, MAPS_MOVED[self.function] * size / 1e9 / value))
        return points


def op_times(rows: Sequence[Row]) -> list[OpTimes]:
    """The last measurement of each function, layout and dtype."""
    latest = {name: measured[-1] for name, measured in bench_rows(rows, "ops").items()}
    functions = [OpTimes(*name.split("/"), row.metrics, row.recipe) for name, row in latest.items()]
    return sorted(functions, key=lambda times: (list(TITLES).index(times.function), times.dtype != "float32"))
