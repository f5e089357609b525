"""Training in channels_last without conversions to the contiguous format and back.

Two operations leave channels_last: torchvision's ``channel_shuffle`` (ShuffleNetV2) returns contiguous maps, and the
gradient of a global average pooling is contiguous. Each map is then converted for the next convolution, and a ReLU
whose gradient has another format than its output takes about thirty times as long. The replacements here compute the
same values.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.surgery.insertion import base_class, is_watched


def keep_channels_last(model: nn.Module) -> int:
    """Replace what leaves channels_last in a training step, and return how many modules changed.

    These are modules whose own input and output nothing observes or changes; the ``state_dict`` stays.
    """
    from torchvision.models import ShuffleNetV2
    from torchvision.models.shufflenetv2 import InvertedResidual

    replacements: dict[nn.Module, Callable[..., Tensor]] = {}
    for module in model.modules():
        if base_class(module) is InvertedResidual:  # also one whose end is fused at inference
            replacements[module] = _shuffle_block
        elif type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
            replacements[module] = _global_pool
        elif type(module) is ShuffleNetV2 and type(module.conv5) is nn.Sequential:  # its mean is no module
            replacements[module.conv5] = _before_mean
    unobserved = {module: forward for module, forward in replacements.items() if not is_watched(module)}
    for module, forward in unobserved.items():
        module.forward = MethodType(forward, module)
    return len(unobserved)


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


class GlobalMean(torch.autograd.Function):
    """The mean of each map, (N, C, H, W) to (N, C, 1, 1), whose gradient takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        shape: torch.Size = ctx.shape
        return (gradients[0] / (shape[2] * shape[3])).expand(shape)


def _shuffle_block(block: Any, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1) if block.stride == 1 else (block.branch1(x), x)
    out: Tensor = Interleave.apply(first, block.branch2(second))  # type: ignore[no-untyped-call]
    return out


def _global_pool(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = GlobalMean.apply(x)  # type: ignore[no-untyped-call]
    return out


def _before_mean(layers: nn.Sequential, x: Tensor) -> Tensor:
    """The layers and the mean over their output, (N, C, 1, 1), which the mean that follows leaves as it is."""
    for layer in layers:
        x = layer(x)
    out: Tensor = GlobalMean.apply(x)  # type: ignore[no-untyped-call]
    return out
