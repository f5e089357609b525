"""The time of each function relative to its limit: one read of the feature map, or one copy.

Measured on one feature map in one run: the function; its formula in PyTorch operations; the formula compiled; the
function without the kernels; and what else is used at the same site, timm's channel attention modules or GeM; for the
end of a block in training, from its batch normalization to its ReLU, PyTorch's operations without an excitation. The
limits are measured too: a read is a sum over the map, a copy its ``clone``, and two maps read for one written an
addition. In the same rounds the function also runs on a contiguous map of the same type, and on a float32 map of the
same layout, so that layouts and types are compared within one run.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import rich
import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tyro.conf import Suppress

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import without_kernels
from deepsquare.paper.bench import _common
from deepsquare.paper.bench.limits import limits_table
from deepsquare.paper.statistics import median, median_ratio
from deepsquare.results import round_for_json
from deepsquare.surgery.block_training import block_training
from deepsquare.training.loop import tune_malloc

RESNET50 = ((256, 56), (512, 28), (1024, 14), (2048, 7))  # channels and side at the ends of its blocks
SHUFFLENET = ((58, 28), (116, 14), (232, 7), (1024, 7))  # the same for ShuffleNetV2-1×, and its last convolution
EXTREMES = ((64, 112), (128, 4))  # the largest and the smallest map of common networks
Maps = tuple[Tensor, Tensor]  # the map and the residual
MAPS = {"float32": (*RESNET50, *SHUFFLENET, *EXTREMES), "bfloat16": RESNET50, "float16": RESNET50}  # by dtype
BATCH_SIZE = 32
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
FORWARD, STEP = "forward", "forward + backward"
Call = Callable[..., Tensor]
Baselines = Callable[[Tensor, torch.memory_format], Mapping[str, Callable[[Tensor], Tensor]]]
GEM_EPS = 1e-6


@dataclass(frozen=True)
class Function:
    """A function of a map F, α and a residual R; its formula; its limits, of a forward pass and of a whole step."""

    ours: Call
    formula: Call
    limits: Mapping[str, tuple[str, ...]]
    baselines: Baselines = lambda x, layout: {}  # functions of F alone, for the same site


def _scale(x: Tensor, alpha: Tensor) -> Tensor:
    g = x.square().mean((2, 3), keepdim=True)
    return g / (g + alpha * alpha)


def _gem(x: Tensor, layout: torch.memory_format) -> dict[str, Callable[[Tensor], Tensor]]:
    """GeM with p = 2 fixed: ours, in plain operations, and as Square-Pooling with a square root."""
    return {
        "gem_pooling": lambda x: DF.gem_pooling(x, 2.0, GEM_EPS),
        "GeM, plain": lambda x: x.clamp(min=GEM_EPS).pow(2).mean((2, 3)).pow(1 / 2),
        "ours and a square root": lambda x: DF.square_pooling(x).sqrt(),
    }


def _attention(x: Tensor, layout: torch.memory_format) -> dict[str, nn.Module]:
    """timm's modules with their default arguments; GE gathers the whole map and has no parameters."""
    from timm.layers import eca, gather_excite, squeeze_excite

    channels = x.shape[1]
    gather = gather_excite.GatherExcite(channels, extra_params=False, extent=0, use_mlp=False)
    modules = {"timm SE": squeeze_excite.SEModule(channels), "timm ECA": eca.EcaModule(channels), "timm GE": gather}
    for module in modules.values():
        module.to(x.device, x.dtype).to(memory_format=layout)  # type: ignore[call-overload]
    return modules


@functools.cache
def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)


def _block_end(x: Tensor, alpha: Tensor, residual: Tensor) -> Tensor:
    """As an equipped block runs it: in two passes by the CPU's kernels."""
    y = None
    if kernels.backend_for(x, alpha, residual) is kernels.cpu:
        y = block_training(_norm(x.shape[1]), x, residual, alpha.float(), None)
    return _block_end_formula(x, alpha, residual) if y is None else y


def _block_end_formula(x: Tensor, alpha: Tensor, residual: Tensor) -> Tensor:
    y = F.batch_norm(x, None, None, training=True)
    return F.relu(y * _scale(y, alpha) + residual)


def _plain_block_end(x: Tensor, layout: torch.memory_format) -> dict[str, Callable[[Tensor], Tensor]]:
    """The end of a block without an excitation, as torchvision's ResNets run it."""
    residual, norm = torch.randn_like(x).requires_grad_(), _norm(x.shape[1])

    def run(x: Tensor) -> Tensor:
        y: Tensor = norm(x)
        y += residual
        return F.relu(y, inplace=True)

    return {"without excitation": run}


FUNCTIONS = {
    "square_pooling": Function(
        lambda x, alpha, residual: DF.square_pooling(x),
        lambda x, alpha, residual: x.square().mean((2, 3)),
        {FORWARD: ("read",), STEP: ("read", "copy")},
        _gem,
    ),
    "square_excitation": Function(
        lambda x, alpha, residual: DF.square_excitation(x, alpha),
        lambda x, alpha, residual: x * _scale(x, alpha),
        {FORWARD: ("copy",), STEP: ("copy", "addition")},
        _attention,
    ),
    "square_excitation_add_relu": Function(
        DF.square_excitation_add_relu,
        lambda x, alpha, residual: F.relu(x * _scale(x, alpha) + residual),
        {FORWARD: ("addition",), STEP: ("addition", "addition", "copy")},  # back: three maps read, two written
    ),
    "block_end": Function(
        _block_end,
        _block_end_formula,
        # Forward three maps read and one written; back five and two: the statistics are needed before the values.
        {FORWARD: ("read", "addition"), STEP: ("read", "addition") * 2 + ("addition",)},
        _plain_block_end,
    ),
    "relu_square": Function(
        lambda x, alpha, residual: DF.relu_square(x),
        lambda x, alpha, residual: F.relu(x).square(),
        {FORWARD: ("copy",), STEP: ("copy", "addition")},
    ),
}


def run(
    functions: Sequence[str] = tuple(FUNCTIONS),
    *,
    rounds: _common.Rounds = 15,
    results: _common.Results = _common.RESULTS,
    device: _common.Device = "cpu",
    batch_size: Suppress[int] = BATCH_SIZE,
) -> None:
    """Every function against memory bandwidth, the formula, torch.compile, GeM and timm's attention modules.

    Args:
        functions: Functions, such as square_pooling.
        batch_size: Maps per call.
    """
    _common.check(results, rounds=rounds, batch_size=batch_size)
    for function in functions:
        if function not in FUNCTIONS:
            raise ValueError(f"there is no function {function!r}; choose from {', '.join(FUNCTIONS)}")
    place = _common.open_device(device)
    tune_malloc()
    recipe: dict[str, Any] = {"rounds": rounds, "threads": torch.get_num_threads(), "batch_size": batch_size}
    recipe |= _common.describe_device(place)
    measured: dict[str, Mapping[str, Any]] = {}
    with Progress(transient=True) as progress:
        bar = progress.add_task("", total=len(functions) * len(LAYOUTS) * sum(map(len, MAPS.values())))
        for function, layout, dtype in product(functions, LAYOUTS, MAPS):
            start, row, metrics = time.perf_counter(), f"ops/{function}/{layout}/{dtype}", {}
            torch.compiler.reset()  # the recompilation limit counts the compiled code of earlier rows
            compiled = torch.compile(FUNCTIONS[function].formula, dynamic=True, fullgraph=True)
            for channels, side in MAPS[dtype]:
                shape, name = (batch_size, channels, side, side), f"{channels}×{side}×{side}"
                progress.update(bar, description=f"{row} {name}")
                maps = _maps(shape, layout, dtype, place)
                others = {other: _maps(shape, *kind, place) for other, kind in references(layout, dtype).items()}
                metrics[name] = measure(FUNCTIONS[function], LAYOUTS[layout], maps, others, compiled, rounds)
                progress.advance(bar)
            progress.console.print(_table(row, metrics, rounds))
            _common.append_row(results, row, recipe, metrics, start)
            measured[row.removeprefix("ops/")] = metrics
    rich.print(limits_table(measured, rounds, FORWARD))


def references(layout: str, dtype: str) -> dict[str, tuple[str, str]]:
    """What the function is compared with beside its limit: itself in the contiguous layout, and in float32."""
    kinds = {"contiguous": ("contiguous", dtype), "float32": (layout, "float32")}
    return {name: kind for name, kind in kinds.items() if kind != (layout, dtype)}


def _maps(shape: Sequence[int], layout: str, dtype: str, device: torch.device) -> Maps:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(device, getattr(torch, dtype)) for _ in range(2))
    return x.contiguous(memory_format=LAYOUTS[layout]), residual.contiguous(memory_format=LAYOUTS[layout])


def measure(
    function: Function,
    layout: torch.memory_format,
    maps: Maps,
    others: Mapping[str, Maps],
    compiled: Call,
    rounds: int,
) -> dict[str, Any]:
    """By pass: seconds of the function and of its limit, ratios to them, and the bytes that each form allocates.

    ``others`` has maps of another layout or type, on which the function runs in the same rounds.
    """
    x, residual = maps
    in_memory_order = x.permute(0, 2, 3, 1) if layout == torch.channels_last else x
    limits: dict[str, Call] = {
        "read": in_memory_order.sum,
        "copy": x.clone,
        "addition": partial(torch.add, x, residual),
    }
    forms = {"ours": function.ours, "formula": function.formula, "compiled": compiled}
    forms["kernels off"] = without_kernels()(function.ours)
    for name, baseline in function.baselines(x, layout).items():
        forms[name] = lambda x, alpha, residual, baseline=baseline: baseline(x)
    case = _Case.of(function, maps)
    cases = {f"beside {name}": _Case.of(function, pair) for name, pair in others.items()}
    metrics: dict[str, Any] = {}
    for kind, prepare in ((FORWARD, _forward), (STEP, _step)):
        calls = {name: prepare(form, case) for name, form in forms.items()}
        beside = {name: prepare(function.ours, other) for name, other in cases.items()}
        needed = {name: limits[name] for name in set(function.limits[kind])}
        times = _common.time_rounds({**needed, **calls, **beside}, rounds, x.device)
        limit = [sum(parts) for parts in zip(*(times[name] for name in function.limits[kind]), strict=True)]
        ours = times["ours"]
        medians = {"seconds": median(ours), "limit": median(limit), "ours / limit": median_ratio(ours, limit)}
        medians |= {f"ours / {name}": median_ratio(ours, times[f"beside {name}"]) for name in others}
        medians |= {f"{name} / ours": median_ratio(times[name], ours) for name in forms if name != "ours"}
        metrics[kind] = {
            **{name: round_for_json(value) for name, value in medians.items()},
            "allocated": {name: _allocated(call, x.device) for name, call in calls.items()},
        }
    metrics["bytes"] = x.numel() * x.element_size()
    return metrics


@dataclass(frozen=True)
class _Case:
    """The inputs of every form on one map, and the gradient of the result."""

    inputs: tuple[Tensor, Tensor, Tensor]
    grad: Tensor

    @classmethod
    def of(cls, function: Function, maps: Maps) -> "_Case":
        """The map, α and the residual, as leaves; α in the model's type, so that the formula keeps it."""
        x, residual = maps
        alpha = torch.ones(1, dtype=x.dtype, device=x.device, requires_grad=True)
        inputs = (x.detach().requires_grad_(), alpha, residual.detach().requires_grad_())
        return cls(inputs, torch.randn_like(function.ours(*inputs)))


def _forward(form: Call, case: _Case) -> Callable[[], object]:
    return torch.no_grad()(partial(form, *case.inputs))


def _step(form: Call, case: _Case) -> Callable[[], object]:
    return lambda: torch.autograd.grad(form(*case.inputs), case.inputs, case.grad, allow_unused=True)


def _allocated(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call requests from the allocator."""
    if device.type == "cuda":
        before = torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
        call()
        return int(torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"] - before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events() or ())


def _table(row: str, metrics: Mapping[str, Mapping[str, Any]], rounds: int) -> Table:
    """The function relative to its limit, and the other forms relative to the function."""
    first = next(iter(metrics.values()))
    columns = [(kind, name) for kind in (FORWARD, STEP) for name in first[kind] if "/" in name]
    table = _common.make_table(
        f"{row.removeprefix('ops/')}, {torch.get_num_threads()} threads",
        f"medians of {rounds} rounds; ours relative to the limit, then the others relative to ours",
        ("map", *(kind if name == "ours / limit" else name.removesuffix(" / ours") for kind, name in columns)),
    )
    for case, measured in metrics.items():
        table.add_row(case, *(f"{measured[kind][name][0]:.2f}" for kind, name in columns))
    return table
