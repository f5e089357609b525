"""What a technique costs in time, on four backbones: each in turn with the plain network, A, B, A, B, in one run.

Times of one go stand beside each other, so a ratio is taken within each turn, and a slow moment of the machine meets
both. A result is the median of the ratios with its 95% interval. Networks are run as PyTorch runs them, uncompiled,
in channels_last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich
import torch
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from deepsquare._files import ensure_writable
from deepsquare.cost import cost_of
from deepsquare.kernels import without_kernels
from deepsquare.models import create_model
from deepsquare.paper.statistics import median_ratio
from deepsquare.results import Row, Store
from deepsquare.training.loop import tune_malloc

BACKBONES = ("resnet50", "resnet18", "shufflenet_v2_x1_0", "shufflenet_v2_x0_5")
SPECS = (
    "pooling", "softmin", "excitation", "encoding", "pooling+excitation",
    "se", "ge_theta_minus", "ge_theta", "gsop1", "gsop2", "mpn_cov", "isqrt_cov", "bilinear", "compact_bilinear",
)  # fmt: skip
KERNEL_WORDS = {"pooling", "excitation"}  # these are measured without the kernels too
KINDS = LATENCY, THROUGHPUT, TRAINING = "inference, batch 1", "inference, batch 16", "training step, batch 8"
ROUND_SECONDS = 0.4  # seconds of each contestant, in goes that take turns: one slow moment of the machine meets all
Seconds = dict[str, list[float]]  # by kind of work, one a go


def _infer(model: nn.Module, batch_size: int) -> Callable[[], None]:
    x = torch.rand(batch_size, 3, 224, 224).to(memory_format=torch.channels_last)

    def work() -> None:
        model.eval()
        with torch.inference_mode():
            model(x)

    return work


def _train(model: nn.Module, batch_size: int) -> Callable[[], None]:
    x = torch.rand(batch_size, 3, 224, 224).to(memory_format=torch.channels_last)
    labels = torch.arange(batch_size)

    def work() -> None:
        model.train()
        torch.autograd.backward(F.cross_entropy(model(x), labels))
        model.zero_grad(set_to_none=True)

    return work


class Candidate:
    """A network and the kinds of work that it is timed at."""

    def __init__(self, backbone: str, spec: str) -> None:
        torch.manual_seed(0)
        model = create_model(backbone, spec).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.work = {LATENCY: _infer(model, 1), THROUGHPUT: _infer(model, 16), TRAINING: _train(model, 8)}
        self.iterations = {kind: max(1, int(ROUND_SECONDS / min(self.time(kind) for _ in range(2)))) for kind in KINDS}

    def time(self, kind: str) -> float:
        """Seconds for one go."""
        start = time.perf_counter()
        self.work[kind]()
        return time.perf_counter() - start


def run(
    backbones: Sequence[str] = BACKBONES,
    specs: Sequence[str] = SPECS,
    *,
    rounds: int = 9,
    results: Path = Path("out/results"),
) -> None:
    """Time every spec on every backbone, print the ratios and add a row for each backbone to ``bench.jsonl``."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1")
    ensure_writable(results)
    for spec in specs:
        if "fisher" in spec:
            raise ValueError("a Fisher vector has to be fitted to data before it trains; leave it out here")
        for backbone in backbones:
            cost_of(backbone, spec)  # a word that does not suit is told now
    tune_malloc()
    for backbone in backbones:
        start = time.perf_counter()
        times = _time(backbone, specs, rounds)
        rich.print(_table(backbone, times, rounds))
        described = {"rounds": rounds, "threads": torch.get_num_threads(), "input": 224, "memory": "channels_last"}
        metrics: dict[str, Any] = {
            spec: {
                "cost": asdict(cost_of(backbone, spec)),
                "seconds": {kind: {who: _rounded(own[kind]) for who, own in seconds.items()} for kind in KINDS},
            }
            for spec, seconds in times.items()
        }
        metrics[""] = {"cost": asdict(cost_of(backbone, ""))}
        seconds = round(time.perf_counter() - start, 1)
        row = Row("bench", f"models/{backbone}", int(time.time()), described, metrics, seconds)
        Store(results / "bench.jsonl").append(row)


def _time(backbone: str, specs: Sequence[str], rounds: int) -> dict[str, dict[str, Seconds]]:
    """By spec the times of the plain network, ``base``, of the equipped one, ``own``, and ``without_kernels``."""
    times: dict[str, dict[str, Seconds]] = {}
    plain = Candidate(backbone, "")
    with Progress(transient=True) as progress:
        bar = progress.add_task(backbone, total=len(specs) * rounds)
        for spec in specs:
            progress.update(bar, description=f"{backbone}, {spec}")
            candidate = Candidate(backbone, spec)
            runs: dict[str, tuple[Candidate, Callable[[], AbstractContextManager[None]]]]
            runs = {"base": (plain, nullcontext), "own": (candidate, nullcontext)}
            if not KERNEL_WORDS.isdisjoint(spec.split("+")):
                runs["without_kernels"] = (candidate, without_kernels)
            times[spec] = {who: {kind: [] for kind in KINDS} for who in runs}
            for _ in range(rounds):
                for kind in KINDS:
                    for _ in range(plain.iterations[kind]):
                        for who, (network, mode) in runs.items():
                            with mode():
                                times[spec][who][kind].append(network.time(kind))
                progress.advance(bar)
    return times


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in seconds]


def _table(backbone: str, times: Mapping[str, Mapping[str, Seconds]], rounds: int) -> Table:
    table = Table(
        title=f"{backbone}: time relative to the plain network, {torch.get_num_threads()} threads",
        caption=f"median over {rounds} rounds of goes in turns, and its 95% interval",
    )
    table.add_column("spec")
    for kind in KINDS:
        table.add_column(kind, justify="right")
    for spec, seconds in times.items():
        for who in [who for who in seconds if who != "base"]:
            found = [median_ratio(seconds[who][kind], seconds["base"][kind]) for kind in KINDS]
            name = spec if who == "own" else f"{spec}, kernels off"
            table.add_row(name, *(f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]" for ratio in found))
    return table
