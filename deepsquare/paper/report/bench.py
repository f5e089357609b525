"""What ``deepsquare bench`` measured: techniques against the plain network, functions against the memory bandwidth."""

from collections.abc import Mapping, Sequence
from typing import Any

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


def backbones(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The measurements by backbone and spec; those at the commit of the last one are pooled."""
    return {
        name: {
            "threads": measured[-1].recipe["threads"],
            "specs": {spec: _spec_times(spec, measured) for row in measured for spec in row.metrics if spec},
        }
        for name, measured in bench_rows(rows, "models").items()
    }


def _spec_times(spec: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What a spec adds to the plain network's cost, and its times relative to it, by workload."""
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

    base, cost = (last.metrics[name]["cost"] for name in ("", spec))
    return {
        "title": spec_title(spec),
        "parameters": cost["parameters"] - base["parameters"],
        "added": {field: cost[field] / base[field] - 1 for field in ("parameters", "macs", "activation_bytes")},
        "times": ratios("own"),
        "without_kernels": ratios("without_kernels"),  # empty where there is no kernel
    }


def op_times(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The last measurement of each function, layout and dtype: ``maps`` by shape, and what it compares."""
    functions = []
    for name, measured in bench_rows(rows, "ops").items():
        function, layout, dtype = name.split("/")
        maps, recipe = measured[-1].metrics, measured[-1].recipe
        first = next(iter(maps.values()))
        passes = [kind for kind, value in first.items() if isinstance(value, Mapping)]
        alternatives = [other.removesuffix(" / ours") for other in first[passes[0]] if other.endswith(" / ours")]
        op = {"function": function, "title": TITLES[function], "layout": layout, "dtype": dtype, "recipe": recipe}
        functions.append(op | {"maps": maps, "passes": passes, "alternatives": alternatives})
    return sorted(functions, key=lambda op: (list(TITLES).index(op["function"]), op["dtype"] != "float32"))


def bandwidths(op: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """By implementation, (bytes of the map, GB/s of the forward pass) in the order of the sizes."""
    by_size = {times["bytes"]: times for times in reversed(list(op["maps"].values()))}  # the first of each size
    points: dict[str, list[tuple[float, float]]] = {}
    for size, measured in sorted(by_size.items()):
        times = measured[op["passes"][0]]
        ours = times["seconds"][0]
        seconds = {"limit": times["limit"][0], "ours": ours}
        seconds |= {name: ours * times[f"{name} / ours"][0] for name in ("compiled", "formula")}
        for name, value in seconds.items():
            points.setdefault(name, []).append((size, MAPS_MOVED[op["function"]] * size / 1e9 / value))
    return points
