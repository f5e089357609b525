"""Channel shuffles without copies: the order of channels between layers is free, if the next layer's weights follow it.

A unit of ShuffleNetV2 concatenates its two halves, copies the result to shuffle it, and the next unit takes one half of
it. Here a chain of such units (:mod:`deepsquare.surgery.routing`) passes on what the branches returned, as it is. Each
branch gets its channels in one concatenation, in whatever order has the longest slices, and the convolution that reads
them has its input channels permuted. So does the layer behind the chain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.surgery.inputs import CONVOLUTIONS
from deepsquare.surgery.insertion import DynamicSubclass, WithInserted, base_class, dynamic_subclass, is_watched
from deepsquare.surgery.ownership import is_exclusive
from deepsquare.surgery.routing import Channel, Route, Routes, find_routes
from deepsquare.surgery.trace import Call, Graph

Piece = tuple[int, int, int | None]  # a map by its index, the first channel and how many; None for the whole map
Change = tuple[nn.Module, list[int]]  # a convolution, and the position that each of its input channels had


class RoutedBlock(DynamicSubclass):
    """A block that only moves channels, as a part of a chain: it reads and returns several maps."""

    deepsquare_steps: list[tuple[str, list[Piece]]]  # the children to call, and what they read
    deepsquare_kept: list[int]  # the maps that later blocks read
    deepsquare_output: list[Piece]  # what the last block of the chain returns instead

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The maps that this block and those before it received or computed, or the map behind the chain."""
        maps = [x] if isinstance(x, Tensor) else list(x)
        for name, pieces in self.deepsquare_steps:
            maps.append(self._modules[name](_gather(maps, pieces)))  # type: ignore[misc]
        if self.deepsquare_output:
            return _gather(maps, self.deepsquare_output)
        return tuple(maps[index] for index in self.deepsquare_kept)

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError("torch.jit.script cannot compile this folded model; use torch.jit.trace(model, x)")


def _gather(maps: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    parts = [maps[i] if length is None else maps[i].narrow(1, start, length) for i, start, length in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass
class _Unit:
    """A block in a chain, with its children's calls in the order of its routes."""

    call: Call
    routes: Routes
    children: list[Call]


def unshuffle(model: nn.Module, graph: Graph) -> None:
    """Let the chains of blocks in ``model`` that shuffle channels do without, where the outputs stay the same."""
    for call in graph.calls:
        if type(call.module) is nn.Sequential and graph.is_single(call) and not is_watched(call.module):
            for chain in _chains(graph, call):
                _unshuffle_chain(model, graph, chain)


def _chains(graph: Graph, sequential: Call) -> Iterator[list[_Unit]]:
    """Runs of children that only move channels, each of which alone reads what the one before it returns."""
    chain: list[_Unit] = []
    for call in graph.calls:
        if call.parent != sequential.index:
            continue
        unit = _unit(graph, call)
        follows = chain and unit and call.input == chain[-1].call.output and _alone_reads(graph, call)
        if chain and not follows:
            yield chain
            chain = []
        if unit:
            chain.append(unit)
    if chain:
        yield chain


def _unit(graph: Graph, call: Call) -> _Unit | None:
    shuffles = {"cat", "stack"} & {node.op for node in graph.nodes if node.call == call.index}
    changed = isinstance(call.module, WithInserted) or is_watched(call.module)
    if not shuffles or changed or call.input < 0 or call.output < 0 or not graph.is_single(call):
        return None
    children = {child.path.rpartition(".")[2]: child for child in graph.calls if child.parent == call.index}
    if any(child.input < 0 or child.output in (-1, child.input) for child in children.values()):
        return None
    channels = {name: graph.nodes[child.output].shape[1] for name, child in children.items()}
    routes = find_routes(call.module, graph.nodes[call.input].shape[1], channels)
    return None if routes is None else _Unit(call, routes, [children[name] for name, _ in routes.calls])


def _alone_reads(graph: Graph, call: Call) -> bool:
    outside = [n for n in graph.nodes if call.input in n.inputs and not _within(graph, n.call, call)]
    return not outside and call.input not in graph.outputs


def _within(graph: Graph, call: int, outer: Call) -> bool:
    return call == outer.index or graph.inside(call, outer.index)


def _unshuffle_chain(model: nn.Module, graph: Graph, chain: Sequence[_Unit]) -> None:
    """Plan everything first: a chain changes as a whole, or not at all."""
    route: Route = tuple((0, c) for c in range(graph.nodes[chain[0].call.input].shape[1]))
    widths = [len(route)]  # the channels of each map
    reads: list[list[tuple[str, list[Channel]]]] = []
    changes: list[Change] = []
    shuffled = False
    for unit in chain:
        local = [route]  # the channels of the unit's own maps among those of the chain
        reads.append([])
        for (name, taken), child in zip(unit.routes.calls, unit.children, strict=True):
            needed, order = _sorted([local[k][c] for k, c in taken])
            absorbed = _absorb(model, graph, child.input, order, child)
            if absorbed is None:
                return
            changes += absorbed
            reads[-1].append((name, needed))
            widths.append(graph.nodes[child.output].shape[1])
            local.append(tuple((len(widths) - 1, c) for c in range(widths[-1])))
        route = tuple(local[k][c] for k, c in unit.routes.output)
        shuffled |= len(list(_runs(route))) > len(route) // 2
    end = chain[-1].call.output
    needed, order = _sorted(route)
    absorbed = _absorb(model, graph, end, order, None)
    if not shuffled or absorbed is None:
        return
    for conv, positions in (*changes, *absorbed):
        _permute(conv, positions)
    _rewrite([unit.call.module for unit in chain], reads, needed, widths)


def _sorted(channels: Sequence[Channel]) -> tuple[list[Channel], list[int]]:
    """The channels in the order of the maps they are from, and the position that each had."""
    order = sorted(range(len(channels)), key=channels.__getitem__)
    return [channels[position] for position in order], order


def _absorb(model: nn.Module, graph: Graph, node: int, order: list[int], within: Call | None) -> list[Change] | None:
    """The changes after which all that read ``node`` (in a call) take its channels in ``order``; None if one cannot."""
    if order == sorted(order):
        return []
    seen = [call.module for call in graph.calls if node in (call.input, call.output)]
    if any(map(is_watched, seen)) or node in (graph.outputs if within is None else (within.output,)):
        return None
    changes: list[Change] = []
    for reader in graph.nodes:
        if node not in reader.inputs or (within and not _within(graph, reader.call, within)):
            continue
        conv: Any = graph.calls[reader.call].module
        known = base_class(conv) in CONVOLUTIONS and reader.is_conv and is_exclusive(model, graph, conv)
        if not known or getattr(conv, "transposed", False):
            return None
        changes.append((conv, order))
        if conv.groups == 1:
            continue
        behind = _absorb(model, graph, reader.index, order, within)
        if behind is None or not conv.groups == conv.in_channels == conv.out_channels:
            return None
        changes += behind
    return changes


def _permute(conv: Any, order: list[int]) -> None:
    """Give a convolution its input channels in another order; a depthwise one also returns them in it."""
    if conv.groups == 1:
        conv.weight = nn.Parameter(conv.weight[:, order], conv.weight.requires_grad)
        return
    conv.weight = nn.Parameter(conv.weight[order], conv.weight.requires_grad)
    if conv.bias is not None:
        conv.bias = nn.Parameter(conv.bias[order], conv.bias.requires_grad)


def _runs(channels: Sequence[Channel]) -> Iterator[tuple[int, int, int]]:
    """Slices of maps that the channels consist of: the map, its first channel and their number."""
    starts = [0, *(i + 1 for i, ((m, c), after) in enumerate(pairwise(channels)) if after != (m, c + 1)), len(channels)]
    for start, end in pairwise(starts):
        yield (*channels[start], end - start)


def _rewrite(
    blocks: Sequence[nn.Module],
    reads: Sequence[Sequence[tuple[str, list[Channel]]]],
    output: Sequence[Channel],
    widths: Sequence[int],
) -> None:
    """Let the blocks pass on maps instead of one shuffled map."""
    needed_behind: list[set[int]] = [{m for m, _ in output}]  # the maps that are needed behind each block
    for calls in reversed(reads[1:]):
        needed_behind.insert(0, needed_behind[0] | {m for _, channels in calls for m, _ in channels})
    present, number = [0], 0
    for block, calls, needed in zip(blocks, reads, needed_behind, strict=True):

        def pieces(channels: Sequence[Channel], present: list[int] = present) -> list[Piece]:
            return [(present.index(m), c, None if n == widths[m] else n) for m, c, n in _runs(channels)]

        steps: list[tuple[str, list[Piece]]] = []
        for name, channels in calls:
            steps.append((name, pieces(channels)))
            number += 1
            present.append(number)
        block.__class__ = dynamic_subclass(RoutedBlock, base_class(block))
        last = block is blocks[-1]
        kept = [] if last else [m for m in present if m in needed]
        vars(block).update(
            deepsquare_steps=steps,
            deepsquare_kept=[present.index(m) for m in kept],
            deepsquare_output=pieces(output) if last else [],
        )
        present = kept
