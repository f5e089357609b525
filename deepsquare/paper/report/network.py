"""Table 1, layer by layer: output sizes, parameters and multiply-accumulates of the vanilla CNN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from deepsquare.cost import cost
from deepsquare.models import vanilla_cnn

PAPER_LAYERS = (  # Table 1: the type of each layer and its output
    ("Conv3×3s2", "16×16×32"),
    ("Conv3×3s2", "8×8×64"),
    ("Conv3×3s2", "4×4×128"),
    ("GAP", "1×1×128"),
    ("FC", "10"),
)


@dataclass(frozen=True)
class Layer:
    """A row of Table 1: the paper's output size and ours, and what the layer costs."""

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
        for (kind, paper), layer in zip(PAPER_LAYERS, vanilla_cnn().children(), strict=True):
            x = x.flatten(1) if kind == "FC" else x
            layer_cost = cost(layer, x.shape[1:])
            x = layer(x)
            channels, *sides = x.shape[1:]
            output = "×".join(map(str, (*sides, channels)))
            layers.append(Layer(kind, paper, output, layer_cost.parameters, layer_cost.macs))
    return tuple(layers)
