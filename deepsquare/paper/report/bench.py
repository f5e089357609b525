"""What ``deepsquare bench`` measured: techniques against the plain network, functions against the memory bandwidth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepsquare.cost import Cost
from deepsquare.paper.report.evidence import bench_rows
from deepsquare.paper.statistics import Median, median_ratio
from deepsquare.results import Row
from deepsquare.surgery import TECHNIQUES

TERM_TITLES = {"gsop1": "GSoP-Net1", "gsop2": "GSoP-Net2"}
TERM_TITLES |= {term: technique.title for term, technique in TECHNIQUES.items()}
TITLES = {
    "square_pooling": "Square-Pooling",
    "square_excitation": "Square-Excitation",
    "square_excitation_add_relu": "Square-Excitation + residual, ReLU",
    "relu_square": "ReLU-Square",
}
MAPS_MOVED = {"square_pooling": 1, "square_excitation": 2, "square_excitation_add_relu": 3, "relu_square": 2}


def spec_title(spec: str) -> str:
    """The techniques of a spec by their titles."""
    return " & ".join(TERM_TITLES.get(term, term) for term in spec.split("+"))


@dataclass(frozen=True)
class SpecTimes:
    """A spec on a backbone: its cost, and its times relative to the plain network, by workload."""

    title: str
    cost: Cost
    base: Cost
    times: Mapping[str, Median]
    without_kernels: Mapping[str, Median]  # the same by PyTorch's operations; empty where there is no kernel

    def added(self, field: str) -> float:
        """What the spec adds to a field of the plain network's cost, as a fraction."""
        before, after = (float(getattr(cost, field)) for cost in (self.base, self.cost))
        return after / before - 1


@dataclass(frozen=True)
class Backbone:
    """All specs that were measured on a backbone."""

    threads: int
    specs: Mapping[str, SpecTimes]

    @property
    def workloads(self) -> tuple[str, ...]:
        """What was timed."""
        return tuple(next(iter(self.specs.values())).times)


def backbones(rows: Sequence[Row]) -> dict[str, Backbone]:
    """The measurements by backbone and spec; those at the commit of the last one are pooled."""
    return {
        name: Backbone(
            measured[-1].recipe["threads"],
            {spec: _spec_times(spec, measured) for row in measured for spec in row.metrics if spec},
        )
        for name, measured in bench_rows(rows, "models").items()
    }


def _spec_times(spec: str, rows: Sequence[Row]) -> SpecTimes:
    with_spec = [row for row in rows if spec in row.metrics]
    last = with_spec[-1]
    pooled = [row for row in with_spec if (row.commit, row.hardware) == (last.commit, last.hardware)]
    seconds = [row.metrics[spec]["seconds"] for row in pooled]

    def ratios(network: str) -> dict[str, Median]:
        return {
            workload: median_ratio(*([t for times in seconds for t in times[workload][n]] for n in (network, "base")))
            for workload, times in seconds[0].items()
            if network in times
        }

    base, cost = (Cost(**last.metrics[name]["cost"]) for name in ("", spec))
    return SpecTimes(spec_title(spec), cost, base, ratios("own"), ratios("without_kernels"))


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
    functions = []
    for name, measured in bench_rows(rows, "ops").items():
        function, layout, dtype = name.split("/")
        functions.append(OpTimes(function, layout, dtype, measured[-1].metrics, measured[-1].recipe))
    return sorted(functions, key=lambda times: (list(TITLES).index(times.function), times.dtype != "float32"))
