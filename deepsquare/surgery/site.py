"""Where DeepSquare and the baselines act in a CNN: the four kinds of site.

=================== ========================================================================================
pooling             the global average pooling before the classifier
logits              after the last fully connected layer
branch_end          the main branch's output, just before it is added or concatenated to the shortcut
last_spatial_conv   the input of the main branch's last spatial convolution
=================== ========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["pooling", "logits", "branch_end", "last_spatial_conv", "named"]
KINDS: tuple[Kind, ...] = ("pooling", "logits", "branch_end", "last_spatial_conv")


@dataclass(frozen=True)
class Site:
    """A position in the data flow of a model at which a module can be inserted.

    Attributes:
        kind: which of the four kinds, or ``named`` for a module that the spec names.
        path: the module it is attached to, as in ``model.get_submodule(path)``.
        position: whether the inserted module acts on that module's input or on its output.
        shape: the tensor it acts on, without the batch, for the traced input size.
        channel_dim: where the channels are in that tensor, counted with the batch.
        block: for the two kinds inside building blocks, the path of the block.
        stage: for the same two, the number of the stage: successive blocks whose maps have one shape.
        relu_first: a functional ReLU follows that module before the pooling; it is applied before the inserted module.
        keeps_size: the pooling that follows has a fixed window, so the pooled value is expanded to the map's size.
        term: the term of the spec that fills the site, ``""`` while it is free.
    """

    kind: Kind
    path: str
    position: Literal["input", "output"]
    shape: tuple[int, ...]
    channel_dim: int = 1
    block: str = ""
    stage: int = 0
    relu_first: bool = False
    keeps_size: bool = False
    term: str = ""

    @property
    def pools_early(self) -> bool:
        """Whether the inserted module pools the output of the module before the pooling, which is not a module."""
        return self.kind == "pooling" and self.position == "output"

    @property
    def channels(self) -> int:
        """The number of channels (of classes, for ``logits``)."""
        return self.shape[self.channel_dim - 1]

    @property
    def spatial(self) -> tuple[int, ...]:
        """The shape without the channels."""
        return self.shape[: self.channel_dim - 1] + self.shape[self.channel_dim :]


@dataclass(frozen=True)
class Sites:
    """The sites of a model.

    Attributes:
        sites: every site, block by block.
        missing: for each kind that the model does not have, the reason.
        input_shape: shape of one input, without the batch, that the model was traced with.
        classifier: the path of the last fully connected layer, or ``""``.
        dropout: the path of the model's own dropout layer directly before it, or ``""``.
    """

    sites: tuple[Site, ...]
    missing: dict[Kind, str]
    input_shape: tuple[int, ...]
    classifier: str = ""
    dropout: str = ""

    def of_kind(self, kind: Kind) -> list[Site]:
        """The sites of one kind."""
        return [site for site in self.sites if site.kind == kind]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def filled(self, terms: dict[Site, str]) -> Sites:
        """The same sites with the terms that now fill them; sites at named modules are added."""
        sites = dict.fromkeys((*self.sites, *terms))
        return replace(self, sites=tuple(replace(site, term=terms.get(site, "")) for site in sites))

    def summary(self) -> str:
        """How many of each kind, in one line."""
        return ", ".join(f"{len(self.of_kind(kind))} {kind}" for kind in KINDS)

    def __str__(self) -> str:
        lines = []
        for site in self:
            size = "×".join(map(str, site.shape))
            line = f"{site.kind:<18} {site.position:>6} of {site.path:<32} {size:<14} {site.term}".rstrip()
            lines.append(line + ("  (pools here: the pooling itself is not a module)" if site.pools_early else ""))
        lines += [f"{kind:<18} none: {reason}" for kind, reason in self.missing.items()]
        return "\n".join(lines)
