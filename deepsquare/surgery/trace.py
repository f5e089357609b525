"""The data flow of one forward pass: the inputs of every operation, and the module whose ``forward`` called it.

A site is a position in the data flow ("the last convolution before the addition"), but modules can only be attached to
other modules. So the model is run once on fake tensors, without computation or memory, and every operation is recorded.
This works for any model that runs, whatever its classes are.
"""

import copy
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepsquare.surgery.inputs import OTHER_SIZES, example_shape, explain_shape, float_tensor

VIEWS = {  # operations that move, cut or pad values, or return them unchanged
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "flatten", "slice",
    "select", "expand", "alias", "clone", "detach", "contiguous", "_to_copy", "split", "split_with_sizes",
    "constant_pad_nd", "native_dropout", "unbind", "lift_fresh", "view_as",
}  # fmt: skip
MATRIX_PRODUCTS = ("addmm", "mm")  # nn.Linear with and without a bias
LINEAR = VIEWS | {
    "convolution", "add", "sub", "native_batch_norm", "_native_batch_norm_legit_no_training", "avg_pool2d",
}  # fmt: skip


@dataclass
class Node:
    """One operation. ``inputs`` are the nodes whose values it reads; parameters and constants are not nodes."""

    index: int
    op: str
    inputs: tuple[int, ...]
    call: int
    shape: tuple[int, ...]
    channel_dim: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()

    @property
    def is_conv(self) -> bool:
        """Whether this is a convolution with learned weights, of any kernel size."""
        return bool(self.kernel)

    @property
    def is_layer(self) -> bool:
        """Whether this is a learned convolution or a fully connected layer."""
        return self.is_conv or self.op in MATRIX_PRODUCTS

    @property
    def is_linear(self) -> bool:
        """Whether its output is linear in its inputs (a constant factor is, a product of two nodes is not)."""
        return self.op in LINEAR or (self.op in ("mul", "div") and len(self.inputs) == 1)

    @property
    def is_spatial_conv(self) -> bool:
        """Whether this convolution reads neighboring positions: kernel above 1×1, and not a patch embedding."""
        return any(k > 1 and s < k for k, s in zip(self.kernel, self.stride, strict=True))


@dataclass
class Call:
    """One execution of a module's ``forward``; ``input`` and ``output`` are -1 where they are not one tensor."""

    index: int
    module: nn.Module
    path: str
    parent: int
    input: int = -1
    output: int = -1


@dataclass
class Graph:
    """The recorded forward pass; node 0 is the model's input, call 0 the model itself."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)  # bit i of ancestors[n]: node n depends on node i
    times_called: Counter[nn.Module] = field(default_factory=Counter)
    output: int = -1  # of several tensors, the one that the most layers compute
    outputs: tuple[int, ...] = ()
    input_shape: tuple[int, ...] = ()

    def depends(self, node: int, on: int) -> bool:
        """Whether ``node`` was computed from ``on``."""
        return bool(self.ancestors[node] >> on & 1)

    def between(self, start: int, end: int) -> list[Node]:
        """Nodes on the paths from ``start`` (exclusive) to ``end`` (inclusive)."""
        inner = [n for n in self.nodes[start:end] if self.depends(end, n.index) and self.depends(n.index, start)]
        return [*inner, self.nodes[end]] if end != start else []

    def layers(self, node: int) -> int:
        """The number of layers that ``node`` was computed by."""
        return sum(n.is_layer and (n.index == node or self.depends(node, n.index)) for n in self.nodes)

    def readers(self, node: int) -> int:
        return sum(node in n.inputs for n in self.nodes)

    def dominates(self, node: int, end: int) -> bool:
        """Whether every path from the model's input to ``end`` passes through ``node``."""
        reached = {0} if node else set()
        for n in self.nodes[1 : end + 1]:
            if n.index != node and not reached.isdisjoint(n.inputs):
                reached.add(n.index)
        return end not in reached

    def is_single(self, call: Call) -> bool:
        """Whether the called module has a path in the model, and this is its only call."""
        return bool(call.path) and self.times_called[call.module] == 1

    def inside(self, call: int, outer: int) -> bool:
        """Whether ``call`` ran within ``outer`` (and is not ``outer`` itself)."""
        while call > outer:
            call = self.calls[call].parent
            if call == outer:
                return True
        return False


class BatchNormShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Batch normalization by its shapes alone: on fake and meta tensors torch decomposes it in slow Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default):
            x = args[0]
            return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a :class:`Graph` while a model runs under this mode."""

    def __init__(self, model: nn.Module, original: dict[nn.Module, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.original = original  # the module that each module of ``model`` is a copy of
        self.graph = Graph()
        self.paths = {module: path for path, module in model.named_modules()}
        self.thread = threading.get_ident()
        self.stack: list[int] = []
        self.node_of: dict[int, int] = {}
        self.learned = {id(parameter) for parameter in model.parameters()}
        self.alive: list[Any] = []  # keeps every tensor, so that no id() is reused

    def add_node(self, op: str, inputs: Sequence[int], tensors: Sequence[Tensor], **details: Any) -> None:
        index = len(self.graph.nodes)
        call = self.stack[-1] if self.stack else 0
        self.graph.nodes.append(Node(index, op, tuple(inputs), call, tuple(tensors[0].shape), **details))
        mask = 0
        for i in inputs:
            mask |= self.graph.ancestors[i] | 1 << i
        self.graph.ancestors.append(mask)
        for tensor in tensors:
            self.node_of[id(tensor)] = index
        self.alive.append(tensors)

    def find(self, value: Any) -> int:
        """The node of ``value``; -1 if it is no recorded tensor."""
        return self.node_of.get(id(value), -1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        inputs = [self.node_of[id(t)] for t in read if id(t) in self.node_of]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if inputs and outputs:
            op = func._schema.name.removeprefix("aten::").removesuffix("_")
            details = self.details(op, self.graph.nodes[inputs[0]], args, tuple(outputs[0].shape))
            self.add_node(op, inputs, outputs, **details)
        elif any(id(t) in self.learned for t in read):  # computed from parameters only, as a standardized weight
            self.learned |= {id(t) for t in outputs}
            self.alive.append(outputs)
        return result

    def details(self, op: str, source: Node, args: tuple[Any, ...], shape: tuple[int, ...]) -> dict[str, Any]:
        """What the finder needs to know: the channel dimension, a convolution's kernel, the dimensions of a mean."""
        rank, channel_dim = len(source.shape), source.channel_dim
        if op == "convolution":
            learned = id(args[1]) in self.learned
            kernel, stride = (tuple(args[1].shape[2:]), tuple(args[3])) if learned else ((), ())
            return {"channel_dim": 1, "kernel": kernel, "stride": stride}
        if op in MATRIX_PRODUCTS:
            return {"channel_dim": len(shape) - 1}
        if op == "permute":
            return {"channel_dim": [d % rank for d in args[1]].index(channel_dim)}
        if op == "transpose":
            first, second = (d % rank for d in args[1:3])
            return {"channel_dim": {first: second, second: first}.get(channel_dim, channel_dim)}
        if op == "mean":
            dims = args[1] if len(args) > 1 and args[1] else range(rank)
            return {"channel_dim": 1, "dims": tuple(sorted(d % rank for d in dims))}
        if len(shape) != rank:  # a view: channels stay last where they were last, else they are second
            stays_last = shape and channel_dim == rank - 1 and source.shape[-1] == shape[-1]
            channel_dim = len(shape) - 1 if stays_last else 1
        return {"channel_dim": channel_dim}

    def enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self.thread:  # the hooks are global: another thread may run a model
            return
        parent = self.stack[-1] if self.stack else -1
        index = len(self.graph.calls)
        path, module = self.paths.get(module, ""), self.original.get(module, module)
        self.graph.calls.append(Call(index, module, path, parent, self.find(args[0] if args else None)))
        self.graph.times_called[module] += 1
        self.stack.append(index)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        self.graph.calls[self.stack.pop()].output = self.find(output)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in what a model returns: also in the output classes of other libraries, which torch does not open."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)) or is_dataclass(value):
        if is_dataclass(value) and not isinstance(value, Mapping):
            value = vars(value)
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def copy_around(model: nn.Module, tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the model with other tensors, so that a forward pass leaves no trace in the model itself."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    if any(isinstance(value, (UninitializedParameter, UninitializedBuffer)) for value in tensors):
        raise ValueError(f"{type(model).__name__} has lazy modules; run it once to initialize them")
    try:
        return copy.deepcopy(model, {id(value): tensor(value) for value in tensors})
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied, so it cannot be traced: {error}. Make copy.deepcopy(model) "
            "work, or equip the part of it that can be copied"
        ) from error


def trace(model: nn.Module, input_shape: Sequence[int] | None = None) -> Graph:
    """Run ``model`` once in evaluation mode on a fake batch and return its data flow.

    Args:
        model: any module that takes one tensor.
        input_shape: shape of one input without the batch, ``(C, H, W)``; guessed when not given.
    """
    shape = example_shape(model, input_shape)
    try:
        return _trace(model, shape)
    except ValueError:
        for size in OTHER_SIZES[len(shape) - 1] if input_shape is None else ():
            with suppress(ValueError):
                return _trace(model, (shape[0], *size))
        raise


def _trace(model: nn.Module, shape: tuple[int, ...]) -> Graph:
    # Parameters are only read; a buffer may be written to.
    copied = copy_around(model, lambda t: t if isinstance(t, nn.Parameter) else t.detach().clone()).eval()
    recorder = _Recorder(copied, dict(zip(copied.modules(), model.modules(), strict=True)))
    anchor = float_tensor(model)
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        batch = torch.empty((2, *shape), device=anchor.device, dtype=anchor.dtype)
        recorder.add_node("input", (), (batch,), channel_dim=1)
        hooks = register_module_forward_pre_hook(recorder.enter), register_module_forward_hook(recorder.leave)
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        logger.disabled = True  # it prints the traceback of an error that is raised below
        try:
            with explain_shape(model, (2, *shape)), BatchNormShapes(), recorder:  # type: ignore[no-untyped-call]
                returned = copied(batch)
        finally:
            logger.disabled = False
            for hook in hooks:
                hook.remove()
    graph = recorder.graph
    graph.input_shape = shape
    graph.outputs = tuple(dict.fromkeys(node for t in tensors_in(returned) if (node := recorder.find(t)) >= 0))
    if not graph.outputs:
        raise ValueError(f"{type(model).__name__} returned no tensor that was computed from its input")
    # The logits rather than the features before them; and of logits and their softmax, the logits.
    graph.output = max(graph.outputs, key=lambda node: (graph.layers(node), -node))
    return graph
