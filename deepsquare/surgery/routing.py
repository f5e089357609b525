"""Blocks that only move channels between their children: which channel goes where.

The ``forward`` of such a block splits, concatenates and shuffles channels, and all arithmetic is in its children, as in
ShuffleNetV2. :func:`find_routes` records it by torch.fx, which allows no other operations, and runs the record on
tensors in which every value is another number: what the numbers are at the end is where the channels came from.
"""

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from deepsquare.surgery.insertion import base_class

Channel = tuple[int, int]  # the tensor it is from (0: the block's input; k: what the k-th called child returns), index
Route = tuple[Channel, ...]

MOVES = {  # without arithmetic; the division is one of sizes, and would change the numbers of a tensor
    torch.cat, torch.concat, torch.chunk, torch.split, torch.transpose, torch.permute, torch.reshape, torch.flatten,
    torch.stack, operator.getitem, operator.floordiv, getattr,
}  # fmt: skip
METHODS = {
    "chunk", "contiguous", "flatten", "permute", "reshape", "size", "split", "transpose", "unflatten", "view",
}  # fmt: skip
PROBE = (2, 3, 5)  # batch size, height and width of the numbered tensors


@dataclass
class Routes:
    """What a block does with its channels."""

    calls: list[tuple[str, Route]] = field(default_factory=list)  # the children by name, and what they read, in order
    output: Route = ()


class _Blocks(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class _UnknownError(Exception):
    """A tensor does not consist of whole channels."""


class _Runner(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, in_channels: int, out_channels: Mapping[str, int]) -> None:
        super().__init__(graph)
        self.out_channels = out_channels
        self.sources: list[Tensor] = []
        self.routes = Routes()
        self.start = self.numbered(in_channels)

    def numbered(self, channels: int) -> Tensor:
        """The next tensor of the block, in which every value is a number that no other tensor has."""
        batch, height, width = PROBE
        shape = (batch, channels, height, width)
        first = sum(source.numel() for source in self.sources)
        values = torch.arange(batch * channels * height * width, dtype=torch.float64) + first + 0.5
        self.sources.append(values.reshape(shape))
        return self.sources[-1]

    def route(self, value: Any) -> Route:
        """The channels that a tensor consists of."""
        if not isinstance(value, Tensor) or value.ndim != 4 or (value.shape[0], *value.shape[2:]) != PROBE:
            raise _UnknownError
        every = torch.cat(self.sources, 1)
        known = {number: index for index, number in enumerate(every[0, :, 0, 0].tolist())}
        taken = [known.get(number, -1) for number in value[0, :, 0, 0].tolist()]
        if -1 in taken or not torch.equal(every[:, taken], value):
            raise _UnknownError
        channels = [(k, c) for k, source in enumerate(self.sources) for c in range(source.shape[1])]
        return tuple(channels[index] for index in taken)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if len(args) != 1 or kwargs or target not in self.out_channels:
            raise _UnknownError
        self.routes.calls.append((target, self.route(args[0])))
        return self.numbered(self.out_channels[target])


def find_routes(block: nn.Module, in_channels: int, out_channels: Mapping[str, int]) -> Routes | None:
    """The routes of a block's channels, if it only moves channels; ``out_channels`` of its children, by name."""
    plain = copy.copy(block)
    plain.__class__ = base_class(block)
    try:
        graph = _Blocks().trace(plain)
        allowed: dict[str, Callable[[fx.Node], bool]] = {
            "placeholder": lambda node: not node.args,
            "call_function": lambda node: node.target in MOVES,
            "call_method": lambda node: node.target in METHODS,
            "call_module": lambda node: True,
            "output": lambda node: True,
        }
        if not all(node.op in allowed and allowed[node.op](node) for node in graph.nodes):
            return None
        runner = _Runner(fx.GraphModule(plain, graph), in_channels, out_channels)
        runner.routes.output = runner.route(runner.run(runner.start))
    except Exception:  # torch.fx cannot follow this ``forward``, or its operations do not take other sizes
        return None
    return runner.routes
