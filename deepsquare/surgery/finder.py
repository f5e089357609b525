"""Finding the sites of a CNN in the data flow of its forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from torch import nn

from deepsquare.surgery.insertion import base_class
from deepsquare.surgery.site import Kind, Site, Sites
from deepsquare.surgery.trace import VIEWS, Call, Graph, Node

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
NO_BLOCKS = "no building block in which a nonlinear main branch with a spatial convolution meets a shortcut"
AVERAGES = ("mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")


@dataclass(frozen=True)
class _Block:
    """A merge of a main branch with a shortcut.

    ``main`` is the last node of the main branch, ``region`` all of its nodes, ``path`` the module that contains them.
    """

    merge: Node
    main: int
    region: tuple[Node, ...]
    path: str

    def __str__(self) -> str:
        return f"block {self.path or '(the model itself)'}"


def find_sites(model: nn.Module, graph: Graph) -> Sites:
    """All sites of ``model``, whose data flow is ``graph``; refuses transformers and others that are not CNNs."""
    blocks = _blocks(graph)
    _refuse_other_networks(model, graph, blocks)
    results: dict[Kind, list[Site] | str] = {
        "pooling": _pooling(graph),
        "logits": _logits(graph),
        "branch_end": _in_blocks([_branch_end(graph, block) for block in blocks]),
        "last_spatial_conv": _in_blocks([_last_spatial_convs(graph, block) for block in blocks]),
    }
    sites = tuple(site for result in results.values() if not isinstance(result, str) for site in result)
    missing = {kind: result for kind, result in results.items() if isinstance(result, str)}
    return Sites(sites, missing, graph.input_shape, *_classifier(graph))


def _in_blocks(results: list[list[Site] | str]) -> list[Site] | str:
    """The sites of all blocks, with their stages numbered; or why a block has none."""
    # By path: in a dual path network one main branch serves an addition and a concatenation.
    by_path: dict[str, Site] = {}
    for result in results:
        if isinstance(result, str):
            return result
        by_path |= {site.path: site for site in result}
    groups = groupby(by_path.values(), key=lambda site: site.shape)
    return [replace(site, stage=stage) for stage, (_, group) in enumerate(groups, 1) for site in group] or NO_BLOCKS


def named_site(model: nn.Module, graph: Graph, path: str, term: str) -> Site:
    """The output of the module that a term names."""
    module = dict(model.named_modules(remove_duplicate=False)).get(path) if path else None
    if module is None:
        name, children = type(model).__name__, ", ".join(dict(model.named_children()))
        problem = f"{name} has no module {path!r} for" if path else "the name of a module is missing in"
        raise ValueError(
            f"{problem} the term {term!r}; name one as in {term}(after='…'). The children of {name} are: {children}"
        )
    while isinstance(module, nn.Sequential) and len(module):  # an inserted child of a Sequential would be run by it
        name, module = list(module.named_children())[-1]
        path = f"{path}.{name}"
    if isinstance(module, CONTAINERS):
        raise ValueError(f"{path} is a {type(module).__name__}, which has no output of its own; name a module in it")
    call = next((call for call in graph.calls if call.module is module and call.output >= 0), None)
    if call is None:
        raise ValueError(
            f"{path} is not called by {type(model).__name__}'s forward; name a module for {term!r} that is"
        )
    return _site(graph, "named", replace(call, path=path), "output")


def last_strides(graph: Graph) -> list[str] | str:
    """The paths of the convolutions that downsample to the map of the last stage; or why they cannot have stride 1."""
    pool = _pooling_node(graph)
    if pool is None:
        return NO_POOLING
    size = graph.nodes[pool.inputs[0]].shape[2:]
    paths = []
    for node in graph.between(0, pool.inputs[0]):
        sources = [graph.nodes[i].shape[2:] for i in node.inputs]
        if node.shape[2:] != size or not any(len(s) == len(size) and s != size and max(s) > 1 for s in sources):
            continue  # a source of 1×1 is a gate
        call = graph.calls[node.call]
        layer = call.module
        if not node.is_conv or not isinstance(layer, nn.Conv2d) or graph.times_called[layer] > 1:
            return f"the map is downsampled by {call.path or node.op}, which is not a convolution that is used once"
        if not isinstance(layer.padding, str) and any(
            2 * p != d * (k - 1) for p, d, k in zip(layer.padding, layer.dilation, layer.kernel_size, strict=True)
        ):
            return f"{call.path} would not keep the size of its map at stride 1"
        paths.append(call.path)
    return paths or "no layer downsamples the map of the last stage"


def layer_after_pooling(graph: Graph) -> str:
    """The layer that reads the pooled values; raises where something else does."""
    pool = _pooling_node(graph)
    assert pool is not None, "there is a pooling site"
    layer = next((n for n in graph.nodes if n.is_layer and graph.depends(n.index, pool.index)), None)
    if layer and pool.index in _skip_views(graph, layer.inputs[0]):
        call = graph.calls[layer.call]
        fits = base_class(call.module) in (nn.Linear, nn.Conv2d) and getattr(call.module, "groups", 1) == 1
        fits = fits and isinstance(call.module._parameters.get("weight"), nn.Parameter)
        if fits and graph.times_called[call.module] == 1:
            return call.path
    reader = next((n.op for n in graph.nodes if pool.index in n.inputs), "nothing")
    raise ValueError(
        f"the pooled values are read by {reader}, not by one fully connected layer (nn.Linear or a 1×1 nn.Conv2d) "
        "that could be widened; give the model such a layer, or use a term that keeps the number of channels"
    )


def _refuse_other_networks(model: nn.Module, graph: Graph, blocks: list[_Block]) -> None:
    """Refuse a model with more attention layers than convolutional blocks and than a quarter of its convolutions."""
    matmuls = [n for n in graph.nodes if n.op in ("bmm", "baddbmm") and len(n.inputs) == 2]
    fused = [n for n in graph.nodes if "attention" in n.op]
    attention = len({n.call for n in matmuls + fused})
    convs = sum(n.is_spatial_conv for n in graph.nodes)
    if not convs or (attention > len(blocks) and 4 * attention > convs):
        raise ValueError(
            f"{type(model).__name__} is not a CNN: it has {attention} attention layers, {convs} spatial convolutions "
            f"and {len(blocks)} convolutional building blocks. DeepSquare's sites are defined for CNNs only"
        )


def _attachable(graph: Graph, node: int) -> Call | None:
    """The module whose output is ``node`` and to which a module can be attached: called once, not a container."""
    outputs = [call for call in graph.calls[1:] if call.output == node and graph.is_single(call)]
    usable = [call for call in outputs if not isinstance(call.module, CONTAINERS)]
    producers = [call for call in usable if call.index == graph.nodes[node].call]
    # Else the first that returns it unchanged (nn.Identity, stochastic depth in eval mode); or one that contains it.
    identities = [call for call in usable if call.input == node]
    containing = [call for call in reversed(usable) if graph.inside(graph.nodes[node].call, call.index)]
    return next(iter(producers + identities + containing), None)


def _skip_views(graph: Graph, node: int) -> Iterator[int]:
    """``node`` and, while it is a view of another node, that one too."""
    yield node
    while graph.nodes[node].op in VIEWS and len(graph.nodes[node].inputs) == 1:
        node = graph.nodes[node].inputs[0]
        yield node


def _site(graph: Graph, kind: Kind, call: Call, position: Literal["input", "output"], **details: object) -> Site:
    node = graph.nodes[call.input if position == "input" else call.output]
    return Site(kind, call.path, position, node.shape[1:], node.channel_dim, **details)  # type: ignore[arg-type]


def _logits(graph: Graph) -> list[Site] | str:
    output = graph.nodes[graph.output]
    if len([size for size in output.shape if size > 1]) > 2 or len(output.shape) < 2:
        return f"the output has shape (N, {', '.join(map(str, output.shape[1:]))}), not one value per class"
    for node in _skip_views(graph, graph.output):
        if call := _attachable(graph, node):
            return [_site(graph, "logits", call, "output")]
    return "no module of the model returns the logits; make its last layer an nn.Module"


def _classifier(graph: Graph) -> tuple[str, str]:
    """The paths of the last fully connected layer (a 1×1 convolution counts) and of the dropout layer before it."""
    layers = [n for n in graph.nodes if n.is_layer and n.index <= graph.output]
    if not layers or not graph.calls[layers[-1].call].path:
        return "", ""
    call = graph.calls[layers[-1].call]
    reads = set(_skip_views(graph, layers[-1].inputs[0]))
    dropouts = (c.path for c in graph.calls if isinstance(c.module, nn.Dropout) and c.output in reads)
    return call.path, next(dropouts, "")


NO_POOLING = "no global average pooling that every path to the output passes through"


def _pooling_node(graph: Graph) -> Node | None:
    pools = (node for node in reversed(graph.nodes) if _averages_the_map(graph, node))
    return next((node for node in pools if graph.dominates(node.index, graph.output)), None)


def _pooling(graph: Graph) -> list[Site] | str:
    node = _pooling_node(graph)
    if node is None:
        return NO_POOLING
    source = graph.nodes[node.inputs[0]]
    if not any(n.is_layer for n in graph.between(source.index, graph.output)):
        return "its global average pooling comes after the classifier"
    fixed = "avg_pool" in node.op and "adaptive" not in node.op
    owner = graph.calls[node.call]
    if graph.is_single(owner) and owner.input in _skip_views(graph, source.index):
        return [_site(graph, "pooling", owner, "input", keeps_size=fixed)]
    # Functional pooling: pool at the output of the module before; averaging a 1×1 map then changes nothing.
    relu_first = source.op == "relu" and not _attachable(graph, source.index)
    if relu_first:
        source = graph.nodes[source.inputs[0]]
    call = _attachable(graph, source.index)
    if call and graph.readers(source.index) == 1:
        return [_site(graph, "pooling", call, "output", keeps_size=fixed, relu_first=relu_first)]
    return (
        f"its pooling is not a module, and its input (computed by {source.op}) is not the output of a module that only "
        "the pooling reads; make the pooling an nn.AdaptiveAvgPool2d"
    )


def _averages_the_map(graph: Graph, node: Node) -> bool:
    if node.op not in AVERAGES or len(node.inputs) != 1:
        return False
    source = graph.nodes[node.inputs[0]]
    spatial = tuple(d for d in range(1, len(source.shape)) if d != source.channel_dim)
    if node.op == "mean":
        return bool(spatial) and node.dims == spatial
    return all(size == 1 for size in node.shape[2:])


def _blocks(graph: Graph) -> list[_Block]:
    """The innermost building blocks with a shortcut and a spatial convolution in the main branch."""
    candidates: dict[int, _Block] = {}
    concatenated: set[tuple[int, ...]] = set()
    for node in graph.nodes:
        block = None
        if node.op == "add" and len(node.inputs) == 2:
            if all(graph.nodes[i].shape == node.shape for i in node.inputs):
                block = _split_branches(graph, node, *node.inputs)
        elif node.op == "cat" and len(node.inputs) >= 2:
            *others, last = sorted(node.inputs)
            # With more than two inputs (DenseNet), the older ones were concatenated before: they are the shortcut.
            if len(others) == 1 or tuple(others) in concatenated:
                block = _split_branches(graph, node, others[-1], last)
            concatenated.add(tuple(sorted(node.inputs)))
        # A linear branch is one convolution written as several, to be merged after training (RepVGG).
        if block and any(n.is_spatial_conv for n in block.region) and not all(n.is_linear for n in block.region):
            candidates.setdefault(block.main, block)
    blocks = list(candidates.values())
    return [b for b in blocks if not any(other is not b and _loses_to(graph, b, other) for other in blocks)]


def _split_branches(graph: Graph, merge: Node, first: int, second: int) -> _Block | None:
    """Tell the main branch, which has more convolutions, from the shortcut."""
    if graph.depends(first, second) or graph.depends(second, first):
        fork = min(first, second)
    else:
        common = graph.ancestors[first] & graph.ancestors[second]
        fork = common.bit_length() - 1
        if fork < 0:
            return None
    regions = {end: tuple(graph.between(fork, end)) for end in (first, second)}
    convs = {end: sum(n.is_conv for n in region) for end, region in regions.items()}
    if convs[first] == convs[second]:
        return None
    main = max(convs, key=lambda end: convs[end])
    call = graph.nodes[main].call
    while call > 0 and not all(graph.inside(n.call, call) or n.call == call for n in regions[main]):
        call = graph.calls[call].parent
    return _Block(merge, main, regions[main], graph.calls[call].path)


def _loses_to(graph: Graph, block: _Block, other: _Block) -> bool:
    """Whether ``block`` is dropped because ``other``, nested with it, is the building block.

    A block to whose end a module can be attached wins over one without such an end; an addition wins over a
    concatenation (a ghost module in a residual block; a residual block in a cross-stage branch). Otherwise the outer
    block wins if the same ``forward`` runs both (the steps within a Res2Net block), else the inner one (a residual
    block in a residual stage).
    """
    inside = graph.nodes[other.main] in block.region
    around = graph.nodes[block.main] in other.region
    if not inside and not around:
        return False
    ends = [isinstance(_branch_end(graph, b), list) for b in (block, other)]
    if ends[0] != ends[1]:
        return ends[1]
    if block.merge.op != other.merge.op:
        return block.merge.op == "cat"
    same_forward = block.merge.call == other.merge.call
    return around if same_forward else inside


def _branch_end(graph: Graph, block: _Block) -> list[Site] | str:
    node = block.main
    while True:
        current = graph.nodes[node]
        # Layer scale starts near zero, where an excitation gets no gradient; the site is before such a constant factor.
        if current.op in ("mul", "div") and len(current.inputs) == 1:
            node = current.inputs[0]
        elif call := _attachable(graph, node):
            return [_site(graph, "branch_end", call, "output", block=block.path)]
        elif current.op in VIEWS and len(current.inputs) == 1:
            node = current.inputs[0]
        else:
            return (
                f"the main branch of {block} ends in {current.op}, not in the output of a module that is used once; "
                "make that operation an nn.Module"
            )


def _last_spatial_convs(graph: Graph, block: _Block) -> list[Site] | str:
    convs = [n for n in block.region if n.is_spatial_conv]
    last = [n for n in convs if not any(graph.depends(other.index, n.index) for other in convs)]
    sites = []
    for node in last:
        call = graph.calls[node.call]
        reads = {*_skip_views(graph, node.inputs[0]), -1}  # -1: a convolution called by keyword
        if not graph.is_single(call) or call.input not in reads:
            return (
                f"the last spatial convolution of {block} is not a module that is used once; make it a separate "
                "nn.Conv2d"
            )
        sites.append(_site(graph, "last_spatial_conv", call, "input", block=block.path))
    return sites
