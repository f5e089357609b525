"""Where DeepSquare and the baselines act in a CNN: the four kinds of site.

=================== ========================================================================================
pooling             the global average pooling before the classifier
logits              after the last fully connected layer
branch_end          the main branch's output, just before it is added or concatenated to the shortcut
last_spatial_conv   the input of the main branch's last spatial convolution
=================== ========================================================================================
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from deepsquare.surgery.trace import VIEWS, Call, Graph

Kind = Literal["pooling", "logits", "branch_end", "last_spatial_conv", "named"]
KINDS: tuple[Kind, ...] = ("pooling", "logits", "branch_end", "last_spatial_conv")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Site:
    """A position in the data flow of a model at which a module can be inserted."""

    kind: Kind  # "named" for a module that the spec names
    path: str  # the module it is attached to, as in model.get_submodule(path)
    position: Literal["input", "output"]  # whether the inserted module acts on that module's input or on its output
    shape: tuple[int, ...]  # of the tensor it acts on, without the batch, for the traced input size
    channel_dim: int = 1  # where the channels are in that tensor, counted with the batch
    block: str = ""  # for the two kinds inside building blocks, the path of the block
    stage: int = 0  # for the same two, the number of the stage: successive blocks whose maps have one shape
    relu_first: bool = False  # the model calls F.relu on that module's output before it pools: so does the insertion
    keeps_size: bool = False  # the model's pooling has a fixed window: the pooled value is expanded to the map's size
    term: str = ""  # the term of the spec that fills the site; empty while it is free

    @property
    def channels(self) -> int:
        """The number of channels (of classes, for ``logits``)."""
        return self.shape[self.channel_dim - 1]

    def of_channels(self, channels: int) -> "Site":
        """The same site with another number of channels."""
        at = self.channel_dim - 1
        return replace(self, shape=(*self.shape[:at], channels, *self.shape[at + 1 :]))

    @property
    def spatial(self) -> tuple[int, ...]:
        return self.shape[: self.channel_dim - 1] + self.shape[self.channel_dim :]


@dataclass(frozen=True)
class Sites:
    """The sites of a model, block by block."""

    sites: tuple[Site, ...]
    missing: dict[Kind, str]  # for each kind that the model does not have, the reason
    input_shape: tuple[int, ...]  # of one input, without the batch, that the model was traced with
    classifier: str = ""  # the path of the last fully connected layer, if there is one
    dropout: str = ""  # the path of the model's own dropout layer directly before it, if there is one

    def of_kind(self, kind: Kind) -> list[Site]:
        return [site for site in self.sites if site.kind == kind]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def summary(self) -> str:
        return ", ".join(f"{len(self.of_kind(kind))} {kind}" for kind in KINDS)

    def __str__(self) -> str:
        lines = []
        for site in self:
            size = "×".join(map(str, site.shape))
            line = f"{site.kind:<18} {site.position:>6} of {site.path:<32} {size:<14} {site.term}".rstrip()
            functional = site.kind == "pooling" and site.position == "output"
            lines.append(line + ("  (pools here: the pooling itself is not a module)" if functional else ""))
        lines += [f"{kind:<18} none: {reason}" for kind, reason in self.missing.items()]
        return "\n".join(lines)


def attachable(graph: Graph, node: int) -> Call | None:
    """The module whose output is ``node`` and to which a module can be attached: called once, not a container."""
    outputs = [call for call in graph.calls[1:] if call.output == node and graph.is_single(call)]
    usable = [call for call in outputs if not isinstance(call.module, CONTAINERS)]
    producers = [call for call in usable if call.index == graph.nodes[node].call]
    # Else the first that returns it unchanged (nn.Identity, stochastic depth in eval mode); or one that contains it.
    identities = [call for call in usable if call.input == node]
    containing = [call for call in reversed(usable) if graph.inside(graph.nodes[node].call, call.index)]
    return next(iter(producers + identities + containing), None)


def skip_views(graph: Graph, node: int) -> Iterator[int]:
    """``node`` and, while it is a view of another node, that one too."""
    yield node
    while graph.nodes[node].op in VIEWS and len(graph.nodes[node].inputs) == 1:
        node = graph.nodes[node].inputs[0]
        yield node


def site_at(graph: Graph, kind: Kind, call: Call, position: Literal["input", "output"], **details: object) -> Site:
    """The site of this kind at the input or output of a called module."""
    node = graph.nodes[call.input if position == "input" else call.output]
    return Site(kind, call.path, position, node.shape[1:], node.channel_dim, **details)  # type: ignore[arg-type]
