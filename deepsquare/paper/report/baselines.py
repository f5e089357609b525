"""What each technique costs relative to the plain network, as ``deepsquare bench models`` stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepsquare.cost import Cost
from deepsquare.paper.report.evidence import bench_rows
from deepsquare.paper.statistics import Median, median_ratio
from deepsquare.results import Row
from deepsquare.surgery import TECHNIQUES

TERM_TITLES = {"gsop1": "GSoP-Net1", "gsop2": "GSoP-Net2"}
TERM_TITLES |= {term: technique.title for term, technique in TECHNIQUES.items()}


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
