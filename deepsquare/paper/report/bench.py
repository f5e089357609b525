"""What was measured: techniques against the plain network, functions against the memory bandwidth, exported networks.

Of an exported network: how far it differs from its model, what int8 costs, and its latency.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepsquare.export.runtimes import RUNTIMES as EXPORT_RUNTIMES
from deepsquare.paper.report.evidence import bench_rows, grouped
from deepsquare.paper.statistics import Median, median_ratio
from deepsquare.results import Row
from deepsquare.surgery import TECHNIQUES

RUNTIMES = {name: runtime.label for name, runtime in EXPORT_RUNTIMES.items()}
PLAIN = {"": "plain", "again": "plain, again"}
PAPER_TERMS = {"pooling", "softmin", "excitation", "encoding"}
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
    return PLAIN.get(spec) or " & ".join(TERM_TITLES.get(term, term) for term in spec.split("+"))


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


def parities(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A model in each runtime: the largest difference over its specs; a baseline has a line of its own."""

    def line(row: Row) -> str:
        name, _, spec = row.row.partition("+")
        return name if not spec or set(spec.split("+")) <= PAPER_TERMS else row.row

    groups = grouped([row for row in rows if row.experiment == "parity"], line)
    return [{"name": name, **_parity(group)} for name, group in groups.items()]


def _parity(rows: Sequence[Row]) -> dict[str, Any]:
    exported = [row for row in rows if not row.metrics["refused"]]
    refused = [row for row in rows if row.metrics["refused"]]
    by_runtime = grouped(exported, lambda row: row.recipe["runtime"])

    def in_runtimes(metric: str, worst: Callable[[Iterable[float]], float]) -> dict[str, float]:
        return {kind: worst(row.metrics[metric] for row in group) for kind, group in by_runtime.items()}

    return {
        "specs": len({row.row for row in rows}),
        "fp32_error": max((row.metrics["fp32_error"] for row in exported), default=None),
        "max_rel_error": in_runtimes("max_rel_error", max),
        "top1_agreement": in_runtimes("top1_agreement", min),
        "undelegated_muls": sum(row.metrics["undelegated_muls"] for row in exported),
        "refused": [f"{RUNTIMES[row.recipe['runtime']]}: {row.metrics['refused']}" for row in refused],
    }


def int8_accuracies(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The accuracy in per cent, in float32 and in int8 by runtime, of the networks that were evaluated in float32."""
    groups = grouped([row for row in rows if row.experiment == "int8"], lambda row: (row.row, row.seed))
    networks = []
    for (name, seed), group in sorted(groups.items(), key=lambda item: (item[0][0].partition("+")[0], item[0])):
        metrics = {(row.recipe["runtime"], row.recipe["precision"]): row.metrics for row in group}
        if float32 := metrics.get(("onnx", "float32")):
            int8 = {kind: 100 * metrics[kind, "int8"]["accuracy"] for kind in RUNTIMES if (kind, "int8") in metrics}
            network = {"name": name, "seed": seed, "float32": 100 * float32["accuracy"], "int8": int8}
            networks.append(network | {"overflows": float32["overflows"]})
    return networks


def latencies(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """By backbone, the last measurement of each runtime and precision, by spec; the plain network is the first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    in_order = sorted(bench_rows(rows, "deploy").items(), key=lambda item: list(RUNTIMES).index(item[0].split("/")[-2]))
    for name, measured in in_order:
        backbone, runtime, precision = name.rsplit("/", 2)
        specs, rounds = measured[-1].metrics, measured[-1].recipe["rounds"]
        threads = [key for key in next(iter(specs.values())) if key.isdigit()]
        group = {"title": f"{RUNTIMES[runtime]}, {precision}", "specs": specs, "threads": threads, "rounds": rounds}
        groups.setdefault(backbone, []).append(group)
    return groups
