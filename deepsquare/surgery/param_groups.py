"""Parameter groups for an optimizer: which parameters decay."""

import math
from typing import Any

from torch import nn

from deepsquare.surgery.insertion import BETA, PREFIX


def param_groups(model: nn.Module, weight_decay: float, *, decay_1d: bool = False) -> list[dict[str, Any]]:
    """The parameters of ``model`` in two groups for any optimizer: with weight decay and without.

    Without are all that have at most one dimension: biases, the parameters of normalization layers, α of
    Square-Excitation, √s of Square-Softmin and β. A group without parameters is left out.

    Args:
        model: a model, equipped or not.
        weight_decay: of the convolutions' and fully connected layers' weights.
        decay_1d: all parameters decay but β, which a decay would pull back to the base model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (nn.Module), got {model!r}")
    if not isinstance(weight_decay, (int, float)) or not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is {weight_decay!r}; expected a number of at least 0")
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_beta = PREFIX in name and name.endswith(f".{BETA}")
        (no_decay if is_beta or (parameter.ndim < 2 and not decay_1d) else decay).append(parameter)
    groups = ((decay, weight_decay), (no_decay, 0.0))
    return [{"params": params, "weight_decay": value} for params, value in groups if params]
