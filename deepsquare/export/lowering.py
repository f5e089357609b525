"""Lowering: a folded copy of a model for export, whose modules use few operations, and fast ones.

The functions of :mod:`deepsquare.functional` handle half precision, 0/0 and gradients. Each of these cases would add
operations to the exported graph. The modules below do without them, because α and s are constants and the dtype is
float32: a mean of squares is one product and one mean, and the factor G / (G + α²) one addition and one division.
"""

import math

import torch
from torch import Tensor, nn

from deepsquare.nn import SquareExcitation, SquarePooling, SquareSoftmin
from deepsquare.surgery import fold
from deepsquare.surgery.fold import replace


def lower_for_export(model: nn.Module, images: Tensor, flatten_maps: bool) -> nn.Module:
    """A copy of ``model``, which is in eval mode, to be exported; ``images`` are run through it once.

    With ``flatten_maps``, Square-Excitation works on maps of shape (N, C, H·W), which fixes the size of the input.
    """
    folded = fold(model, input_shape=images.shape[1:])
    for module in list(folded.modules()):
        lowered = _lowered(module, flatten_maps)
        if lowered is not None:
            replace(folded, module, lowered)
    excitations = [module for module in folded.modules() if isinstance(module, Excitation)]
    hooks = [module.register_forward_pre_hook(Excitation.fit) for module in excitations]
    with torch.no_grad():
        folded(images)
    for hook in hooks:
        hook.remove()
    return folded.requires_grad_(False)


class Pooling(nn.Module):
    """Square-Pooling, Equation (20)."""

    def __init__(self, keepdim: bool) -> None:
        super().__init__()
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return _mean_square(x) if self.keepdim else _mean_square(x).flatten(1)


class Excitation(nn.Module):
    """Square-Excitation with a constant α²."""

    offset: Tensor
    hw: tuple[int, ...]  # height and width of a map that is flattened

    def __init__(self, offset: Tensor, flatten_maps: bool = False) -> None:
        super().__init__()
        self.register_buffer("offset", offset)
        self.flatten_maps, self.hw = flatten_maps, ()

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        maps = x.reshape(-1, channels, math.prod(self.hw)) if self.hw else x
        g = _mean_square(maps)
        excited = maps * (g / (g + self.offset))
        return excited.reshape(-1, channels, *self.hw) if self.hw else excited

    def fit(self, inputs: tuple[Tensor]) -> None:
        """Store α² for every channel, as onnxruntime is slow at adding a scalar to a vector, and the map's size."""
        (x,) = inputs
        spatial = 1 if self.flatten_maps else x.ndim - 2
        self.offset = self.offset.expand(1, x.shape[1], *[1] * spatial).clone()
        if self.flatten_maps:
            self.hw = tuple(x.shape[2:])


class Softmin(nn.Module):
    """Square-Softmin, Equation (24), with a constant s that could not be folded; ``factor`` is −s, or s with sign 1."""

    factor: Tensor | None  # None for −1

    def __init__(self, factor: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return -(x * x) if self.factor is None else x * x * self.factor.reshape(-1, *[1] * (x.ndim - 2))


def _lowered(module: nn.Module, flatten_maps: bool) -> nn.Module | None:
    """The form of one of our modules in which it is exported; None for any other module."""
    if type(module) is SquarePooling:
        return Pooling(module.keepdim)
    if type(module) is SquareExcitation:
        offset = module.alpha.detach().square()
        smallest = torch.finfo(offset.dtype).tiny
        return Excitation(offset, flatten_maps) if bool(offset >= smallest) else nn.Identity()  # s = 1 for α = 0
    if type(module) is SquareSoftmin:
        scale = torch.ones(1) if module.scale is None else module.scale.detach()
        return Softmin(None if module.scale is None and module.sign == -1 else module.sign * scale)
    return None


def _mean_square(x: Tensor) -> Tensor:
    return (x * x).mean(tuple(range(2, x.ndim)), keepdim=True)
