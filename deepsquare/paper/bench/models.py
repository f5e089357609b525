"""The time of each technique and baseline on four backbones, relative to the plain network.

All networks of a backbone run in the same rounds, one iteration each in turn, in an order that is random in each round.
Ratios are taken between iterations of one turn. ``networks.py`` has the networks, ``ratios.py`` what is compared with
what.
"""

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import rich
import torch
from rich.progress import Progress
from rich.table import Table
from tyro.conf import FlagCreatePairsOff

from deepsquare.cost import cost_of
from deepsquare.paper.bench import _common, networks
from deepsquare.paper.bench.guard import SLOWER, Comparison, comparable_rows, compare, guard_table
from deepsquare.paper.bench.networks import BASE, WORKLOADS, Networks, Setting
from deepsquare.paper.bench.ratios import LABELS, PLAIN_LABELS, iteration_counts, relative_times
from deepsquare.paper.statistics import bounds_label
from deepsquare.results import Row, conditions
from deepsquare.training.loop import tune_malloc

BACKBONES = ("resnet50", "resnet18", "shufflenet_v2_x1_0", "shufflenet_v2_x0_5")
SPECS = (
    "pooling", "softmin", "excitation", "encoding", "pooling+excitation",
    "se", "ge_theta_minus", "ge_theta", "gsop1", "gsop2", "mpn_cov", "isqrt_cov", "bilinear", "compact_bilinear",
)  # fmt: skip
ROUND_SECONDS = 0.4  # of the plain network, per workload and round
COMMITTED = Path("results")


def run(
    backbones: _common.Backbones = BACKBONES,
    specs: _common.Specs = SPECS,
    *,
    rounds: _common.Rounds = 15,
    results: _common.Results = _common.RESULTS,
    compiled: FlagCreatePairsOff[bool] = False,
    memory_format: Literal["channels_last", "contiguous"] = "channels_last",
    device: _common.Device = "cpu",
    guard: FlagCreatePairsOff[bool] = False,
    committed: Path = COMMITTED,
) -> None:
    """Every technique and baseline against its plain network, in inference and training.

    Args:
        compiled: Measure inference under torch.compile as well; each network takes minutes to compile.
        memory_format: Of the networks and the images.
        guard: Compare the ratios with the newest committed rows of a machine like this one; exit with 1 if a spec
            became slower by more than the intervals of both.
        committed: Folder of the rows that --guard compares with.
    """
    _common.check(results, rounds=rounds)
    for spec in specs:
        if "fisher" in spec:
            raise ValueError("a Fisher vector has to be fitted to data before it trains; leave it out here")
        for backbone in backbones:
            cost_of(backbone, spec)  # fail early on a spec that does not fit
    setting = Setting(_common.open_device(device), memory_format, compiled)
    recipe = {
        "rounds": rounds, "threads": torch.get_num_threads(), "input": networks.INPUT, "memory": memory_format,
        "interleaved": "all networks",  # rows without this field alternated each spec with the plain network
        **_common.describe_device(setting.device),
    }  # fmt: skip
    names = {backbone: f"models/{backbone}" for backbone in backbones}
    known: list[Row] = []
    if guard:
        known = comparable_rows(committed, list(names.values()), recipe, conditions()["hardware"])
    tune_malloc()
    comparisons: dict[str, list[Comparison]] = {}
    for backbone, name in names.items():
        start = time.perf_counter()
        metrics = measure(backbone, specs, rounds, setting)
        rich.print(_table(backbone, metrics, rounds))
        _common.append_row(results, name, recipe, metrics, start)
        comparisons[backbone] = compare(metrics, [row for row in known if row.row == name])
    if guard:
        rich.print(guard_table(comparisons))
        if any(one.verdict == SLOWER for of_backbone in comparisons.values() for one in of_backbone):
            sys.exit(1)


def measure(backbone: str, specs: Sequence[str], rounds: int, setting: Setting) -> dict[str, Any]:
    """By spec, "" for the plain network: its cost, the seconds by workload and network, and what was not measured."""
    measured, skipped = networks.build(backbone, specs, setting)
    times = _time(measured, rounds, setting, backbone)
    metrics: dict[str, Any] = {}
    for spec in (*specs, ""):
        of_spec = {
            workload: {name: values for (of, name), values in seconds.items() if of == spec or name == BASE}
            for workload, seconds in times.items()
        }
        metrics[spec] = {"cost": asdict(cost_of(backbone, spec)), "seconds": _common.rounded(of_spec, 5)}
        if spec in skipped:
            metrics[spec]["skipped"] = skipped[spec]
    return metrics


def _time(
    candidates: Networks, rounds: int, setting: Setting, title: str
) -> dict[str, dict[tuple[str, str], list[float]]]:
    """By workload and network, the seconds of each iteration; the networks of a workload take turns."""
    base = candidates["", BASE]
    clock = partial(_common.time_call, device=setting.device)
    iterations = {name: max(1, int(ROUND_SECONDS / min(clock(call) for _ in range(2)))) for name, call in base.items()}
    calls = {
        workload: {key: partial(clock, of[workload]) for key, of in candidates.items() if workload in of}
        for workload in WORKLOADS
    }
    times: dict[str, dict[tuple[str, str], list[float]]] = {kind: {key: [] for key in calls[kind]} for kind in calls}
    rng = random.Random(0)
    with Progress(transient=True) as progress:
        bar = progress.add_task(title, total=rounds * len(WORKLOADS))
        for workload in (kind for _ in range(rounds) for kind in WORKLOADS):
            of = calls[workload]
            order = {key: of[key] for key in rng.sample(list(of), len(of))}
            for key, seconds in _common.interleave(order, range(iterations[workload])).items():
                times[workload][key] += seconds
            progress.advance(bar)
    return times


def _table(backbone: str, metrics: Mapping[str, Any], rounds: int) -> Table:
    counts = iteration_counts(metrics)
    table = _common.make_table(
        f"{backbone}: time relative to the plain network, {torch.get_num_threads()} threads",
        f"median over the iterations of {rounds} rounds",
        ("spec", *(f"{kind} ({bounds_label(count, 'iterations')})" for kind, count in counts.items())),
    )
    for spec in ("", *filter(None, metrics)):
        for kind, ratios in relative_times(metrics, spec).items():
            label = LABELS.get(kind, spec) if spec else PLAIN_LABELS[kind]
            cells = (_common.format_median(ratios[workload], 3) if workload in ratios else "–" for workload in counts)
            table.add_row(f"  {label}" if spec and kind in LABELS else label, *cells)
        for network, reason in metrics[spec].get("skipped", {}).items():
            table.add_row(f"  {network}: not measured, {reason}")
    return table
