"""The time of each technique and baseline on four backbones, relative to the plain network.

All networks of a backbone run in the same rounds, one iteration each in turn, in an order that is random in each round.
Ratios are taken between iterations of one turn. Networks run in eager mode, in channels_last.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import rich
import torch
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from deepsquare.cost import cost_of
from deepsquare.kernels import without_kernels
from deepsquare.models import create_model
from deepsquare.paper.bench import _common
from deepsquare.paper.statistics import bounds_label, median_ratio
from deepsquare.training.loop import tune_malloc

BACKBONES = ("resnet50", "resnet18", "shufflenet_v2_x1_0", "shufflenet_v2_x0_5")
SPECS = (
    "pooling", "softmin", "excitation", "encoding", "pooling+excitation",
    "se", "ge_theta_minus", "ge_theta", "gsop1", "gsop2", "mpn_cov", "isqrt_cov", "bilinear", "compact_bilinear",
)  # fmt: skip
KERNEL_TERMS = {"pooling", "excitation"}  # these are also measured without the kernels
WORKLOADS = LATENCY, THROUGHPUT, TRAINING = "inference, batch 1", "inference, batch 16", "training step, batch 8"
ROUND_SECONDS = 0.4  # of the plain network, per workload and round
Seconds = dict[str, dict[str, list[float]]]  # by workload and network, one value per iteration
BASE, OWN, WITHOUT_KERNELS = "base", "own", "without_kernels"  # the networks in a row's metrics of a spec


def _iteration(model: nn.Module, batch_size: int, training: bool) -> Callable[[], None]:
    x = torch.rand(batch_size, 3, 224, 224).to(memory_format=torch.channels_last)
    labels = torch.arange(batch_size)

    def iteration() -> None:
        model.train(training)
        with torch.inference_mode(not training):
            logits = model(x)
        if training:
            torch.autograd.backward(F.cross_entropy(logits, labels))
            model.zero_grad(set_to_none=True)

    return iteration


def _workloads(backbone: str, spec: str) -> dict[str, Callable[[], None]]:
    """One iteration of each workload on a network, which is warmed up."""
    torch.manual_seed(0)
    model = create_model(backbone, spec).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    arguments = {LATENCY: (1, False), THROUGHPUT: (16, False), TRAINING: (8, True)}
    workloads = {name: _iteration(model, *batch_and_mode) for name, batch_and_mode in arguments.items()}
    for iteration in workloads.values():
        _common.time_call(iteration, 2)
    return workloads


def run(
    backbones: _common.Backbones = BACKBONES,
    specs: _common.Specs = SPECS,
    *,
    rounds: _common.Rounds = 9,
    results: _common.Results = _common.RESULTS,
) -> None:
    """Every technique and baseline against its plain network, in inference and training."""
    _common.check(results, rounds=rounds)
    for spec in specs:
        if "fisher" in spec:
            raise ValueError("a Fisher vector has to be fitted to data before it trains; leave it out here")
        for backbone in backbones:
            cost_of(backbone, spec)  # fail early on a spec that does not fit
    tune_malloc()
    for backbone in backbones:
        start = time.perf_counter()
        times = _time(backbone, specs, rounds)
        rich.print(_table(backbone, times, rounds))
        recipe = {
            "rounds": rounds, "threads": torch.get_num_threads(), "input": 224, "memory": "channels_last",
            "interleaved": "all networks",  # rows without this field alternated each spec with the plain network
        }  # fmt: skip
        metrics: dict[str, Any] = {spec: {"cost": asdict(cost_of(backbone, spec))} for spec in (*specs, "")}
        for spec, seconds in times.items():
            metrics[spec]["seconds"] = _common.rounded(seconds, 5)
        _common.append_row(results, f"models/{backbone}", recipe, metrics, start)


def _networks(backbone: str, specs: Sequence[str]) -> dict[tuple[str, str], dict[str, Callable[[], None]]]:
    """The workloads of the plain network and of each equipped one, by spec and name."""
    networks = {("", BASE): _workloads(backbone, "")}
    for spec in specs:
        networks[spec, OWN] = own = _workloads(backbone, spec)
        if not KERNEL_TERMS.isdisjoint(spec.split("+")):
            networks[spec, WITHOUT_KERNELS] = {name: without_kernels()(call) for name, call in own.items()}
    return networks


def _time(backbone: str, specs: Sequence[str], rounds: int) -> dict[str, Seconds]:
    """By spec, the seconds of the plain network, ``base``, of the equipped one, ``own``, and ``without_kernels``."""
    networks = _networks(backbone, specs)
    iterations = {
        workload: max(1, int(ROUND_SECONDS / min(_common.time_call(iteration) for _ in range(2))))
        for workload, iteration in networks["", BASE].items()
    }
    times: dict[str, dict[tuple[str, str], list[float]]] = {kind: {key: [] for key in networks} for kind in WORKLOADS}
    rng = random.Random(0)
    with Progress(transient=True) as progress:
        bar = progress.add_task(backbone, total=rounds * len(WORKLOADS))
        for workload in (kind for _ in range(rounds) for kind in WORKLOADS):
            order = rng.sample(list(networks), len(networks))
            calls = {key: partial(_common.time_call, networks[key][workload]) for key in order}
            for key, seconds in _common.interleave(calls, range(iterations[workload])).items():
                times[workload][key] += seconds
            progress.advance(bar)
    return {
        spec: {
            kind: {BASE: measured["", BASE]} | {name: values for (of, name), values in measured.items() if of == spec}
            for kind, measured in times.items()
        }
        for spec in specs
    }


def _table(backbone: str, times: Mapping[str, Seconds], rounds: int) -> Table:
    counts = {kind: len(values[BASE]) for kind, values in next(iter(times.values())).items()}
    table = _common.make_table(
        f"{backbone}: time relative to the plain network, {torch.get_num_threads()} threads",
        f"median over the iterations of {rounds} rounds",
        ("spec", *(f"{kind} ({bounds_label(count, 'iterations')})" for kind, count in counts.items())),
    )
    for spec, seconds in times.items():
        for name in seconds[LATENCY]:
            if name != BASE:
                ratios = [median_ratio(seconds[kind][name], seconds[kind][BASE]) for kind in WORKLOADS]
                label = spec if name == OWN else f"{spec}, kernels off"
                table.add_row(label, *(_common.format_median(ratio, 3) for ratio in ratios))
    return table
