"""What the benchmarks share: the device, timing, interleaved rounds, tables, and rows of ``bench.jsonl``.

Each round measures every candidate once, and ratios are taken within a round, so that a slow period of the machine
affects all candidates alike. A result is the median over the rounds with a 95% interval, or the range where fewer than
6 values were measured.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from rich.table import Table
from tyro.conf import arg

from deepsquare._files import ensure_writable
from deepsquare.kernels import backend_for
from deepsquare.paper import require_paper
from deepsquare.paper.statistics import Median
from deepsquare.results import Row, Store, round_for_json

T = TypeVar("T")
K = TypeVar("K")
Backbones = Annotated[Sequence[str], arg(help="Networks.")]
Specs = Annotated[Sequence[str], arg(help="Specs to equip them with.")]
Rounds = Annotated[int, arg(help="Rounds; each measures every candidate.")]
Results = Annotated[Path, arg(help="Folder for bench.jsonl, to which the rows are appended.")]
Device = Annotated[Literal["cpu", "cuda"], arg(help="Where it runs; on a GPU with the Triton kernels.")]
RESULTS = Path("out/results")
CPU = torch.device("cpu")
KERNELS = {"cpu": "C", "gpu": "Triton"}  # by the module of the backend


def check(results: Path, **counts: int | None) -> None:
    """Fail early: the extra is installed, every count is at least 1 (or None), and ``results`` is writable."""
    require_paper()
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}; expected at least 1")
    ensure_writable(results)


def open_device(name: str) -> torch.device:
    """The device of ``--device``; fail early where PyTorch or the kernels cannot use it."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: PyTorch finds no GPU here; run it on a machine with one, or leave the option out"
        )
    if device.type == "cuda" and kernels_on(device) == "none":
        reason = (
            "the Triton kernels do not run here; pip install 'deepsquare[gpu]', and do not set DEEPSQUARE_KERNELS=0"
        )
        raise ValueError(f"--device cuda: {reason}")
    return device


def describe_device(device: torch.device) -> dict[str, str]:
    """The name of the device and the kernels that run on it, for a row's recipe."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "kernels": kernels_on(device)}


def kernels_on(device: torch.device) -> str:
    """Whose kernels run on the device: C, Triton or none."""
    backend = backend_for(torch.empty(1, device=device))
    return "none" if backend is None else KERNELS[backend.__name__.rpartition(".")[2]]


def time_call(call: Callable[[], object], repeats: int = 1, device: torch.device = CPU) -> float:
    """Seconds per call, until the device has finished its work: calls on a GPU return as soon as they are queued."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else _no_wait
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


def _no_wait() -> None:
    """Calls on the CPU return when they are done."""


def interleave(candidates: Mapping[K, Callable[[], T]], rounds: Iterable[object]) -> dict[K, list[T]]:
    """Call every candidate once per round; what each returned, by round."""
    measurements: dict[K, list[T]] = {name: [] for name in candidates}
    for _ in rounds:
        for name, measure in candidates.items():
            measurements[name].append(measure())
    return measurements


def time_rounds(
    calls: Mapping[K, Callable[[], object]], rounds: int, device: torch.device = CPU
) -> dict[K, list[float]]:
    """Seconds per call by round; short calls are repeated for about a millisecond."""
    candidates = {}
    for name, call in calls.items():
        call()  # warm-up and compilation
        repeats = max(1, min(100, int(1e-3 / time_call(call, device=device))))
        candidates[name] = partial(time_call, call, repeats, device)
    return interleave(candidates, range(rounds))


def append_row(results: Path, name: str, recipe: Mapping[str, Any], metrics: Mapping[str, Any], start: float) -> None:
    """Append a row to ``bench.jsonl``; ``start`` is the value of ``time.perf_counter()`` when the work began."""
    row = Row("bench", name, int(time.time()), recipe, metrics, round(time.perf_counter() - start, 1))
    Store(results / "bench.jsonl").append(row)


def rounded(seconds: Mapping[str, Mapping[str, list[float]]], digits: int) -> dict[str, Any]:
    """Lists of seconds, by two names, as a row stores them."""
    return {
        outer: {name: round_for_json(values, digits) for name, values in inner.items()}
        for outer, inner in seconds.items()
    }


def format_median(median: Median, digits: int) -> str:
    """``median [low, high]``."""
    value, low, high = (f"{number:.{digits}f}" for number in median)
    return f"{value} [{low}, {high}]"


def make_table(title: str, caption: str, headings: Iterable[str]) -> Table:
    """A table whose first column holds names and whose other columns hold numbers."""
    table = Table(title=title, caption=caption)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table
