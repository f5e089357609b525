"""The networks that ``bench models`` compares, and one iteration of each workload that they run.

Beside the plain network and the equipped ones: those with kernels also without them; the plain network with the end of
its blocks fused as in an equipped one, because that fusion is not the technique's; and each of them compiled.
"""

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare.kernels import without_kernels
from deepsquare.models import create_model
from deepsquare.paper.bench import _common
from deepsquare.surgery import blocks

KERNEL_TERMS = {"pooling", "excitation"}  # these are also measured without the kernels
LATENCY, THROUGHPUT, TRAINING = "inference, batch 1", "inference, batch 16", "training step, batch 8"
WORKLOADS = {LATENCY: (1, False), THROUGHPUT: (16, False), TRAINING: (8, True)}  # batch size, and whether it trains
INFERENCE = (LATENCY, THROUGHPUT)  # what the compiled networks run
INPUT = 224
MEMORY_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
# The networks of a spec in a row's metrics; FUSED is of the plain network.
BASE, OWN, WITHOUT_KERNELS, FUSED, COMPILED = "base", "own", "without_kernels", "fused", "compiled"
Iterations = dict[str, Callable[[], None]]  # one iteration of each workload
Networks = dict[tuple[str, str], Iterations]  # by spec and network
Skipped = dict[str, dict[str, str]]  # by spec and network, why it is not measured


@dataclass(frozen=True)
class Setting:
    """Where and how all networks of a run are measured."""

    device: torch.device
    memory_format: str
    compiled: bool = False


def build(backbone: str, specs: Sequence[str], setting: Setting) -> tuple[Networks, Skipped]:
    """Every network of a run, warmed up, and those that cannot run here."""
    networks: Networks = {}
    skipped: Skipped = {}
    for spec in ("", *specs):
        model = _create(backbone, spec, setting)
        networks[spec, OWN if spec else BASE] = own = _iterations(model, model, WORKLOADS, setting)
        if not KERNEL_TERMS.isdisjoint(spec.split("+")):
            networks[spec, WITHOUT_KERNELS] = {name: without_kernels()(call) for name, call in own.items()}
        if setting.compiled:
            try:
                networks[spec, COMPILED] = _iterations(model, _compile(model), INFERENCE, setting)
            except RuntimeError as error:  # no C++ compiler, or an operation that cannot be compiled
                skipped.setdefault(spec, {})[COMPILED] = _first_line(error)
    model = _create(backbone, "", setting)
    if _common.kernels_on(setting.device) != "C":
        skipped.setdefault("", {})[FUSED] = "needs the C kernels"
    elif not _fuse_block_ends(model):
        skipped.setdefault("", {})[FUSED] = "no block's end can be fused"
    else:
        networks["", FUSED] = _iterations(model, model, WORKLOADS, setting)
    return networks, skipped


def _create(backbone: str, spec: str, setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    model = create_model(backbone, spec).to(setting.device)
    return model.to(memory_format=MEMORY_FORMATS[setting.memory_format])  # type: ignore[call-overload, no-any-return]


def _fuse_block_ends(model: nn.Module) -> int:
    """Fuse the ends of the plain network's blocks in place; the number of fused blocks."""
    return blocks.fuse_plain_blocks(model.eval())


def _compile(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model under ``torch.compile``, for fixed shapes.

    Compiled code is kept by code object, up to a limit after which calls run in eager mode, and all specs share the
    ``forward`` of their backbone. The code object is therefore a copy, which no other network has.
    """

    def forward(x: Tensor) -> Tensor:
        logits: Tensor = model(x)
        return logits

    own = types.FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)
    compiled: Callable[[Tensor], Tensor] = torch.compile(own, dynamic=False, fullgraph=True)
    return compiled


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _iterations(
    model: nn.Module, forward: Callable[[Tensor], Tensor], workloads: Iterable[str], setting: Setting
) -> Iterations:
    """One iteration of each workload by ``forward``, the model or its compiled form; warmed up."""
    iterations = {workload: _iteration(model, forward, *WORKLOADS[workload], setting) for workload in workloads}
    for iteration in iterations.values():
        iteration()
    return iterations


def _iteration(
    model: nn.Module, forward: Callable[[Tensor], Tensor], batch_size: int, training: bool, setting: Setting
) -> Callable[[], None]:
    x = torch.rand(batch_size, 3, INPUT, INPUT, device=setting.device)
    x = x.contiguous(memory_format=MEMORY_FORMATS[setting.memory_format])
    labels = torch.arange(batch_size, device=setting.device)

    def iteration() -> None:
        if model.training != training:  # visiting every module takes as long as a kernel
            model.train(training)
        with torch.inference_mode(not training):
            logits = forward(x)
        if training:
            torch.autograd.backward(F.cross_entropy(logits, labels))
            model.zero_grad(set_to_none=True)

    return iteration
