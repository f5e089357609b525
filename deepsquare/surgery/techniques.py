"""The techniques by name: each is a kind of site and the module that fills it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepsquare import baselines
from deepsquare import nn as dsnn
from deepsquare.surgery.site import Kind, Site


@dataclass(frozen=True)
class Technique:
    """What a term of a spec names.

    ``build`` returns the module for a site. Its keyword-only arguments are the options of the term, of which surgery
    itself reads ``after`` (a module to act after), ``last`` (whether the last stage is filled too) and ``dense``
    (whether the last stage gets stride 1).
    """

    title: str  # in the literature
    kind: Kind | None  # of the sites it fills, unless ``after`` names a module; None if ``after`` is required
    build: Callable[..., nn.Module]
    stage_ends: bool = False  # it fills only the last site of each stage
    needs_nonzero_branch: bool = False  # a branch that starts at zero would get no gradient from it, and stay at zero

    @property
    def options(self) -> dict[str, Any]:
        """The options with their default values."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _se(site: Site, *, reduction: int = 16, after: str = "") -> nn.Module:
    from torchvision.ops import SqueezeExcitation

    module: nn.Module = SqueezeExcitation(site.channels, max(1, site.channels // reduction))
    return module


def _ge_theta(site: Site, *, extent: int = 0, after: str = "") -> nn.Module:
    return baselines.GatherExcite(site.channels, site.spatial, extent=extent, learned=True)


def _ge_theta_plus(site: Site, *, extent: int = 0, reduction: int = 16, after: str = "") -> nn.Module:
    return baselines.GatherExcite(site.channels, site.spatial, extent=extent, learned=True, reduction=reduction)


def _gsop(site: Site, *, size: int = 128, last: bool = True, dense: bool = False) -> nn.Module:
    return baselines.GSoP(site.channels, size, stride=2 if site.stage == 1 else 1)


def _isqrt_cov(site: Site, *, size: int = 256, iterations: int = 5, dense: bool = True) -> nn.Module:
    return baselines.CovariancePooling(site.channels, size, iterations)


BASELINES: dict[str, Technique] = {
    "se": Technique("Squeeze-and-Excitation", "branch_end", _se),
    "ge_theta_minus": Technique(
        "Gather-Excite without parameters (GE-θ⁻)",
        "branch_end",
        lambda site, *, extent=0, after="": baselines.GatherExcite(site.channels, extent=extent),
    ),
    "ge_theta": Technique("Gather-Excite (GE-θ)", "branch_end", _ge_theta),
    "ge_theta_plus": Technique("Gather-Excite with a squeeze (GE-θ⁺)", "branch_end", _ge_theta_plus),
    "gsop": Technique("The block of GSoP-Net", "branch_end", _gsop, stage_ends=True),
    "mpn_cov": Technique(
        "MPN-COV", "pooling", lambda site, *, size=256, dense=True: baselines.CovariancePooling(site.channels, size)
    ),
    "isqrt_cov": Technique("iSQRT-COV", "pooling", _isqrt_cov),
    "bilinear": Technique(
        "Bilinear pooling", "pooling", lambda site, *, size=128: baselines.BilinearPooling(site.channels, size)
    ),
    "compact_bilinear": Technique(
        "Compact bilinear pooling",
        "pooling",
        lambda site, *, size=8192: baselines.CompactBilinearPooling(site.channels, size),
    ),
    "fisher": Technique(
        "Fisher vector",
        "pooling",
        lambda site, *, components=16, size=64: baselines.FisherVector(site.channels, components, size),
    ),
}
"""What the paper compares with."""

TECHNIQUES: dict[str, Technique] = {
    "pooling": Technique("Square-Pooling", "pooling", lambda site: dsnn.SquarePooling(keepdim=True)),
    "softmin": Technique(
        "Square-Softmin",
        "logits",
        lambda site, *, scale="shared", sign=-1: dsnn.SquareSoftmin(site.channels, scale=scale, sign=sign),
    ),
    "excitation": Technique(
        "Square-Excitation",
        "branch_end",
        lambda site, *, alpha=1.0: dsnn.SquareExcitation(alpha),
        needs_nonzero_branch=True,
    ),
    "encoding": Technique("Square-Encoding", "last_spatial_conv", lambda site: dsnn.SquareEncoding()),
    "square": Technique("EleSquare after a named module", None, lambda site, *, after="": dsnn.EleSquare()),
    "gem": Technique(
        "GeM pooling",
        "pooling",
        lambda site, *, p=3.0, learnable=True: dsnn.GeM(p, learnable=learnable, keepdim=True),
    ),
    "lp": Technique(
        "Lp-pooling with a Gaussian kernel",
        "pooling",
        lambda site, *, p=2.0, sigma=0.25: dsnn.LpPooling(p, sigma=sigma, keepdim=True),
    ),
    **{
        f"moment{n}": Technique(
            f"Moment of order {n}", "pooling", lambda site, order=n: dsnn.MomentPooling(order, keepdim=True)
        )
        for n in (3, 4, 5, 6)
    },
    **BASELINES,
}
