"""Channel attention: Gather-Excite and the block of GSoP-Net. Each returns the map times a gate in (0, 1).

Squeeze-and-Excitation is torchvision's ``SqueezeExcitation``.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, fx, nn

from deepsquare.baselines import second_order

EXTENTS = (0, 2, 4, 8)

fx.wrap("_check_size")  # as in :mod:`deepsquare.functional`


class GatherExcite(nn.Module):
    """Gather-Excite (Hu et al., 2018): a gate gathered around each position, or from the whole map.

    ==========  =============================================================================================
    GE-θ⁻       average pooling: no parameters
    GE-θ        depthwise convolutions with batch normalisation
    GE-θ⁺       GE-θ, then ReLU, 1×1 to C/16, ReLU, 1×1 to C
    ==========  =============================================================================================

    Args:
        channels: channels of the map.
        size: height and width of the map, for GE-θ over the whole map: it has one weight for each position.
        extent: 2, 4 or 8 positions, or 0 for the whole map.
        learned: GE-θ instead of GE-θ⁻.
        reduction: reduction ratio of the channels in GE-θ⁺; 0 for the others.
    """

    def __init__(
        self, channels: int, size: Sequence[int] = (), *, extent: int = 0, learned: bool = False, reduction: int = 0
    ) -> None:
        super().__init__()
        if extent not in EXTENTS:
            raise ValueError(f"extent is {extent}; expected 2, 4, 8, or 0 for the whole map")
        self.extent = extent
        self.size = tuple(size) if learned and not extent else None
        self.gather = _gather(channels, size, extent) if learned else _average(extent)
        self.gather.apply(second_order.init_kaiming)
        self.mix = _squeeze(channels, reduction) if reduction else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None:
            x = _check_size(x, self.size)
        gate = self.mix(self.gather(x)).sigmoid()
        if self.extent:
            gate = F.interpolate(gate, x.shape[2:], mode="nearest")
        out: Tensor = x * gate
        return out


def _check_size(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """The map, if its height and width are ``size``."""
    if tuple(x.shape[2:]) != size:
        received, expected = ("×".join(map(str, sides)) for sides in (x.shape[2:], size))
        raise ValueError(
            f"the map is {received}, but this GE-θ has one weight for each position of {expected}. Equip the model "
            "for that input size (input_shape=…), or give an extent"
        )
    return x


def _average(e: int) -> nn.Module:
    """The mean over windows of 2e − 1 positions with stride e, or over the whole map for e = 0."""
    return nn.AvgPool2d(2 * e - 1, e, e - 1, count_include_pad=False) if e else nn.AdaptiveAvgPool2d(1)


def _gather(channels: int, size: Sequence[int], extent: int) -> nn.Sequential:
    if not extent:
        if len(size) != 2:
            raise ValueError(f"GE-θ over the whole map needs its height and width, got {tuple(size)}")
        whole = nn.Conv2d(channels, channels, (size[0], size[1]), groups=channels, bias=False)
        return nn.Sequential(whole, nn.BatchNorm2d(channels))
    layers: list[nn.Module] = []
    for step in range(EXTENTS.index(extent)):
        layers += [nn.ReLU(inplace=True)] if step else []
        layers += [nn.Conv2d(channels, channels, 3, 2, 1, groups=channels, bias=False), nn.BatchNorm2d(channels)]
    return nn.Sequential(*layers)


def _squeeze(channels: int, reduction: int) -> nn.Sequential:
    hidden = max(1, channels // reduction)
    layers = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.01)  # as in the authors' release
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(nn.ReLU(inplace=True), layers[0], nn.ReLU(inplace=True), layers[1])


class GSoP(nn.Module):
    """The block of GSoP-Net (Gao et al., 2019): channels gated by the covariances of ``size`` channels.

    ``stride`` is that of the reduction to these; in the authors' release it is 2 in the first stage.
    """

    def __init__(self, channels: int, size: int = 128, stride: int = 1) -> None:
        super().__init__()
        self.reduce = nn.Sequential(
            nn.ReLU(), nn.Conv2d(channels, size, 1, stride), nn.BatchNorm2d(size), nn.ReLU(inplace=True)
        )
        self.norm = nn.BatchNorm2d(size)
        self.rows = nn.Conv2d(size, 4 * size, (size, 1), groups=size)  # each row of the matrix separately
        self.expand = nn.Conv2d(4 * size, channels, 1)
        self.apply(second_order.init_kaiming)

    def forward(self, x: Tensor) -> Tensor:
        reduced = self.reduce(x)
        rows = self.norm(second_order.covariance(reduced).unsqueeze(-1))
        out: Tensor = x * self.expand(self.rows(rows)).sigmoid()
        return out
