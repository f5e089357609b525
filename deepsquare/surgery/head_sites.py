"""The sites at the end of a CNN: the pooling before the classifier, and the logits."""

import math

from torch import nn

from deepsquare.surgery.insertion import base_class
from deepsquare.surgery.site import Site, attachable, site_at, skip_views
from deepsquare.surgery.trace import VIEWS, Graph, Node

AVERAGES = ("mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
SOFTMAX = ("_softmax", "_log_softmax")
NO_POOLING = "no global average pooling that every path to the output passes through"


def find_logits(model: nn.Module, graph: Graph) -> list[Site] | str:
    """The site at the logits, or why there is none."""
    if reason := _no_classifier(model, graph):
        return reason
    others = [n for n in graph.outputs if _is_vector(graph.nodes[n]) and not _related(graph, n, graph.output)]
    if others:
        shapes = ", ".join(str(graph.nodes[n].shape[1:]) for n in (graph.output, *others))
        return f"several of its outputs may be the logits, of shapes {shapes} without the batch; return one of them"
    for node in skip_views(graph, _before_softmax(graph)):
        if call := attachable(graph, node):
            return [site_at(graph, "logits", call, "output")]
    return "no module of the model returns the logits; make its last layer an nn.Module"


def _before_softmax(graph: Graph) -> int:
    """What a softmax at the end of the model reads, which many models have in evaluation mode only; else the output."""
    logits = last = graph.output
    while len(graph.nodes[last].inputs) == 1:
        node, before = graph.nodes[last], graph.nodes[last].inputs[0]
        if node.op in SOFTMAX:
            logits = before
        elif node.op not in VIEWS and not _averages_the_map(graph, node):
            break
        last = before
    return logits


def _is_vector(node: Node) -> bool:
    return len(node.shape) >= 2 and len([size for size in node.shape if size > 1]) <= 2


def _related(graph: Graph, first: int, second: int) -> bool:
    """Whether one is computed from the other, or is it."""
    return first == second or graph.depends(first, second) or graph.depends(second, first)


def _no_classifier(model: nn.Module, graph: Graph) -> str:
    """Why the model has no classifier; empty if it has one."""
    output, pool = graph.nodes[graph.output], _pooling_node(graph)
    outputs = (graph.nodes[n] for n in (graph.output, *graph.outputs))
    # Of the maps of a feature pyramid, the last one may have one position.
    shape = next((n.shape for n in outputs if len(n.shape) == len(output.shape) and not _is_vector(n)), None)
    if shape is not None:
        return f"the output has shape (N, {', '.join(map(str, shape[1:]))}), not one value per class"
    if getattr(model, "num_classes", None) == 0:  # timm's, where a layer may follow the pooling
        return "the output is an embedding (num_classes=0), not one value per class"
    if pool is not None and _is_pooled(graph, pool) and not _pools_logits(model, graph, pool):
        width = math.prod(pool.shape[1:])
        return (
            f"the output is an embedding, the pooled values of {width} channels; if these are the classes, set "
            f"model.num_classes = {width}"
        )
    return ""


def _is_pooled(graph: Graph, pool: Node) -> bool:
    """Whether the output is the pooled values: no layer behind the pooling, and as many values as channels."""
    after = any(n.is_layer for n in graph.between(pool.index, graph.output))
    return not after and math.prod(graph.nodes[graph.output].shape[1:]) == math.prod(pool.shape[1:])


def _pools_logits(model: nn.Module, graph: Graph, pool: Node) -> bool:
    """Whether the classifier comes before the pooling that returns the output, as in SqueezeNet.

    NOTE not in paper: the model says so by its ``num_classes``; else a 1×1 convolution, with nothing but an activation
    between it and the pooling, is taken for the classifier.
    """
    num_classes = getattr(model, "num_classes", None)
    if isinstance(num_classes, int):
        return num_classes == math.prod(pool.shape[1:])
    node = graph.nodes[pool.inputs[0]]
    while not node.is_layer and len(node.inputs) == 1 and "norm" not in node.op and node.op != "mul":
        node = graph.nodes[node.inputs[0]]
    return node.is_layer and all(k == 1 for k in node.kernel)


def find_classifier(model: nn.Module, graph: Graph) -> tuple[str, str]:
    """The paths of the last fully connected layer (a 1×1 convolution counts) and of the dropout layer before it."""
    if _no_classifier(model, graph):
        return "", ""
    layers = [n for n in graph.nodes if n.is_layer and n.index <= graph.output]
    if not layers or not graph.calls[layers[-1].call].path:
        return "", ""
    call = graph.calls[layers[-1].call]
    reads = set(skip_views(graph, layers[-1].inputs[0]))
    dropouts = (c.path for c in graph.calls if isinstance(c.module, nn.Dropout) and c.output in reads)
    return call.path, next(dropouts, "")


def _pooling_node(graph: Graph) -> Node | None:
    averages = (node for node in reversed(graph.nodes) if _averages_the_map(graph, node))
    pools = (node for node in averages if graph.dominates(node.index, graph.output))
    pool = next(pools, None)
    # A second average over what a fixed window left of the map, which is one position, changes nothing (X3D).
    while pool is not None and max(_spatial(graph, pool)) == 1 and (before := next(pools, None)) is not None:
        if any(n.is_spatial_conv for n in graph.between(before.index, pool.index)):
            break
        pool = before
    return pool


def find_pooling(model: nn.Module, graph: Graph) -> list[Site] | str:
    """The site at the global average pooling, or why there is none."""
    node = _pooling_node(graph)
    if node is None:
        return NO_POOLING
    source = graph.nodes[node.inputs[0]]
    if _is_pooled(graph, node) and _pools_logits(model, graph, node):
        return "its global average pooling comes after the classifier"
    fixed = "avg_pool" in node.op and "adaptive" not in node.op
    owner = graph.calls[node.call]
    if graph.is_single(owner) and owner.input in skip_views(graph, source.index):
        return [site_at(graph, "pooling", owner, "input", keeps_size=fixed)]
    # Functional pooling: pool at the output of the module before; averaging a 1×1 map then changes nothing.
    relu_first = source.op == "relu" and not attachable(graph, source.index)
    if relu_first:
        source = graph.nodes[source.inputs[0]]
    call = attachable(graph, source.index)
    if call and graph.readers(source.index) == 1 and source.index not in graph.outputs:
        return [site_at(graph, "pooling", call, "output", keeps_size=fixed, relu_first=relu_first)]
    return (
        f"its pooling is not a module, and its input (computed by {source.op}) is not the output of a module that only "
        "the pooling reads; make the pooling an nn.AdaptiveAvgPool2d"
    )


def _spatial(graph: Graph, pool: Node) -> tuple[int, ...]:
    """The size of the map that is averaged."""
    source = graph.nodes[pool.inputs[0]]
    return tuple(size for d, size in enumerate(source.shape) if d not in (0, source.channel_dim))


def _averages_the_map(graph: Graph, node: Node) -> bool:
    if node.op not in AVERAGES or len(node.inputs) != 1:
        return False
    source = graph.nodes[node.inputs[0]]
    spatial = tuple(d for d in range(1, len(source.shape)) if d != source.channel_dim)
    if node.op == "mean":
        return bool(spatial) and node.dims == spatial
    return all(size == 1 for size in node.shape[2:])


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
    if layer and pool.index in skip_views(graph, layer.inputs[0]):
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
