"""The time of ReLU-Square beside ReLU and the smooth activations of Section 3.2: softplus, tanh and sigmoid.

ReLU-Square runs as plain PyTorch operations and by its kernel, all on one thread, as the paper's statement is about
computation. The sizes are of maps that stay in a core's cache, that just leave it, and that are read from memory.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import rich
import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from tyro.conf import Suppress

from deepsquare._threads import one_thread
from deepsquare.functional import relu_square
from deepsquare.kernels import backend_for, without_kernels
from deepsquare.paper.bench import _common
from deepsquare.paper.statistics import bounds_label, median, median_ratio
from deepsquare.results import round_for_json
from deepsquare.training.loop import tune_malloc

PLAIN, FUSED = "relu_square, plain operations", "relu_square, fused kernel"
SMOOTH = ("softplus", "tanh", "sigmoid")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    PLAIN: without_kernels()(relu_square),
    FUSED: relu_square,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
ELEMENTS = (2**16, 2**20, 2**24)  # 256 KB, 4 MB and 64 MB
FORWARD, STEP = "forward", "forward + backward"


def run(
    *,
    rounds: _common.Rounds = 41,
    results: _common.Results = _common.RESULTS,
    elements: Suppress[tuple[int, ...]] = ELEMENTS,
) -> None:
    """ReLU-Square, plain and fused, against ReLU, softplus, tanh and sigmoid."""
    _common.check(results, rounds=rounds)
    if backend_for(torch.empty(1)) is None:
        raise ValueError("there is no compiled kernel to compare with; install with a C compiler, kernels enabled")
    tune_malloc()
    start = time.perf_counter()
    with one_thread():
        metrics = {str(size): measure(size, rounds) for size in elements}
    rich.print(_table(metrics, rounds))
    recipe = {"rounds": rounds, "threads": 1, "dtype": "float32"}
    _common.append_row(results, "activations", recipe, metrics, start)


def measure(elements: int, rounds: int) -> dict[str, Any]:
    """By pass and activation: seconds, and the time relative to ReLU and to ReLU-Square in both forms."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
    metrics: dict[str, Any] = {}
    for kind, call in (
        (FORWARD, lambda activation: activation(x)),
        (STEP, lambda activation: torch.autograd.grad(activation(leaf), leaf, grad)),
    ):
        calls = {name: partial(call, activation) for name, activation in ACTIVATIONS.items()}
        times = _common.time_rounds(calls, rounds)
        metrics[kind] = {}
        for name, seconds in times.items():
            medians = {"seconds": median(seconds)}
            medians |= {f"/ {other}": median_ratio(seconds, times[other]) for other in ("relu", PLAIN, FUSED)}
            metrics[kind][name] = {key: round_for_json(value) for key, value in medians.items()}
    return metrics


def _table(metrics: Mapping[str, Mapping[str, Any]], rounds: int) -> Table:
    table = _common.make_table(
        "Time relative to ReLU, 1 thread",
        f"median over {rounds} rounds ({bounds_label(rounds)})",
        ("activation", FORWARD, STEP),
    )
    for size, passes in metrics.items():
        table.add_row(f"{int(size):,} elements")
        for name in ACTIVATIONS:
            table.add_row(name, *(_common.format_median(passes[kind][name]["/ relu"], 2) for kind in (FORWARD, STEP)))
        table.add_section()
    return table
