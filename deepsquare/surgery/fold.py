"""The inference form of a model: layers that only training needs are merged into the layers before them."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.fusion import fuse_conv_bn_weights

from deepsquare.nn import EleSquare, ReLUSquare, SquareEncoding, SquareSoftmin
from deepsquare.surgery.blocks import fuse_blocks
from deepsquare.surgery.equip import EquipRecord, Model, intact_record, is_folded, refuse_sharded, unwrap
from deepsquare.surgery.head_sites import AVERAGES
from deepsquare.surgery.inputs import CONVOLUTIONS
from deepsquare.surgery.insertion import SITE, base_class, beta_of, drop_beta, is_watched
from deepsquare.surgery.ownership import is_exclusive, replace
from deepsquare.surgery.trace import VIEWS, Call, Graph, trace
from deepsquare.surgery.unshuffle import unshuffle

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
FROZEN_NORMS = ("FrozenBatchNorm2d", "FrozenBatchNormAct2d")  # of torchvision (its detectors) and timm, with buffers
DROPPING = ("StochasticDepth", "DropPath", "DropBlock2d")  # of torchvision and timm; the identity at inference
LAYERS = (nn.Linear, *CONVOLUTIONS)
HOMOGENEOUS = VIEWS | {*AVERAGES, "relu"}  # f(k·x) = k·f(x) for k ≥ 0


def fold(model: Model, *, input_shape: Sequence[int] | None = None) -> Model:
    """A copy of ``model`` for inference, with the same outputs.

    √s of Square-Softmin is merged into the last fully connected layer (the paper's remark under Eq. 24), batch
    normalization into the convolution before it, a ReLU into the Square-Encoding after it; dropout is removed, and so
    are channel shuffles: maps between layers may have their channels in another order. The model itself does not
    change.
    """
    model = unwrap(model)  # type: ignore[assignment]
    intact_record(model, allow_inner=True)
    refuse_sharded(model, "fold")
    if model.training:
        raise ValueError("fold returns the inference form of a model; call fold(model.eval())")
    if is_folded(model):
        return model
    folded = copy.deepcopy(model)
    for module in folded.modules():
        _end_annealing(module)
    graph = trace(folded, input_shape)
    with torch.no_grad():
        _merge_scale(folded, graph)
        _merge_batch_norms(folded, graph)
    _merge_relus(folded, graph)
    _remove_dropout(folded)
    with torch.no_grad():
        unshuffle(folded, trace(folded, input_shape))
    fuse_blocks(folded)  # without drop paths, more of them can be
    folded.deepsquare_folded = True  # type: ignore[assignment]
    return folded


def _end_annealing(model: nn.Module) -> None:
    """An equipped model that was annealed to β = 1 is the paper's, and from here on its record says so."""
    record: EquipRecord | None = model.__dict__.get("deepsquare_record")
    if record is None or record.init != "anneal":
        return
    annealed = {module: beta_of(module) for module in model.modules() if SITE in module.__dict__}
    betas = [beta for beta in annealed.values() if beta is not None]
    if not any(beta.is_meta for beta in betas) and all(bool(beta == 1) for beta in betas):
        for module in annealed:
            drop_beta(module)
        model.deepsquare_record = dataclasses.replace(record, init="paper")  # type: ignore[assignment]


def _merge_scale(model: nn.Module, graph: Graph) -> None:
    """-s·x² = -(√s·x)²: √s is merged into the layer that computes x, if only homogeneous operations lie between."""
    for call in graph.calls:
        softmin = call.module
        if not isinstance(softmin, SquareSoftmin) or softmin.root_scale is None or beta_of(softmin) is not None:
            continue
        source = max((n.index for n in graph.nodes[: call.input + 1] if n.is_layer), default=0)
        layer = graph.calls[graph.nodes[source].call].module
        # The exact classes: others (cosine classifiers, parametrized ones) are not determined by weight and bias.
        if base_class(layer) not in LAYERS or not is_exclusive(model, graph, layer):
            continue
        assert isinstance(layer, LAYERS)
        if any(n.op not in HOMOGENEOUS for n in graph.between(source, call.input)):
            continue
        root = softmin.root_scale.abs()
        layer.weight.mul_(root.reshape(-1, *[1] * (layer.weight.dim() - 1)))
        if layer.bias is not None:
            layer.bias.mul_(root)
        softmin.merge_scale()


class FoldedNorm(nn.Module):
    """A merged normalization layer that also has dropout and an activation (timm's ``BatchNormAct2d``)."""

    def __init__(self, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.drop = drop
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(x))
        return out


def _pairs(
    model: nn.Module, graph: Graph, first: tuple[type[nn.Module], ...], second: tuple[type[nn.Module], ...]
) -> Iterator[tuple[Call, Call]]:
    """Modules of these classes where the second alone reads what the first returns, and each can be changed alone."""
    producers = {call.output: call for call in graph.calls if base_class(call.module) in first}
    for call in graph.calls:
        before = producers.get(call.input)
        if before is None or not isinstance(call.module, second) or graph.readers(call.input) > 1:
            continue
        if is_exclusive(model, graph, before.module) and is_exclusive(model, graph, call.module):
            yield before, call


def _merge_batch_norms(model: nn.Module, graph: Graph) -> None:
    frozen = {type(module) for module in model.modules() if base_class(module).__name__ in FROZEN_NORMS}
    for before, call in _pairs(model, graph, CONVOLUTIONS, (*BATCH_NORMS, *frozen)):
        conv: Any = before.module
        norm: Any = call.module
        if not graph.nodes[before.output].is_conv or norm.running_mean is None or norm.running_var is None:
            continue
        if base_class(norm) in BATCH_NORMS or base_class(norm).__name__ == FROZEN_NORMS[0]:
            rest: nn.Module = nn.Identity()
        elif isinstance(getattr(norm, "act", None), nn.Module) and isinstance(getattr(norm, "drop", None), nn.Module):
            rest = FoldedNorm(norm.drop, norm.act)
        else:
            continue
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        for name, child in norm.named_children():
            if SITE in child.__dict__:
                rest.add_module(name, child)  # an inserted module keeps acting at its site
        replace(model, norm, rest)


def _merge_relus(model: nn.Module, graph: Graph) -> None:
    """A ReLU that only a square reads is merged into it: max(0, t)² in one pass."""
    for before, call in _pairs(model, graph, (nn.ReLU,), (EleSquare,)):
        # The exact classes, without inserted modules.
        exact = type(before.module) is nn.ReLU and type(call.module) in (EleSquare, SquareEncoding)
        if exact and beta_of(call.module) is None:
            replace(model, call.module, ReLUSquare())
            replace(model, before.module, nn.Identity())


def _remove_dropout(model: nn.Module) -> None:
    """Replace the layers that are the identity at inference."""
    for module in list(model.modules()):
        own = isinstance(module, _DropoutNd) and type(module).__module__ == _DropoutNd.__module__  # torch's own
        if (own or type(module).__name__ in DROPPING) and not is_watched(module):
            replace(model, module, nn.Identity())
