"""Ends of building blocks that one pass can compute, found in the data flow of the block's ``forward``.

In ``relu(norm(z) + shortcut)`` and ``shuffle(cat((shortcut, relu(norm(z))), 1))`` everything after z is a function of
each plane of z and of the shortcut. Either side may be normalized, and one of them is excited.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from deepsquare.nn import SquareExcitation
from deepsquare.surgery.inputs import CONVOLUTIONS
from deepsquare.surgery.insertion import PREFIX, WithInserted, base_class
from deepsquare.surgery.site import Site

EXCITATION = PREFIX + "excitation"
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ADD_IN_PLACE = (operator.iadd, "add_")
_ADD = (operator.add, torch.add, "add", *_ADD_IN_PLACE)
_CAT = (torch.cat, torch.concat, torch.concatenate)
_RELU = (F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_")
_MOVES = {  # what a channel shuffle is written with; none of them computes with values
    "size", "view", "reshape", "transpose", "permute", "contiguous", "flatten", "getitem", "floordiv", "getattr", "mul",
    "swapaxes", "unflatten", "movedim",
}  # fmt: skip
Modules = dict[str, nn.Module]


@dataclass(frozen=True)
class Branch:
    """One side of a merge, ``excitation(relu(norm(source)))`` or a part of it."""

    source: fx.Node
    nodes: tuple[fx.Node, ...]  # from the merge back to the source
    norm: nn.Module | None  # batch normalization; or any other module, where the excitation is attached to that one
    relu: bool
    excited: WithInserted | None  # the module that the excitation is attached to

    def written_out(self) -> fx.Graph:
        """The branch as a function of its source."""
        return _subgraph([self.source], self.nodes, self.nodes[0] if self.nodes else self.source)


@dataclass(frozen=True)
class End:
    """The end of a block: a merge of a main branch with a shortcut."""

    main: Branch
    shortcut: Branch
    nodes: frozenset[fx.Node]  # all that one pass replaces
    output: fx.Node
    casts: bool  # whether the addition is in place, so that the shortcut takes the type of the branch
    shuffled: bool  # whether the branches are concatenated and their channels shuffled

    def written_out(self) -> fx.Graph:
        """The nodes of the end as a function of the two sources."""
        return _subgraph([self.main.source, self.shortcut.source], self.nodes, self.output)

    def modules(self, modules: Modules) -> Iterator[nn.Module]:
        """The modules that one pass stands for."""
        yield from (modules[str(node.target)] for node in self.nodes if node.op == "call_module")


def find_end(graph: fx.Graph, modules: Modules, *, plain: bool) -> End | None:
    """The first end in ``graph`` whose main branch has an excitation; or, for ``plain``, has none."""
    for node in graph.nodes:
        end = _added(node, modules) if _calls(node, _ADD) else _shuffled(node, modules) if _calls(node, _CAT) else None
        if end is not None and (end.main.excited is None) == plain:
            return end
    return None


def _calls(node: fx.Node, targets: Collection[Any]) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets


def _added(node: fx.Node, modules: Modules) -> End | None:
    """relu(branch + shortcut)"""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    output = _only_user(node)
    if output is None or not _is_relu(output, modules):
        return None
    first, second = (_branch(arg, modules) for arg in node.args if isinstance(arg, fx.Node))
    casts = node.target in _ADD_IN_PLACE
    if casts and first.norm is None and first.excited is None:
        return None  # it writes to a tensor that others may read
    if first.norm is None and first.excited is None:
        first, second = second, first  # in training the normalization of the main branch is part of the pass
    end = _merged(first, second, (node, output), output, casts=casts, shuffled=False)
    return None if end is None or (casts and end.main is not first) else end


def _shuffled(node: fx.Node, modules: Modules) -> End | None:
    """channel_shuffle(cat((shortcut, branch), 1), 2)"""
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    parts: Any = node.kwargs.get("tensors", node.args[0] if node.args else None)
    if dim != 1 or not isinstance(parts, (tuple, list)) or len(parts) != 2:
        return None
    moves, output = _moves(node)
    first, second = (_branch(part, modules) for part in parts)
    channels = _channels(second)
    if output is None or channels is None or not _interleaves(node, moves, output, channels):
        return None
    end = _merged(second, first, (node, *moves), output, casts=False, shuffled=True)
    return None if end is None or end.main is not second else end


def _merged(first: Branch, second: Branch, merge: tuple[fx.Node, ...], output: fx.Node, **kind: bool) -> End | None:
    if second.excited is not None:
        first, second = second, first
    if first.source is second.source or second.excited is not None:
        return None
    nodes = frozenset((*first.nodes, *second.nodes, *merge))
    return End(first, second, nodes, output, **kind)


def _channels(branch: Branch) -> int | None:
    if branch.excited is not None:
        site: Site = branch.excited._modules[EXCITATION].deepsquare_site  # type: ignore[union-attr, assignment]
        return site.channels
    return getattr(branch.norm, "num_features", None)


def _branch(end: fx.Node, modules: Modules) -> Branch:
    """What computes ``end``, from the last module back to the one that a pass cannot include."""
    nodes: list[fx.Node] = []
    norm, relu, excited, node = None, False, None, end
    while norm is None and _is_unary_call(node) and len(node.users) == 1:
        module: Any = modules[str(node.target)]
        kind = base_class(module)
        if isinstance(module, WithInserted):
            if "deepsquare_base" not in vars(type(module)):  # a subclass by torch.nn.utils.parametrize: not what it was
                break
            if excited is not None or relu or not _has_excitation_only(module):
                break
            excited = module
        if kind is nn.ReLU and not relu:
            relu = True
        elif kind in NORMS or (excited is module and kind not in (nn.Identity, nn.ReLU)):
            norm = module
        elif kind is not nn.Identity:
            break
        nodes.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if relu and norm is None and not is_fresh(node, modules):
        return Branch(end, (), None, False, None)  # the ReLU may be in place, and its input read elsewhere
    return Branch(node, tuple(nodes), norm, relu, excited)


def is_fresh(node: fx.Node, modules: Modules) -> bool:
    """Whether the value is a convolution's result that nothing else reads."""
    module = modules[str(node.target)] if _is_unary_call(node) and len(node.users) == 1 else None
    return module is not None and base_class(module) in list(CONVOLUTIONS)


def _has_excitation_only(module: WithInserted) -> bool:
    if list(module.deepsquare_inserted) != [EXCITATION]:
        return False
    excitation = module._modules[EXCITATION]
    site: Site = excitation.deepsquare_site  # type: ignore[union-attr, assignment]
    known = type(excitation) is SquareExcitation and not excitation._modules
    return known and site.position == "output" and site.channel_dim == 1 and not (site.relu_first or site.keeps_size)


def _is_unary_call(node: fx.Node) -> bool:
    return node.op == "call_module" and len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def _is_relu(node: fx.Node, modules: Modules) -> bool:
    if node.op == "call_module":
        return _is_unary_call(node) and type(modules[str(node.target)]) is nn.ReLU
    return _calls(node, _RELU) and len(node.args) == 1 and set(node.kwargs) <= {"inplace"}


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _moves(start: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """The operations that only move the values of ``start``, and the last of them, if only that is read elsewhere."""
    region, moves = {start}, []
    for node in start.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.all_input_nodes and region.issuperset(node.all_input_nodes) and name in _MOVES:
            region.add(node)
            moves.append(node)
    read = [node for node in region if any(user not in region for user in node.users)]
    return moves, read[0] if len(read) == 1 else None


def _interleaves(start: fx.Node, moves: list[fx.Node], output: fx.Node, channels: int) -> bool:
    """Whether ``moves`` alternate the channels of the two halves of ``start``: tried on numbered maps of two sizes."""
    shuffle = compile_graph(_subgraph([start], moves, output), {})
    for batch, *sides in ((2, 3, 5), (3, 4, 2)):
        count = batch * 2 * channels * sides[0] * sides[1]
        x = torch.arange(count, device="cpu").reshape(batch, 2 * channels, *sides)  # also for models on meta
        try:
            y = shuffle(x)
        except Exception:  # it is written for one size
            return False
        halves = torch.stack([x[:, :channels], x[:, channels:]], 2)
        if not isinstance(y, Tensor) or not torch.equal(y, halves.reshape(x.shape)):
            return False
    return True


def _subgraph(inputs: Sequence[fx.Node], nodes: Collection[fx.Node], output: fx.Node) -> fx.Graph:
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in inputs}
    for node in output.graph.nodes:
        if node in nodes:
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(values[output])
    return graph


def compile_graph(graph: fx.Graph, modules: Modules) -> Callable[..., Any]:
    """A function that runs ``graph``, in which the modules are bound by identity."""
    namespace = SimpleNamespace()
    for index, node in enumerate(graph.nodes):
        if node.op == "call_module":
            setattr(namespace, f"module{index}", modules[node.target])
            node.target = f"module{index}"
    code = graph.python_code("self")
    exec(compile(code.src, "<deepsquare block>", "exec"), code.globals)
    run: Callable[..., Any] = code.globals["forward"]
    return lambda *values: run(namespace, *values)
