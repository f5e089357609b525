"""The test-phase form of a model: what training needed as layers of their own goes into the layers before them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from deepsquare.nn import SquareSoftmin
from deepsquare.surgery.finder import AVERAGES
from deepsquare.surgery.operation import FOLDED, PLACEMENT, PREFIX, equipment, is_folded
from deepsquare.surgery.trace import VIEWS, Graph, trace

Model = TypeVar("Model", bound=nn.Module)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
HOMOGENEOUS = VIEWS | {*AVERAGES, "relu"}  # f(k·x) = k·f(x) for k ≥ 0


def fold(model: Model, *, input_shape: Sequence[int] | None = None) -> Model:
    """A copy of ``model`` for inference, with the same outputs.

    √s of Square-Softmin is merged into the last fully connected layer (the paper's own remark under Eq. 24), batch
    normalisation into the convolution before it. The model itself is left as it is.
    """
    if model.training:
        raise ValueError("fold makes the test-phase form of a model; call fold(model.eval())")
    if is_folded(model):
        return model
    folded = copy.deepcopy(model)
    graph = trace(folded, input_shape)
    with torch.no_grad():
        _merge_scale(folded, graph)
        _merge_batch_norms(folded, graph)
    setattr(folded, FOLDED, True)
    return folded


def _merge_scale(model: nn.Module, graph: Graph) -> None:
    present = equipment(model)
    for site in present.sites.of("logits") if present is not None else ():
        softmin = getattr(model.get_submodule(site.path), PREFIX + "softmin", None)
        if not isinstance(softmin, SquareSoftmin) or softmin.root_scale is None:
            continue
        layer = model.get_submodule(present.sites.classifier) if present is not None else None
        logits = next(call.output for call in graph.calls if call.path == site.path)
        outputs = [n.index for n in graph.nodes if layer is graph.calls[n.call].module and n.index <= logits]
        between = graph.between(outputs[-1], logits) if outputs else []
        if not isinstance(layer, (nn.Linear, *CONVOLUTIONS)) or any(n.op not in HOMOGENEOUS for n in between):
            continue
        root = softmin.root_scale.abs()
        layer.weight.mul_(root.reshape(-1, *[1] * (layer.weight.dim() - 1)))
        if layer.bias is not None:
            layer.bias.mul_(root)
        softmin.merge_scale()


class FoldedNorm(nn.Module):
    """What is left of a normalisation layer that also dropped and activated (timm's ``BatchNormAct2d``)."""

    def __init__(self, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.drop = drop
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, unchanged but for the activation."""
        out: Tensor = self.act(self.drop(x))
        return out


def _merge_batch_norms(model: nn.Module, graph: Graph) -> None:
    made_by = {call.output: call for call in graph.calls if type(call.module) in CONVOLUTIONS}
    for call in graph.calls:
        norm, before = call.module, made_by.get(call.input)
        once = before is not None and graph.times_called[before.module] == 1 == graph.times_called[norm]
        if before is None or not once or graph.readers(call.input) > 1 or not isinstance(norm, BATCH_NORMS):
            continue
        if norm.running_mean is None or norm.running_var is None:
            continue
        if type(norm) in BATCH_NORMS:
            rest: nn.Module = nn.Identity()
        elif isinstance(getattr(norm, "act", None), nn.Module) and isinstance(getattr(norm, "drop", None), nn.Module):
            rest = FoldedNorm(norm.drop, norm.act)  # type: ignore[arg-type]
        else:
            continue
        conv = before.module
        assert isinstance(conv, CONVOLUTIONS)
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        for name, child in norm.named_children():
            if PLACEMENT in child.__dict__:
                rest.add_module(name, child)  # an inserted module goes on acting where it stood
        parent, _, name = call.path.rpartition(".")
        setattr(model.get_submodule(parent), name, rest.train(norm.training))
