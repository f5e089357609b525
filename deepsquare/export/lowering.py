"""Lowering: a folded copy of a model for export, whose modules use few operations, and fast ones.

The functions of :mod:`deepsquare.functional` handle half precision, 0/0 and gradients. Each of these cases would add
operations to the exported graph. The modules below do without them, because α, β and s are constants and the dtype is
float32: a mean of squares is one product and one mean, and the factor G / (G + α²) one addition and one division.
"""

import math

import torch
from torch import Tensor, nn

from deepsquare.nn import EleSquare, SquareEncoding, SquareExcitation, SquarePooling, SquareSoftmin
from deepsquare.surgery import fold
from deepsquare.surgery.insertion import BLENDING, SITE, beta_of, drop_beta
from deepsquare.surgery.ownership import replace


def lower_for_export(model: nn.Module, images: Tensor, flatten_maps: bool) -> nn.Module:
    """A copy of ``model``, which is in eval mode, to be exported; ``images`` are run through it once.

    With ``flatten_maps``, the means of Square-Excitation read maps of shape (N, C, H·W), which fixes the size of the
    input.
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
    """Square-Pooling, Equation (20), or the mean of the map where ``square`` is the identity."""

    def __init__(self, square: nn.Module, keepdim: bool) -> None:
        super().__init__()
        self.square, self.keepdim = square, keepdim

    def forward(self, x: Tensor) -> Tensor:
        pooled = _mean(self.square(x))
        return pooled if self.keepdim else pooled.flatten(1)


class Square(nn.Module):
    """EleSquare, Equation (14), blended with its input by a constant β."""

    factor: Tensor | None  # β, under another name: this module does the blending itself
    offset: Tensor | None  # 1 − β

    def __init__(self, beta: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("factor", beta)
        self.register_buffer("offset", None if beta is None else 1 - beta)

    def forward(self, x: Tensor) -> Tensor:
        return x * x if self.factor is None or self.offset is None else x * (x * self.factor + self.offset)


class Blend(nn.Module):
    """(1 − β) · ``base(x)`` + β · ``inner(x)`` with a constant β; the base of a pooling is the mean."""

    factor: Tensor  # β
    kept: Tensor  # 1 − β

    def __init__(self, inner: nn.Module, base: nn.Module, beta: Tensor) -> None:
        super().__init__()
        self.inner, self.base = inner, base
        self.register_buffer("factor", beta)
        self.register_buffer("kept", 1 - beta)

    def forward(self, x: Tensor) -> Tensor:
        blended: Tensor = self.base(x) * self.kept + self.inner(x) * self.factor
        return blended


class Excitation(nn.Module):
    """Square-Excitation with constants α² and β: the factor (G + (1 − β) · α²) / (G + α²)."""

    offset: Tensor
    kept: Tensor | None  # (1 − β) · α²; None for 0
    hw: tuple[int, ...]  # height and width of a map that is flattened for its mean

    def __init__(self, offset: Tensor, flatten_maps: bool = False, beta: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("offset", offset)
        self.register_buffer("kept", None if beta is None else (1 - beta) * offset)
        self.flatten_maps, self.hw = flatten_maps, ()

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        maps = x.reshape(-1, channels, math.prod(self.hw)) if self.hw else x
        g = _mean(maps * maps)
        factor = (g if self.kept is None else g + self.kept) / (g + self.offset)
        # Not a view of a product: torch.export writes an addition in place to a view with two reshapes more.
        return x * (factor.reshape(-1, channels, *[1] * len(self.hw)) if self.hw else factor)

    def fit(self, inputs: tuple[Tensor]) -> None:
        """Store the map's size, and the constants for every channel: onnxruntime is slow at adding a scalar."""
        (x,) = inputs
        shape = (1, x.shape[1], *[1] * (1 if self.flatten_maps else x.ndim - 2))
        self.offset = self.offset.expand(shape).clone()
        if self.kept is not None:
            self.kept = self.kept.expand(shape).clone()
        if self.flatten_maps:
            self.hw = tuple(x.shape[2:])


class Softmin(nn.Module):
    """Square-Softmin, Equation (24), with a constant s that could not be folded; ``factor`` is −s, or s with sign 1."""

    factor: Tensor | None  # None for −1
    kept: Tensor | None  # 1 − β; None for 0

    def __init__(self, factor: Tensor | None, kept: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor) -> Tensor:
        squares = x * x
        logits = -squares if self.factor is None else squares * self.factor.reshape(-1, *[1] * (x.ndim - 2))
        return logits if self.kept is None else logits + x * self.kept


def _lowered(module: nn.Module, flatten_maps: bool) -> nn.Module | None:
    """The form of one of our modules in which it is exported; None for any other module."""
    beta = beta_of(module) if SITE in module.__dict__ else None
    if beta is not None:
        beta = beta.detach()
        if bool(beta == 0):
            return nn.Identity()  # for a pooling too: the model's own one is still behind it
        if not isinstance(module, (*BLENDING, SquareSoftmin)):
            drop_beta(module)
            pools = module.__dict__[SITE].kind == "pooling"
            return Blend(module, Pooling(nn.Identity(), keepdim=True) if pools else nn.Identity(), beta)
    if type(module) is SquarePooling:
        return Pooling(Square(beta), module.keepdim)
    if type(module) in (EleSquare, SquareEncoding) and beta is not None:
        return Square(beta)
    if type(module) is SquareExcitation:
        offset = module.alpha.detach().square()
        smallest = torch.finfo(offset.dtype).tiny  # below it, s = 1
        return Excitation(offset, flatten_maps, beta) if bool(offset >= smallest) else nn.Identity()
    if type(module) is SquareSoftmin:
        scale = torch.ones(1) if module.scale is None else module.scale.detach()
        if beta is not None:
            return Softmin(module.sign * scale * beta, 1 - beta)
        return Softmin(None if module.scale is None and module.sign == -1 else module.sign * scale, None)
    return None


def _mean(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)
