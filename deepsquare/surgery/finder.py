"""Finding the sites of a CNN in the data flow of its forward pass."""

from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from deepsquare.surgery.head_sites import find_classifier, find_logits, find_pooling
from deepsquare.surgery.site import CONTAINERS, Kind, Site, Sites, attachable, site_at, skip_views
from deepsquare.surgery.trace import VIEWS, Graph, Node

NO_BLOCKS = "no building block in which a nonlinear main branch with a spatial convolution meets a shortcut"


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
        "pooling": find_pooling(model, graph),
        "logits": find_logits(model, graph),
        "branch_end": _in_blocks([_branch_end(graph, block) for block in blocks]),
        "last_spatial_conv": _in_blocks([_last_spatial_convs(graph, block) for block in blocks]),
    }
    sites = tuple(site for result in results.values() if not isinstance(result, str) for site in result)
    missing = {kind: result for kind, result in results.items() if isinstance(result, str)}
    return Sites(sites, missing, graph.input_shape, *find_classifier(model, graph))


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
            f"{path} is not called by {type(model).__name__}'s forward, or returns no tensor; name a module that is "
            f"called and returns one for {term!r}"
        )
    return site_at(graph, "named", replace(call, path=path), "output")


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
        elif call := attachable(graph, node):
            return [site_at(graph, "branch_end", call, "output", block=block.path)]
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
        reads = {*skip_views(graph, node.inputs[0]), -1}  # -1: a convolution called by keyword
        if not graph.is_single(call) or call.input not in reads:
            return (
                f"the last spatial convolution of {block} is not a module that is used once; make it a separate "
                "nn.Conv2d"
            )
        sites.append(site_at(graph, "last_spatial_conv", call, "input", block=block.path))
    return sites
