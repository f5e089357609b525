"""ShuffleNetV2's blocks in channels_last, with the concatenation and the channel shuffle in one pass.

torchvision's ``channel_shuffle`` returns contiguous maps: in channels_last, every block converts its maps to the other
memory format and back, and ReLUs get gradients in another format than their outputs, which is slow. One pass that
interleaves the channels of the two branches moves the same values.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.surgery.insertion import is_watched


def shuffle_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of torchvision's ShuffleNetV2 whose own input and output nothing observes or changes."""
    from torchvision.models.shufflenetv2 import InvertedResidual

    return [module for module in model.modules() if type(module) is InvertedResidual and not is_watched(module)]


def use_interleave(model: nn.Module) -> None:
    """Let the blocks of a ShuffleNetV2 concatenate and shuffle channels in one pass; the ``state_dict`` stays."""
    for block in shuffle_blocks(model):
        block.forward = MethodType(_forward, block)


class Interleave(torch.autograd.Function):
    """(N, C, H, W) and (N, C, H, W) to (N, 2C, H, W) with their channels in turn, in channels_last."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        count, channels, height, width = first.shape
        out = first.new_empty(count, height, width, channels, 2)
        out[..., 0], out[..., 1] = first.permute(0, 2, 3, 1), second.permute(0, 2, 3, 1)
        return out.flatten(3).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gradient = gradients[0].permute(0, 2, 3, 1)
        pairs = gradient.reshape(*gradient.shape[:3], -1, 2)
        first, second = (part.contiguous().permute(0, 3, 1, 2) for part in pairs.unbind(-1))
        return first, second


def _forward(block: Any, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1) if block.stride == 1 else (block.branch1(x), x)
    out: Tensor = Interleave.apply(first, block.branch2(second))  # type: ignore[no-untyped-call]
    return out
