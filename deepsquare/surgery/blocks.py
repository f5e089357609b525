"""Building blocks whose end runs in one pass over the map instead of several.

A ResNet's block ends with batch normalization, an addition and a ReLU, and an equipped one with Square-Excitation
between them: each is a pass over the map. A block whose ``forward`` shows one of the ends of
:mod:`~deepsquare.surgery.block_ends` runs it in one pass, in eager mode; for other blocks, and for whatever observes
modules or operations one by one (hooks, compilers, exporters), the block's original ``forward`` runs.

:func:`fuse_plain_blocks` does the same for the blocks of a network without excitations, to compare with.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from deepsquare import kernels
from deepsquare.surgery.block_ends import EXCITATION, compile_graph, find_end
from deepsquare.surgery.block_pass import BlockPass
from deepsquare.surgery.block_trace import BlockTrace, trace_block
from deepsquare.surgery.insertion import PLAN, DynamicSubclass, dynamic_subclass, is_watched


class FusedBlock(DynamicSubclass):
    """A block whose ``forward`` runs its end in one pass where possible."""

    deepsquare_plain: ClassVar[bool] = False  # whether the end is one without an excitation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and kernels.backend_for(args[0]) is not None:
            plan = _plan(self)
            if plan.run is not None and not plan.is_watched():
                return plan.run(args[0])
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, classes, state = super().__reduce_ex__(protocol)
        return make, classes, {name: value for name, value in state.items() if name != PLAN}


class FusedPlainBlock(FusedBlock):
    """The same for an end without an excitation."""

    deepsquare_plain = True


@dataclass
class Plan:
    """How a block runs: its forward with the end in one pass, and the modules that this does not call."""

    trace: BlockTrace
    run: Callable[[Tensor], Any] | None = None
    skipped: tuple[nn.Module, ...] = ()
    classes: tuple[type[nn.Module], ...] = ()  # of ``skipped``

    def holds(self, forward: Callable[..., Any]) -> bool:
        """Whether the plan is still that of the block. Runs at every call."""
        return self.trace.holds(forward) and tuple(map(type, self.skipped)) == self.classes

    def is_watched(self) -> bool:
        """Whether a hook needs a skipped module to be called."""
        return bool(torch_module._has_any_global_hook()) or any(map(is_watched, self.skipped))  # type: ignore[no-untyped-call]


def fuse_blocks(model: nn.Module) -> None:
    """Let every block of an equipped model that ends with Square-Excitation run its end in one pass."""
    excited = [path for path, module in model.named_modules() if EXCITATION in module._modules]
    for block in _blocks_around(model, excited):
        _fuse(block, FusedBlock)


def fuse_plain_blocks(model: nn.Module) -> int:
    """Let the blocks of a model without excitations run their end in one pass, in place; returns how many are new.

    The counterpart of what ``equip`` does for blocks with Square-Excitation, so that benchmarks can tell the cost of
    the excitation from the gain of the fusion. It acts on a CPU; in training not on a concatenation.
    """
    paths = [path for path, _ in model.named_modules()]
    return sum(_fuse(block, FusedPlainBlock) for block in _blocks_around(model, paths))


def _blocks_around(model: nn.Module, paths: Sequence[str]) -> Iterator[nn.Module]:
    """The modules below the model whose own ``forward`` calls those at ``paths``."""
    modules = dict(model.named_modules())
    blocks: dict[nn.Module, None] = {}
    for path in paths:
        while path := path.rpartition(".")[0]:
            if type(modules[path]).forward is not nn.Sequential.forward:
                blocks[modules[path]] = None
                break
    yield from blocks


def _fuse(block: nn.Module, mixin: type[FusedBlock]) -> bool:
    base = type(block)
    if isinstance(block, FusedPlainBlock) and not mixin.deepsquare_plain:
        base = block.deepsquare_base  # it has an excitation since
    elif isinstance(block, DynamicSubclass):
        return False  # something is inserted at the block itself
    plan = _new_plan(block, base, plain=mixin.deepsquare_plain)
    if plan.run is None:
        return False
    block.__class__ = dynamic_subclass(mixin, base)
    vars(block)[PLAN] = plan
    return True


def _plan(block: FusedBlock) -> Plan:
    """The plan of a block as it is now. Runs at every call."""
    plan: Plan | None = vars(block).get(PLAN)
    base = block.deepsquare_base
    if plan is None or not plan.holds(base.forward):
        plan = vars(block)[PLAN] = _new_plan(block, base, plain=block.deepsquare_plain)
    return plan


def _new_plan(block: nn.Module, base: type[nn.Module], *, plain: bool) -> Plan:
    trace = trace_block(block, base)
    plan, graph, ends = Plan(trace), trace.graph, 0
    while graph is not None and (end := find_end(graph, trace.modules, plain=plain)):
        ends += 1
        for module in end.modules(trace.modules):
            trace.children.setdefault(module, tuple(module._modules.values()))
        block_pass = BlockPass(end, trace.modules)
        with graph.inserting_before(end.output):
            merged = graph.call_function(block_pass.run, (end.main.source, end.shortcut.source))
        end.output.replace_all_uses_with(merged)
        for node in reversed(list(graph.nodes)):
            if node in end.nodes:
                graph.erase_node(node)
        plan.skipped += tuple(block_pass.modules)
    if ends and graph is not None:
        containers = [module for module in trace.modules.values() if type(module).forward is nn.Sequential.forward]
        plan.skipped += tuple(containers)
        plan.classes = tuple(map(type, plan.skipped))
        plan.run = compile_graph(graph, trace.modules)
    return plan
