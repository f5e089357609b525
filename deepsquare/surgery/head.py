"""The head of the model: strides of the last stage, width of the classifier, dropout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.surgery.head_sites import last_strides, layer_after_pooling
from deepsquare.surgery.insertion import WIDTH, insert
from deepsquare.surgery.site import Site, Sites
from deepsquare.surgery.trace import Graph, trace


@dataclass(frozen=True)
class Patch:
    """An attribute of a base module that was changed, with its value before."""

    path: str
    attribute: str
    before: Any


def _patch(model: nn.Module, path: str, attribute: str, value: Any) -> Patch:
    module = model.get_submodule(path)
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    return Patch(path, attribute, before)


def require_parameters(model: nn.Module, patches: Sequence[Patch]) -> None:
    """Refuse to revert a layer whose parameter was parametrized or pruned since: its new value would be lost."""
    for patch in patches:
        layer = model.get_submodule(patch.path)
        is_parameter = layer._parameters.get(patch.attribute) is not None
        if isinstance(patch.before, nn.Parameter) and hasattr(layer, patch.attribute) and not is_parameter:
            raise ValueError(
                f"{patch.path}.{patch.attribute} is no nn.Parameter any more (a parametrization, or pruning), so it "
                "cannot get its size of before equip; call torch.nn.utils.parametrize.remove_parametrizations or "
                "torch.nn.utils.prune.remove first"
            )


def revert(model: nn.Module, patches: Sequence[Patch]) -> None:
    """Restore the attributes, last change first."""
    for patch in reversed(patches):
        module, value = model.get_submodule(patch.path), patch.before
        if not hasattr(module, patch.attribute):
            continue  # the layer was replaced since by one of another class, which is left alone
        if isinstance(value, nn.Parameter):
            current = module.get_parameter(patch.attribute)
            if current.shape[0] != value.shape[0]:  # the layer was replaced since by one for other classes
                value = _new_weight(current, value.shape[1])
            value = nn.Parameter(value.detach().to(current), requires_grad=current.requires_grad)
        setattr(module, patch.attribute, value)


def make_dense(model: nn.Module, graph: Graph) -> list[Patch]:
    """Set the strides of the last stage to 1, so that its map has four times as many positions."""
    paths = last_strides(graph)
    if isinstance(paths, str):
        raise ValueError(
            f"the last stage of {type(model).__name__} cannot have stride 1: {paths}. Give the term the option "
            "dense=False to keep the strides (gsop instead of gsop1; instead of gsop2 "
            "gsop(last=False)+isqrt_cov(iterations=3, dense=False))"
        )
    return [_patch(model, path, "stride", (1, 1)) for path in paths]


def widen(model: nn.Module, graph: Graph, site: Site, module: nn.Module) -> list[Patch]:
    """Let the layer behind the pooling read as many values as ``module`` returns. Its weight is initialized anew."""
    width = getattr(module, "out_channels", site.channels)
    if site.kind != "pooling" or width == site.channels:
        return []
    path = layer_after_pooling(graph)
    layer = model.get_submodule(path)
    size = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
    weight = layer.get_parameter("weight")
    setattr(layer, WIDTH, width)
    wider = nn.Parameter(_new_weight(weight, width), requires_grad=weight.requires_grad)
    return [_patch(model, path, "weight", wider), _patch(model, path, size, width)]


def _new_weight(like: Tensor, inputs: int) -> Tensor:
    """A weight of a fully connected layer or 1×1 convolution for ``inputs`` values, initialized as torch does."""
    weight = torch.empty(like.shape[0], inputs, *like.shape[2:], dtype=like.dtype, device=like.device)
    return weight if weight.is_meta else nn.init.kaiming_uniform_(weight, a=5**0.5)


def retrace(model: nn.Module, graph: Graph, change: str) -> Graph:
    """Trace a model whose head was changed; the error says by which change it no longer runs."""
    try:
        return trace(model, graph.input_shape)
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} cannot run {change} ({error.__cause__})") from error


def set_dropout(model: nn.Module, sites: Sites, ratio: float) -> list[Patch]:
    """Dropout before the last fully connected layer: in the model's own dropout layer if it has one, else a new one."""
    if not (isinstance(ratio, (int, float)) and 0 <= ratio < 1):
        raise ValueError(f"dropout={ratio!r} is not a ratio; expected a number in [0, 1)")
    if not sites.classifier:
        raise ValueError(f"{type(model).__name__} has no fully connected layer to put dropout before")
    drop_rate = getattr(model, "drop_rate", 0)  # timm's, where dropout is a call of F.dropout and not a layer
    if drop_rate and not sites.dropout:
        raise ValueError(f"{type(model).__name__} applies dropout already; build it with drop_rate=0, not {drop_rate}")
    if sites.dropout:
        return [_patch(model, sites.dropout, "p", ratio)]
    insert(model, Site("named", sites.classifier, "input", ()), "dropout", nn.Dropout(ratio))
    return []
