"""What the networks cost, counted by our code: Table 1 layer by layer, and every model of the other tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from deepsquare.cost import cost
from deepsquare.models import vanilla_cnn

PAPER = (  # Table 1: the type of each layer and its output
    ("Conv3×3s2", "16×16×32"),
    ("Conv3×3s2", "8×8×64"),
    ("Conv3×3s2", "4×4×128"),
    ("GAP", "1×1×128"),
    ("FC", "10"),
)


@dataclass(frozen=True)
class Layer:
    """A row of Table 1: the paper's output size and ours, and what the layer costs."""

    name: str
    kind: str
    paper: str
    output: str
    parameters: int
    macs: int


@cache
def table_1() -> tuple[Layer, ...]:
    """The layers of the vanilla CNN."""
    layers = []
    with torch.device("meta"):
        x = torch.empty(1, 3, 32, 32)
        for (kind, paper), (name, layer) in zip(PAPER, vanilla_cnn().named_children(), strict=True):
            x = x.flatten(1) if kind == "FC" else x
            found = cost(layer, x.shape[1:])
            x = layer(x)
            channels, *sides = x.shape[1:]
            output = "×".join(map(str, (*sides, channels)))
            layers.append(Layer(name, kind, paper, output, found.parameters, found.macs))
    return tuple(layers)
