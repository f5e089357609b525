"""What was measured: techniques against the plain network, functions against the memory bandwidth, exported networks.

A table has the measurements of one row, which one run wrote.
Of an exported network: how far it differs from its model, what int8 costs, and its latency.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepsquare.export.runtimes import RUNTIMES as EXPORT_RUNTIMES
from deepsquare.paper.bench.limits import limit_lines, shared_maps
from deepsquare.paper.bench.networks import COMPILED, FUSED, OWN, WITHOUT_KERNELS
from deepsquare.paper.bench.ratios import LABELS, PLAIN_LABELS, iteration_counts, relative_times
from deepsquare.paper.report.evidence import bench_rows, grouped
from deepsquare.paper.statistics import bounds_label, has_interval, median_ratio
from deepsquare.paper.tables import TABLE_6
from deepsquare.results import Row
from deepsquare.surgery import TECHNIQUES

RUNTIMES = {name: runtime.label for name, runtime in EXPORT_RUNTIMES.items()}
PLAIN = {"": "plain", "again": "plain, again"}
NAMES = {FUSED: "block ends fused", COMPILED: "compiled"}  # of networks that a run could not measure
PAPER_TERMS = {"pooling", "softmin", "excitation", "encoding"}
TERM_TITLES = {"gsop1": "GSoP-Net1", "gsop2": "GSoP-Net2"}
TERM_TITLES |= {term: technique.title for term, technique in TECHNIQUES.items()}
TITLES = {
    "square_pooling": "Square-Pooling",
    "square_excitation": "Square-Excitation",
    "square_excitation_add_relu": "Square-Excitation + residual, ReLU",
    "block_end": "End of a block in training",
    "relu_square": "ReLU-Square",
}
GEM_FORMS = {  # in the rows of Square-Pooling
    "ours and a square root": "Square-Pooling by our kernel, then a square root",
    "formula": "Square-Pooling in plain operations",
    "GeM, plain": "GeM in plain operations",
    "gem_pooling": "GeM by our gem_pooling",
}
MAPS_MOVED = {
    "square_pooling": 1,
    "square_excitation": 2,
    "square_excitation_add_relu": 3,
    "block_end": 4,
    "relu_square": 2,
}


def spec_title(spec: str) -> str:
    """The techniques of a spec by their titles."""
    return PLAIN.get(spec) or " & ".join(TERM_TITLES.get(term, term) for term in spec.split("+"))


def conditions_text(row: Row) -> str:
    """Date, commit and hardware of a measurement."""
    device = row.recipe.get("device", "cpu")
    commit = f"commit {row.commit[:7]}" if row.commit else ""
    return ", ".join(filter(None, (row.date[:10], commit, row.hardware, device if device != "cpu" else "")))


def backbones(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """By backbone, a table for each run, the newest first; without runs that a newer run has measured all of."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, measured in bench_rows(rows, "models").items():
        covered: list[set[tuple[str, str]]] = []
        for row in reversed(measured):
            shown = {(spec, kind) for spec in row.metrics for kind in relative_times(row.metrics, spec)}
            if not any(shown <= newer for newer in covered):
                covered.append(shown)
                tables.setdefault(name, []).append(_spec_table(row))
    return tables


def _spec_table(row: Row) -> dict[str, Any]:
    """What each spec of a run adds to the plain network's cost, and its times relative to it, by workload."""
    skipped = {(spec, name): reason for spec in row.metrics for name, reason in _skipped(row, spec).items()}
    return {
        "threads": row.recipe["threads"],
        "conditions": conditions_text(row),
        "interleaved": "interleaved" in row.recipe,
        "bounds": {kind: bounds_label(n, "iterations") for kind, n in iteration_counts(row.metrics).items()},
        "plain": {PLAIN_LABELS[kind]: times for kind, times in relative_times(row.metrics, "").items()},
        "specs": {spec: _spec_times(spec, row) for spec in row.metrics if spec},
        "skipped": [f"{spec_title(spec)}, {NAMES[name]}: {reason}" for (spec, name), reason in skipped.items()],
    }


def _skipped(row: Row, spec: str) -> Mapping[str, str]:
    reasons: Mapping[str, str] = row.metrics[spec].get("skipped", {})
    return reasons


def _spec_times(spec: str, row: Row) -> dict[str, Any]:
    base, cost = (row.metrics[name]["cost"] for name in ("", spec))
    times = relative_times(row.metrics, spec)
    return {
        "title": spec_title(spec),
        "parameters": cost["parameters"] - base["parameters"],
        "added": {field: cost[field] / base[field] - 1 for field in ("parameters", "macs", "activation_bytes")},
        "times": times[OWN],
        "without_kernels": times.get(WITHOUT_KERNELS, {}),  # empty where there is no kernel
        "details": {LABELS[kind]: of_kind for kind, of_kind in times.items() if kind in LABELS},
    }


def table_6(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The newest run on ResNet50 that measured every method of Table 6, and whether SP & SEx adds the least time."""
    required = {entry.spec for entry in TABLE_6.entries}
    measured = bench_rows(rows, "models").get("resnet50", [])
    row = next((row for row in reversed(measured) if required <= row.metrics.keys()), None)
    if row is None:
        return None
    table = _spec_table(row)
    inference = [workload for workload in table["bounds"] if workload.startswith("inference")]
    forms = {"own": "with our kernels", "without_kernels": "in plain operations"}
    claims = [
        {"workload": workload, "form": label, **_least_time(row, workload, form)}
        for form, label in forms.items()
        for workload in inference
    ]
    return table | {"claims": claims}


def _least_time(row: Row, workload: str, form: str) -> dict[str, Any]:
    """The paper's statement on the inference time: the other methods of Table 6 relative to SP & SEx.

    It holds if the interval of every ratio lies above 1, and does not if any lies below; a range decides nothing.
    Overheads are divided rather than times, so that rows in which each spec has base times of its own are read too.
    """

    def overheads(spec: str, network: str) -> list[float]:
        times = row.metrics[spec]["seconds"][workload]
        return [value / base for value, base in zip(times[network], times["base"], strict=True)]

    ours = overheads(TABLE_6.entries[0].spec, form)
    others = {entry.label: median_ratio(overheads(entry.spec, "own"), ours) for entry in TABLE_6.entries[1:]}
    decided = {label for label, ratio in others.items() if has_interval(len(ours)) and not ratio.low <= 1 <= ratio.high}
    faster = [label for label, ratio in others.items() if label in decided and ratio.high < 1]
    undecided = [label for label in others if label not in decided]
    if "ge_theta_minus" in row.metrics:  # beside the statement, which is about Table 6
        others["GE-θ⁻, not in Table 6"] = median_ratio(overheads("ge_theta_minus", "own"), ours)
    return {"others": others, "faster": faster, "undecided": undecided}


def op_times(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The last measurement of each function, layout and dtype: ``maps`` by shape, and what it compares."""
    functions = []
    for name, measured in bench_rows(rows, "ops").items():
        function, layout, dtype = name.partition(", ")[0].split("/")
        maps, recipe = measured[-1].metrics, measured[-1].recipe
        first = next(iter(maps.values()))
        passes = [kind for kind, value in first.items() if isinstance(value, Mapping)]
        alternatives = [other.removesuffix(" / ours") for other in first[passes[0]] if other.endswith(" / ours")]
        op = {"function": function, "title": TITLES[function], "layout": layout, "dtype": dtype, "recipe": recipe}
        op["device"] = recipe.get("device", "cpu")
        op |= {"conditions": conditions_text(measured[-1]), "bounds": bounds_label(recipe["rounds"])}
        functions.append(op | {"maps": maps, "passes": passes, "alternatives": alternatives})
    return sorted(functions, key=lambda op: (list(TITLES).index(op["function"]), op["dtype"] != "float32"))


def on_cpu_in_float32(functions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of :func:`op_times` that were measured on the CPU, in float32 and the contiguous layout."""
    usual = ("contiguous", "float32", "cpu")
    return [op for op in functions if (op["layout"], op["dtype"], op["device"]) == usual]


def limits(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each run, what its functions take beside their limits in the forward pass, on the maps that all have."""
    tables = []
    for conditions, of_run in grouped(functions, lambda op: (op["conditions"], op["recipe"]["threads"])).items():
        measured = {f"{op['function']}/{op['layout']}/{op['dtype']}": op["maps"] for op in of_run}
        names = shared_maps(measured)
        lines = limit_lines(measured, names, of_run[0]["passes"][0])
        tables.append({"conditions": conditions[0], "threads": conditions[1], "maps": names, "lines": lines})
    return tables


def gem_costs(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Section 4.2: by pass and form, the lowest and the highest time of GeM with p = 2 relative to Square-Pooling."""
    op = next((op for op in on_cpu_in_float32(functions) if op["function"] == "square_pooling"), None)
    if op is None or not GEM_FORMS.keys() <= set(op["alternatives"]):
        return None  # a row from before GeM was measured has no forms of it
    maps = op["maps"].values()
    ratios = {
        title: {kind: [times[kind][f"{name} / ours"][0] for times in maps] for kind in op["passes"]}
        for name, title in GEM_FORMS.items()
    }
    ranges = {form: {kind: (min(r), max(r)) for kind, r in of.items()} for form, of in ratios.items()}
    return {"ranges": ranges, "passes": op["passes"], "conditions": op["conditions"]}


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
        group |= {"bounds": bounds_label(rounds), "conditions": conditions_text(measured[-1])}
        groups.setdefault(backbone, []).append(group)
    return groups
