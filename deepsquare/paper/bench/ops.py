"""What each function costs, beside the least it could: one read of the map, or one copy.

On one map, in one run and in turns: the function as it is, written as a formula (what a person would write), the same
compiled, without the kernels, and the channel attentions of timm that would stand at its place. The limits are measured
too: a read is a sum over the map, a copy its ``clone``, and two maps read for one written an addition. A result is the
median of the ratios with its 95% interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare import functional as DF
from deepsquare._files import ensure_writable
from deepsquare.kernels import without_kernels
from deepsquare.paper.statistics import Median, median, median_ratio
from deepsquare.results import Row, Store
from deepsquare.training.loop import tune_malloc

RESNET50 = ((256, 56), (512, 28), (1024, 14), (2048, 7))  # channels and side of its blocks' ends
SHUFFLENET = ((58, 28), (116, 14), (232, 7), (1024, 7))  # of ShuffleNetV2-1×'s, and of its last convolution
SIDES = ((64, 112), (128, 4))  # the largest and the smallest map of the usual networks
BATCH_SIZE = 32
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORWARD, STEP = "forward", "forward + backward"
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Function:
    """A function of a map F, α and a residual R, as the formula says it, and its limits: of a pass, of both passes."""

    ours: Call
    formula: Call
    limits: Mapping[str, tuple[str, ...]]
    peers: tuple[str, ...] = ()


def _scale(x: Tensor, alpha: Tensor) -> Tensor:
    g = x.square().mean((2, 3), keepdim=True)
    return g / (g + alpha * alpha)


FUNCTIONS = {
    "square_pooling": Function(
        lambda x, alpha, residual: DF.square_pooling(x),
        lambda x, alpha, residual: x.square().mean((2, 3)),
        {FORWARD: ("read",), STEP: ("read", "copy")},
    ),
    "square_excitation": Function(
        lambda x, alpha, residual: DF.square_excitation(x, alpha),
        lambda x, alpha, residual: x * _scale(x, alpha),
        {FORWARD: ("copy",), STEP: ("copy", "addition")},
        ("timm SE", "timm ECA", "timm GE"),
    ),
    "square_excitation_add_relu": Function(
        DF.square_excitation_add_relu,
        lambda x, alpha, residual: F.relu(x * _scale(x, alpha) + residual),
        {FORWARD: ("addition",), STEP: ("addition", "addition", "copy")},  # back: three maps read, two written
    ),
    "relu_square": Function(
        lambda x, alpha, residual: DF.relu_square(x),
        lambda x, alpha, residual: F.relu(x).square(),
        {FORWARD: ("copy",), STEP: ("copy", "addition")},
    ),
}


def _peer(name: str, channels: int) -> nn.Module:
    """As timm gives it, in the default setting; GE gathers the whole map and has no parameters."""
    from timm.layers import eca, gather_excite, squeeze_excite

    made: dict[str, Callable[[], nn.Module]] = {
        "timm SE": lambda: squeeze_excite.SEModule(channels),
        "timm ECA": lambda: eca.EcaModule(channels),
        "timm GE": lambda: gather_excite.GatherExcite(channels, extra_params=False, extent=0, use_mlp=False),
    }
    return made[name]()


@dataclass(frozen=True)
class Case:
    """A function on a map."""

    function: str
    channels: int
    side: int
    layout: str = "contiguous"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """As in ``256×56×56``."""
        return f"{self.channels}×{self.side}×{self.side}"

    @property
    def row(self) -> str:
        """Under which its results are stored."""
        return f"ops/{self.function}/{self.layout}/{self.dtype}"


def cases(functions: Sequence[str]) -> Iterator[Case]:
    """Every map in float32; ResNet50's in half precision too."""
    for function in functions:
        for layout in LAYOUTS:
            for channels, side in (*RESNET50, *SHUFFLENET, *SIDES):
                yield Case(function, channels, side, layout)
            for dtype in ("bfloat16", "float16"):
                for channels, side in RESNET50:
                    yield Case(function, channels, side, layout, dtype)


def run(
    functions: Sequence[str] = tuple(FUNCTIONS),
    *,
    rounds: int = 15,
    batch_size: int = BATCH_SIZE,
    results: Path = Path("out/results"),
) -> None:
    """Time every case, print the ratios and add a row for each function, layout and type to ``bench.jsonl``."""
    if rounds < 1 or batch_size < 1:
        raise ValueError(f"rounds is {rounds} and batch_size is {batch_size}; expected at least 1")
    for function in functions:
        if function not in FUNCTIONS:
            raise ValueError(f"there is no function {function!r}; choose from {', '.join(FUNCTIONS)}")
    ensure_writable(results)
    tune_malloc()
    rows: dict[str, list[Case]] = {}
    for case in cases(functions):
        rows.setdefault(case.row, []).append(case)
    with Progress(transient=True) as progress:
        bar = progress.add_task("", total=sum(map(len, rows.values())))
        for row, of_row in rows.items():
            start, metrics = time.perf_counter(), {}
            torch.compiler.reset()  # code of one row counts against the limit of recompilations of the next
            compiled = torch.compile(FUNCTIONS[of_row[0].function].formula, dynamic=True, fullgraph=True)
            for case in of_row:
                progress.update(bar, description=f"{row} {case.name}")
                metrics[case.name] = measure(case, compiled, rounds, batch_size)
                progress.advance(bar)
            progress.console.print(_table(row, metrics, rounds))
            described = {"rounds": rounds, "threads": torch.get_num_threads(), "batch_size": batch_size}
            seconds = round(time.perf_counter() - start, 1)
            Store(results / "bench.jsonl").append(Row("bench", row, int(time.time()), described, metrics, seconds))


def measure(case: Case, compiled: Call, rounds: int, batch_size: int) -> dict[str, Any]:
    """The seconds of the limit, the other forms relative to ours and ours to the limit, and bytes allocated."""
    torch.manual_seed(0)
    function, dtype = FUNCTIONS[case.function], TYPES[case.dtype]
    shape = (batch_size, case.channels, case.side, case.side)
    x, residual, gradient = (
        torch.randn(shape).to(dtype).contiguous(memory_format=LAYOUTS[case.layout]) for _ in range(3)
    )
    memory = x.permute(0, 2, 3, 1) if case.layout == "channels_last" else x  # the same values in the order of memory
    alpha = torch.ones(1, dtype=dtype, requires_grad=True)  # as in a model of that type: the formula keeps it
    limits: dict[str, Callable[[], Any]] = {
        "read": memory.sum,
        "copy": x.clone,
        "addition": lambda: torch.add(x, residual),
    }
    forms: dict[str, Call] = {"ours": function.ours, "formula": function.formula, "compiled": compiled}
    forms["kernels off"] = _off(function.ours)
    for name in function.peers:
        module = _peer(name, case.channels).to(dtype).to(memory_format=LAYOUTS[case.layout])  # type: ignore[call-overload]
        forms[name] = lambda x, alpha, residual, module=module: module(x)
    given = (x.detach().requires_grad_(), alpha, residual.detach().requires_grad_())
    if case.function == "square_pooling":
        gradient = torch.randn(shape[:2]).to(dtype)

    def forward(form: Call) -> Callable[[], Any]:
        def call() -> None:
            with torch.no_grad():
                form(*given)

        return call

    def step(form: Call) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(form(*given), given, gradient, allow_unused=True)

    found: dict[str, Any] = {}
    for kind, made in ((FORWARD, forward), (STEP, step)):
        calls: dict[str, Callable[[], Any]] = {name: made(form) for name, form in forms.items()}
        times = _in_turns({**{name: limits[name] for name in set(function.limits[kind])}, **calls}, rounds)
        limit = [sum(parts) for parts in zip(*(times[name] for name in function.limits[kind]), strict=True)]
        found[kind] = {
            "seconds": _shown(median(times["ours"])),
            "limit": _shown(median(limit)),
            "ours / limit": _shown(median_ratio(times["ours"], limit)),
            **{f"{name} / ours": _shown(median_ratio(times[name], times["ours"])) for name in forms if name != "ours"},
            "allocated": {name: _allocated(calls[name]) for name in forms},
        }
    found["bytes"] = x.numel() * x.element_size()
    return found


def _off(function: Call) -> Call:
    def call(*given: Tensor) -> Tensor:
        with without_kernels():
            return function(*given)

    return call


def _in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each, in each round; short ones are repeated to a millisecond or so."""
    repeats = {}
    for name, call in calls.items():
        call()  # warm, and compiled
        start = time.perf_counter()
        call()
        repeats[name] = max(1, min(100, int(1e-3 / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def _allocated(call: Callable[[], Any]) -> int:
    """Bytes that a call takes from the allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events() or ())


def _shown(value: Median) -> list[float]:
    return [float(f"{number:.4g}") for number in (value.value, value.low, value.high)]


def _table(row: str, metrics: Mapping[str, Mapping[str, Any]], rounds: int) -> Table:
    table = Table(
        title=f"{row.removeprefix('ops/')}, {torch.get_num_threads()} threads",
        caption=f"medians of {rounds} turns; times relative to the limit, then how many times as long the others take",
    )
    table.add_column("map")
    for kind in (FORWARD, STEP):
        table.add_column(kind, justify="right")
        for name in next(iter(metrics.values()))[kind]:
            if name.endswith("/ ours"):
                table.add_column(name.removesuffix(" / ours"), justify="right")
    for case, found in metrics.items():
        cells = []
        for kind in (FORWARD, STEP):
            cells.append(f"{found[kind]['ours / limit'][0]:.2f}")
            cells += [f"{value[0]:.2f}" for name, value in found[kind].items() if name.endswith("/ ours")]
        table.add_row(case, *cells)
    return table
