"""The test-phase form of a model: what training needed as layers of their own goes into the layers before them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.fusion import fuse_conv_bn_weights

from deepsquare.nn import EleSquare, ReLUSquare, SquareEncoding, SquareSoftmin
from deepsquare.surgery.finder import AVERAGES
from deepsquare.surgery.insertion import SITE, base_class
from deepsquare.surgery.operation import FOLDED, check_intact, is_folded, unwrap
from deepsquare.surgery.trace import VIEWS, Graph, trace

Model = TypeVar("Model", bound=nn.Module)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DROPPING = ("StochasticDepth", "DropPath", "DropBlock2d")  # of torchvision and timm, idle in the test phase
HOMOGENEOUS = VIEWS | {*AVERAGES, "relu"}  # f(k·x) = k·f(x) for k ≥ 0


def fold(model: Model, *, input_shape: Sequence[int] | None = None) -> Model:
    """A copy of ``model`` for inference, with the same outputs.

    √s of Square-Softmin is merged into the last fully connected layer (the paper's own remark under Eq. 24), batch
    normalisation into the convolution before it, a ReLU into the Square-Encoding behind it, which then is one pass;
    dropout is gone. The model itself is left as it is.
    """
    model = unwrap(model)  # type: ignore[assignment]
    check_intact(model)
    if model.training:
        raise ValueError("fold makes the test-phase form of a model; call fold(model.eval())")
    if is_folded(model):
        return model
    folded = copy.deepcopy(model)
    graph = trace(folded, input_shape)
    with torch.no_grad():
        _merge_scale(folded, graph)
        _merge_batch_norms(folded, graph)
    _merge_relus(folded, graph)
    _remove_dropout(folded)
    setattr(folded, FOLDED, True)
    return folded


def _merge_scale(model: nn.Module, graph: Graph) -> None:
    """-s·x² = -(√s·x)², so √s goes into the layer that makes x, if nothing but homogeneous operations lie between."""
    for call in graph.calls:
        softmin = call.module
        if not isinstance(softmin, SquareSoftmin) or softmin.root_scale is None:
            continue
        made = max((n.index for n in graph.nodes[: call.input + 1] if n.is_layer), default=0)
        layer = graph.calls[graph.nodes[made].call].module
        # The exact classes: in others (cosine classifiers, parametrised ones) the weight is not all there is.
        if base_class(layer) not in (nn.Linear, *CONVOLUTIONS) or not _is_exclusive(model, graph, layer):
            continue
        if any(n.op not in HOMOGENEOUS for n in graph.between(made, call.input)):
            continue
        assert isinstance(layer, (nn.Linear, *CONVOLUTIONS))
        root = softmin.root_scale.abs()
        layer.weight.mul_(root.reshape(-1, *[1] * (layer.weight.dim() - 1)))
        if layer.bias is not None:
            layer.bias.mul_(root)
        softmin.merge_scale()


def _is_exclusive(model: nn.Module, graph: Graph, module: nn.Module) -> bool:
    """Whether the module runs once, shares no parameter with another and has no hook: it can be changed by itself."""
    owners: Counter[nn.Parameter] = Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)
    shares = any(owners[parameter] > 1 for parameter in module.parameters())
    hooked = module._forward_hooks or module._forward_pre_hooks
    return graph.times_called[module] == 1 and not shares and not hooked


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
    convolutions = [call for call in graph.calls if base_class(call.module) in CONVOLUTIONS]
    made_by = {call.output: call for call in convolutions if graph.nodes[call.output].is_conv}
    for call in graph.calls:
        norm, before = call.module, made_by.get(call.input)
        if before is None or graph.readers(call.input) > 1 or not isinstance(norm, BATCH_NORMS):
            continue
        if not _is_exclusive(model, graph, before.module) or not _is_exclusive(model, graph, norm):
            continue
        if norm.running_mean is None or norm.running_var is None:
            continue
        if base_class(norm) in BATCH_NORMS:
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
            if SITE in child.__dict__:
                rest.add_module(name, child)  # an inserted module goes on acting where it stood
        parent, _, name = call.path.rpartition(".")
        setattr(model.get_submodule(parent), name, rest.train(norm.training))


def _merge_relus(model: nn.Module, graph: Graph) -> None:
    """A ReLU that nothing but a square reads is part of it: max(0, t)², one pass instead of two."""
    made_by = {call.output: call for call in graph.calls if type(call.module) is nn.ReLU}
    for call in graph.calls:
        before = made_by.get(call.input)
        if before is None or type(call.module) not in (EleSquare, SquareEncoding):
            continue
        alone = all(_is_exclusive(model, graph, module) for module in (call.module, before.module))
        if alone and graph.readers(call.input) == 1:
            replace(model, call.module, ReLUSquare())
            replace(model, before.module, nn.Identity())


def _remove_dropout(model: nn.Module) -> None:
    """What does nothing in the test phase."""
    for module in list(model.modules()):
        hooked = module._forward_hooks or module._forward_pre_hooks
        dropping = type(module).__name__ in DROPPING or (
            isinstance(module, _DropoutNd) and type(module).__module__ == _DropoutNd.__module__
        )
        if dropping and not hooked:
            replace(model, module, nn.Identity())


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` stands in ``model``; where that was inserted, it acts at the same site."""
    if SITE in old.__dict__:
        setattr(new, SITE, old.__dict__[SITE])
    new.train(old.training)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
