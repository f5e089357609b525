"""The form in which a model is exported: folded, its squares written as the few operations that runtimes are fast at.

The functions of :mod:`deepsquare.functional` mind half types, 0/0 and gradients; in a graph each of these would be
operations of its own. Here α, s and the type are known, so that a mean of squares is a product and an average, and
Scale-Proportion an addition and a division.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.nn import SquareExcitation, SquarePooling, SquareSoftmin
from deepsquare.surgery import fold
from deepsquare.surgery.folding import replace


def lower_for_export(model: nn.Module, images: Tensor, flatten_maps: bool = False) -> nn.Module:
    """A copy of ``model``, which is in eval mode, to be exported; it is shown ``images`` once.

    ``flatten_maps`` is for onnxruntime and an input of one size. It keeps maps in blocks of channels, squares them there and
    then reorders both the map and its square; of a flattened map only the map.
    """
    folded = fold(model, input_shape=images.shape[1:])
    for module in list(folded.modules()):
        form = _form(module, flatten_maps)
        if form is not None:
            replace(folded, module, form)
    hooks = [
        module.register_forward_pre_hook(Excitation.fit)
        for module in folded.modules()
        if isinstance(module, Excitation)
    ]
    with torch.no_grad():
        folded(images)
    for hook in hooks:
        hook.remove()
    return folded.requires_grad_(False)


def lower_for_xnnpack(form: nn.Module, images: Tensor) -> torch.fx.GraphModule:
    """``form`` as a graph for XNNPACK, which takes slices but no splits, and averages if they keep their dimensions.

    Without this a ShuffleNetV2 falls into fifteen parts.
    """
    program = torch.export.export(form, (images,)).module()
    assert isinstance(program, torch.fx.GraphModule)
    graph, aten = program.graph, torch.ops.aten
    for node in list(graph.nodes):
        if node.target in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
            axis = node.args[2] if len(node.args) > 2 else 0
            ends = list(accumulate(part.shape[axis] for part in node.meta["val"]))
            for part in list(node.users):
                place = part.args[1]
                start = ends[place - 1] if place else 0
                _put(graph, part, aten.slice.Tensor, (node.args[0], axis, start, ends[place]))
            graph.erase_node(node)
        elif node.target is aten.mean.dim and node.args[2:] in ((), (False,)) and not node.kwargs:
            with graph.inserting_before(node):
                kept = graph.call_function(aten.mean.dim, (*node.args[:2], True))
            _put(graph, node, aten.transform.default, (kept, list(node.meta["val"].shape)))
    program.recompile()
    return program


def _put(graph: torch.fx.Graph, node: torch.fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        node.replace_all_uses_with(graph.call_function(target, arguments))
    graph.erase_node(node)


class Pooling(nn.Module):
    """Square-Pooling, Equation (20)."""

    def __init__(self, keepdim: bool) -> None:
        super().__init__()
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, spatial…) to (N, C) or (N, C, 1, …)."""
        pooled = _mean_square(x)
        return pooled if self.keepdim else pooled.flatten(1)


class Excitation(nn.Module):
    """Square-Excitation with α² known."""

    offset: Tensor
    sides: tuple[int, ...]  # of a map that is flattened

    def __init__(self, offset: Tensor, flatten_maps: bool = False) -> None:
        super().__init__()
        self.register_buffer("offset", offset)
        self.flatten_maps, self.sides = flatten_maps, ()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, spatial…) to the same shape."""
        if not self.sides:
            return self._excite(x)
        channels = self.offset.shape[1]
        excited = self._excite(x.reshape(-1, channels, math.prod(self.sides)))
        return excited.reshape(-1, channels, *self.sides)

    def _excite(self, x: Tensor) -> Tensor:
        g = _mean_square(x)
        return x * (g / (g + self.offset))

    def fit(self, inputs: tuple[Tensor]) -> None:
        """Store α² for every channel, as onnxruntime is slow at adding one number to a hundred, and the map's sides."""
        (x,) = inputs
        spatial = 1 if self.flatten_maps else x.ndim - 2
        self.offset = self.offset.expand(1, x.shape[1], *[1] * spatial).clone()
        if self.flatten_maps:
            self.sides = tuple(x.shape[2:])


class Softmin(nn.Module):
    """Square-Softmin, Equation (24), with s known, if it could not be merged; ``factor`` is −s, or s with sign 1."""

    factor: Tensor | None

    def __init__(self, factor: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        """(N, K) or (N, K, 1, 1) to the same shape."""
        squared = x * x
        if self.factor is None:
            return -squared
        return squared * self.factor.reshape(-1, *[1] * (x.ndim - 2))


def _form(module: nn.Module, flatten_maps: bool) -> nn.Module | None:
    if type(module) is SquarePooling:
        return Pooling(module.keepdim)
    if type(module) is SquareExcitation:
        offset = module.alpha.detach().square()
        smallest = torch.finfo(offset.dtype).tiny
        return Excitation(offset, flatten_maps) if bool(offset >= smallest) else nn.Identity()  # s = 1 for α = 0
    if type(module) is SquareSoftmin:
        scale = module.scale
        if scale is None and module.sign == -1:
            return Softmin(None)
        return Softmin(module.sign * (torch.ones(1) if scale is None else scale.detach()))
    return None


def _mean_square(x: Tensor) -> Tensor:
    return (x * x).mean(tuple(range(2, x.ndim)), keepdim=True)
