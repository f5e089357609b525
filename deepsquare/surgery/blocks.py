"""Residual blocks that end with Square-Excitation, run in fewer passes over the map.

A ResNet's block ends with an addition and a ReLU, each a pass over the map of its own. With the excitation fused into
them (:func:`deepsquare.functional.square_excitation_add_relu`) the equipped block takes no more passes than the plain
one. This is done for the blocks known here, in eager mode; the others, and whatever looks at modules or operations one
by one (hooks, compilers, exporters), see the block as its authors wrote it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torchvision.models import resnet as torchvision_resnet

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.nn import SquareExcitation
from deepsquare.surgery.insertion import PREFIX, Equipped

Branch = Callable[[Any, Tensor], Tensor]
EXCITATION = PREFIX + "excitation"


def _torchvision_basic(block: Any, x: Tensor) -> Any:
    return block.conv2(block.relu(block.bn1(block.conv1(x))))


def _torchvision_bottleneck(block: Any, x: Tensor) -> Any:
    x = block.relu(block.bn1(block.conv1(x)))
    return block.conv3(block.relu(block.bn2(block.conv2(x))))


def _timm_basic(block: Any, x: Tensor) -> Any:
    x = block.aa(block.act1(block.drop_block(block.bn1(block.conv1(x)))))
    return block.conv2(x)


def _timm_bottleneck(block: Any, x: Tensor) -> Any:
    x = block.act1(block.bn1(block.conv1(x)))
    return block.conv3(block.aa(block.act2(block.drop_block(block.bn2(block.conv2(x))))))


@functools.cache
def _known() -> dict[type[nn.Module], tuple[Branch, str, str]]:
    """For a block's class: its main branch up to the last normalisation, the names of that one and of the last ReLU."""
    known: dict[type[nn.Module], tuple[Branch, str, str]] = {
        torchvision_resnet.BasicBlock: (_torchvision_basic, "bn2", "relu"),
        torchvision_resnet.Bottleneck: (_torchvision_bottleneck, "bn3", "relu"),
    }
    try:
        from timm.models import resnet as timm_resnet
    except ImportError:
        return known
    return known | {
        timm_resnet.BasicBlock: (_timm_basic, "bn2", "act2"),
        timm_resnet.Bottleneck: (_timm_bottleneck, "bn3", "act3"),
    }


class FusedBlock(nn.Module):
    """What the class of a known block is combined with."""

    deepsquare_block: type[nn.Module]
    deepsquare_parts: tuple[Branch, str, str]

    def forward(self, x: Tensor) -> Tensor:
        """What the block computes, its end in one pass where that can be."""
        branch, norm_name, relu_name = self.deepsquare_parts
        norm, relu = getattr(self, norm_name), getattr(self, relu_name)
        if not kernels.serve(x) or not _can_fuse(self, norm, relu):
            y: Tensor = super().forward(x)
            return y
        inside = norm.without_inserted(branch(self, x))
        downsample = getattr(self, "downsample", None)
        residual = x if downsample is None else downsample(x)
        excitation: SquareExcitation = getattr(norm, EXCITATION)
        residual = residual.to(inside.dtype)
        return DF.square_excitation_add_relu(inside, excitation.alpha, residual, inplace=True)  # as the block's own end

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the block's class, as :class:`Equipped` does."""
        return _new_fused, (self.deepsquare_block,), super().__reduce_ex__(protocol)[2]


def fuse_blocks(model: nn.Module) -> None:
    """Let every known block of ``model`` that ends with Square-Excitation run its end in one pass."""
    for block in model.modules():
        if type(block) in _known() and hasattr(getattr(block, _known()[type(block)][1]), EXCITATION):
            block.__class__ = _fused_class(type(block))


def unfuse_blocks(model: nn.Module) -> None:
    """The opposite of :func:`fuse_blocks`."""
    for block in model.modules():
        if isinstance(block, FusedBlock):
            block.__class__ = block.deepsquare_block  # type: ignore[assignment]


_classes: dict[type[nn.Module], type[FusedBlock]] = {}


def _fused_class(block: type[nn.Module]) -> type[FusedBlock]:
    if block not in _classes:
        names = {"deepsquare_block": block, "deepsquare_parts": _known()[block], "__module__": block.__module__}
        _classes[block] = type(block.__name__, (FusedBlock, block), {**names, "__doc__": block.__doc__})
    return _classes[block]


def _new_fused(block: type[nn.Module]) -> nn.Module:
    fused = _fused_class(block)
    return fused.__new__(fused)


def _can_fuse(block: nn.Module, norm: nn.Module, relu: nn.Module) -> bool:
    return (
        isinstance(norm, Equipped)
        and list(norm.deepsquare_inserted) == [EXCITATION]
        and type(relu) is nn.ReLU
        and type(getattr(norm, EXCITATION)) is SquareExcitation
        and not any("forward" in vars(module) for module in (norm, relu, getattr(norm, EXCITATION)))
        and getattr(block, "se", None) is None  # timm's blocks may have these two in between
        and getattr(block, "drop_path", None) is None
        and not any(_hooks(norm, getattr(norm, EXCITATION), relu))
    )


def _hooks(*modules: nn.Module) -> Iterator[Any]:
    """What would have to be called with a module's own input or output."""
    yield torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    for module in modules:
        yield module._forward_hooks
        yield module._forward_pre_hooks
        yield module._backward_hooks
        yield module._backward_pre_hooks
