"""The times of a row of ``bench models`` as ratios within the run; what its table, its guard and the report show."""

from collections.abc import Mapping, Sequence
from typing import Any

from deepsquare.paper.bench.networks import BASE, COMPILED, FUSED, OWN, WITHOUT_KERNELS
from deepsquare.paper.statistics import Median, median_ratio

PLAIN_LABELS = {FUSED: "plain, block ends fused", COMPILED: "plain, compiled"}
LABELS = {
    WITHOUT_KERNELS: "without our kernels",
    FUSED: "beside the plain network with fused block ends",
    COMPILED: "compiled, beside the compiled plain network",
}


def relative_times(metrics: Mapping[str, Any], spec: str) -> dict[str, dict[str, Median]]:
    """By kind of comparison and workload; what the run did not measure is left out.

    Of an equipped network: ``own`` and ``without_kernels`` relative to the plain network; ``fused``, the same ``own``
    relative to the plain network with fused block ends; ``compiled``, relative to the compiled plain network. Of the
    plain network, whose spec is empty: ``fused`` and ``compiled`` relative to it as it is.
    """
    plain: Mapping[str, Any] = metrics[""].get("seconds", {})  # rows of older versions have none
    ratios: dict[str, dict[str, Median]] = {}
    for workload, times in metrics[spec].get("seconds", {}).items():
        base, beside = times[BASE], plain.get(workload, {})
        pairs: dict[str, tuple[Sequence[float] | None, Sequence[float] | None]] = {
            OWN: (times.get(OWN), base),
            WITHOUT_KERNELS: (times.get(WITHOUT_KERNELS), base),
            FUSED: (times.get(OWN), beside.get(FUSED)) if spec else (times.get(FUSED), base),
            COMPILED: (times.get(COMPILED), beside.get(COMPILED) if spec else base),
        }
        for kind, (seconds, other) in pairs.items():
            if seconds is not None and other is not None:
                ratios.setdefault(kind, {})[workload] = median_ratio(seconds, other)
    return ratios


def iteration_counts(metrics: Mapping[str, Any]) -> dict[str, int]:
    """By workload, the number of iterations of each network of a run."""
    seconds: Mapping[str, Any] = next(of["seconds"] for of in metrics.values() if "seconds" in of)
    return {workload: len(times[BASE]) for workload, times in seconds.items()}
