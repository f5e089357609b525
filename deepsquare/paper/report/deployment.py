"""Exported networks: how far they differ from their models, what int8 costs, and their latency."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepsquare.export.runtimes import RUNTIMES as EXPORT_RUNTIMES
from deepsquare.paper.report.bench import spec_title
from deepsquare.paper.report.evidence import bench_rows, grouped
from deepsquare.results import Row

RUNTIMES = {name: runtime.label for name, runtime in EXPORT_RUNTIMES.items()}
PLAIN = {"": "plain", "again": "plain, again"}
PAPER_TERMS = {"pooling", "softmin", "excitation", "encoding"}


def title(spec: str) -> str:
    """The techniques of a network, by their titles."""
    return PLAIN.get(spec) or spec_title(spec)


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
