"""Table 1, layer by layer: output sizes, parameters and multiply-accumulates of the vanilla CNN."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

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


def table_1() -> list[dict[str, Any]]:
    """The layers of the vanilla CNN: the paper's output size and ours, and what each costs."""
    layers = []
    with torch.device("meta"):
        x = torch.empty(1, 3, 32, 32)
        for (kind, paper), layer in zip(PAPER_LAYERS, vanilla_cnn().children(), strict=True):
            x = x.flatten(1) if kind == "FC" else x
            layer_cost = cost(layer, x.shape[1:])
            x = layer(x)
            channels, *sides = x.shape[1:]
            output = "×".join(map(str, (*sides, channels)))
            layers.append({"kind": kind, "paper": paper, "output": output, **asdict(layer_cost)})
    return layers
