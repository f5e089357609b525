"""Exported networks: how far they differ from their models, what int8 costs, and their latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepsquare.export.runtimes import RUNTIMES as EXPORT_RUNTIMES
from deepsquare.paper.report.baselines import spec_title
from deepsquare.results import Row

RUNTIMES = {name: runtime.label for name, runtime in EXPORT_RUNTIMES.items()}
PLAIN = {"": "plain", "again": "plain, again"}
PAPER_TERMS = {"pooling", "softmin", "excitation", "encoding"}


def title(spec: str) -> str:
    """The techniques of a network, by their titles."""
    return PLAIN.get(spec) or spec_title(spec)


@dataclass(frozen=True)
class Parity:
    """A model in each runtime: the largest difference over its specs, and the exports that were refused."""

    name: str
    specs: int
    fp32_error: float | None  # the largest of PyTorch's own float32
    max_rel_error: Mapping[str, float]  # by runtime
    top1_agreement: Mapping[str, float]  # by runtime, the lowest
    undelegated_muls: int
    refused: Sequence[str]


@dataclass(frozen=True)
class Int8Accuracy:
    """A trained network's accuracy in per cent, in float32 and in int8 by runtime."""

    name: str
    seed: int
    float32: float
    int8: Mapping[str, float]
    overflows: int  # images without finite logits, in float32


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


def parities(rows: Sequence[Row]) -> list[Parity]:
    """Parity by model; a baseline has a line of its own."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.experiment == "parity":
            name, _, spec = row.row.partition("+")
            groups.setdefault(name if not spec or set(spec.split("+")) <= PAPER_TERMS else row.row, []).append(row)
    return [_parity(name, group) for name, group in groups.items()]


def _parity(name: str, rows: Sequence[Row]) -> Parity:
    exported = [row for row in rows if not row.metrics["refused"]]
    by_runtime = {kind: [row.metrics for row in exported if row.recipe["runtime"] == kind] for kind in RUNTIMES}
    return Parity(
        name=name,
        specs=len({row.row for row in rows}),
        fp32_error=max((row.metrics["fp32_error"] for row in exported), default=None),
        max_rel_error={kind: max(m["max_rel_error"] for m in group) for kind, group in by_runtime.items() if group},
        top1_agreement={kind: min(m["top1_agreement"] for m in group) for kind, group in by_runtime.items() if group},
        undelegated_muls=sum(row.metrics["undelegated_muls"] for row in exported),
        refused=[
            f"{RUNTIMES[row.recipe['runtime']]}: {row.metrics['refused']}" for row in rows if row.metrics["refused"]
        ],
    )


def int8_accuracies(rows: Sequence[Row]) -> list[Int8Accuracy]:
    """The networks that were evaluated in float32, in the order of their names."""
    groups: dict[tuple[str, int], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for row in rows:
        if row.experiment == "int8":
            key = (row.recipe["runtime"], row.recipe["precision"])
            groups.setdefault((row.row, row.seed), {})[key] = row.metrics
    return [
        Int8Accuracy(
            name,
            seed,
            100 * metrics["onnx", "float32"]["accuracy"],
            {kind: 100 * metrics[kind, "int8"]["accuracy"] for kind in RUNTIMES if (kind, "int8") in metrics},
            metrics["onnx", "float32"]["overflows"],
        )
        for (name, seed), metrics in sorted(groups.items(), key=lambda item: (item[0][0].partition("+")[0], item[0]))
        if ("onnx", "float32") in metrics
    ]


def latencies(rows: Sequence[Row]) -> dict[str, list[Latencies]]:
    """By backbone, the last measurement of each runtime and precision."""
    latest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.date):
        if row.experiment == "bench" and row.row.startswith("deploy/"):
            latest[row.row] = row
    groups: dict[str, list[Latencies]] = {}
    for name, row in latest.items():
        backbone, runtime, precision = name.removeprefix("deploy/").rsplit("/", 2)
        groups.setdefault(backbone, []).append(Latencies(runtime, precision, row.metrics, row.recipe["rounds"]))
    return {name: sorted(group, key=lambda m: list(RUNTIMES).index(m.runtime)) for name, group in groups.items()}
