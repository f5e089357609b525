"""Exported networks: how far they differ from their models, what int8 costs, and their latency."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Latencies:
    """A backbone in one runtime and precision: measurements by spec, the plain network first."""

    runtime: str
    precision: str
    specs: Mapping[str, Mapping[str, Any]]
    rounds: int

    @property
    def title(self) -> str:
        """Runtime and precision."""
        return f"{RUNTIMES[self.runtime]}, {self.precision}"

    @property
    def threads(self) -> list[str]:
        """The numbers of threads."""
        return [name for name in next(iter(self.specs.values())) if name.isdigit()]


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


def latencies(rows: Sequence[Row]) -> dict[str, list[Latencies]]:
    """By backbone, the last measurement of each runtime and precision."""
    groups: dict[str, list[Latencies]] = {}
    for name, measured in bench_rows(rows, "deploy").items():
        backbone, runtime, precision = name.rsplit("/", 2)
        metrics, recipe = measured[-1].metrics, measured[-1].recipe
        groups.setdefault(backbone, []).append(Latencies(runtime, precision, metrics, recipe["rounds"]))
    return {name: sorted(group, key=lambda m: list(RUNTIMES).index(m.runtime)) for name, group in groups.items()}
