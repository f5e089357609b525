"""The techniques by name: each is a kind of site and the module that fills it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepsquare import baselines
from deepsquare import nn as dsnn
from deepsquare.surgery.site import Kind, Site

# The options that surgery itself reads: a module to act after, whether the last stage is filled too, and whether it
# gets stride 1.
SURGERY_OPTIONS = ("after", "last", "dense")


@dataclass(frozen=True)
class Technique:
    """What a term of a spec names."""

    title: str  # in the literature
    kind: Kind | None  # of the sites it fills, unless ``after`` names a module; None if ``after`` is required
    build: Callable[..., nn.Module]  # the module for a site, from the options without SURGERY_OPTIONS
    options: dict[str, Any] = field(default_factory=dict)  # with their default values
    stage_ends: bool = False  # it fills only the last site of each stage
    needs_nonzero_branch: bool = False  # a branch that starts at zero would get no gradient from it, and stay at zero


def _of_channels(module: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda site, **options: module(site.channels, **options)


def _keepdim(pooling: Callable[..., nn.Module], *args: int) -> Callable[..., nn.Module]:
    return lambda site, **options: pooling(*args, keepdim=True, **options)


def _se(site: Site, reduction: int) -> nn.Module:
    from torchvision.ops import SqueezeExcitation

    module: nn.Module = SqueezeExcitation(site.channels, max(1, site.channels // reduction))
    return module


def _ge_theta(site: Site, extent: int, reduction: int = 0) -> nn.Module:
    return baselines.GatherExcite(site.channels, site.spatial, extent=extent, learned=True, reduction=reduction)


def _gsop(site: Site, size: int) -> nn.Module:
    return baselines.GSoP(site.channels, size, stride=2 if site.stage == 1 else 1)


BASELINES: dict[str, Technique] = {
    "se": Technique("Squeeze-and-Excitation", "branch_end", _se, {"reduction": 16, "after": ""}),
    "ge_theta_minus": Technique(
        "Gather-Excite without parameters (GE-θ⁻)",
        "branch_end",
        _of_channels(baselines.GatherExcite),
        {"extent": 0, "after": ""},
    ),
    "ge_theta": Technique("Gather-Excite (GE-θ)", "branch_end", _ge_theta, {"extent": 0, "after": ""}),
    "ge_theta_plus": Technique(
        "Gather-Excite with a squeeze (GE-θ⁺)", "branch_end", _ge_theta, {"extent": 0, "reduction": 16, "after": ""}
    ),
    "gsop": Technique(
        "The block of GSoP-Net", "branch_end", _gsop, {"size": 128, "last": True, "dense": False}, stage_ends=True
    ),
    "mpn_cov": Technique("MPN-COV", "pooling", _of_channels(baselines.CovariancePooling), {"size": 256, "dense": True}),
    "isqrt_cov": Technique(
        "iSQRT-COV", "pooling", _of_channels(baselines.CovariancePooling), {"size": 256, "iterations": 5, "dense": True}
    ),
    "bilinear": Technique("Bilinear pooling", "pooling", _of_channels(baselines.BilinearPooling), {"size": 128}),
    "compact_bilinear": Technique(
        "Compact bilinear pooling", "pooling", _of_channels(baselines.CompactBilinearPooling), {"size": 8192}
    ),
    "fisher": Technique(
        "Fisher vector", "pooling", _of_channels(baselines.FisherVector), {"components": 16, "size": 64}
    ),
}
"""What the paper compares with."""

TECHNIQUES: dict[str, Technique] = {
    "pooling": Technique("Square-Pooling", "pooling", _keepdim(dsnn.SquarePooling)),
    "softmin": Technique("Square-Softmin", "logits", _of_channels(dsnn.SquareSoftmin), {"scale": "shared", "sign": -1}),
    "excitation": Technique(
        "Square-Excitation",
        "branch_end",
        lambda site, alpha: dsnn.SquareExcitation(alpha),
        {"alpha": 1.0},
        needs_nonzero_branch=True,
    ),
    "encoding": Technique("Square-Encoding", "last_spatial_conv", lambda site: dsnn.SquareEncoding()),
    "square": Technique("EleSquare after a named module", None, lambda site: dsnn.EleSquare(), {"after": ""}),
    "gem": Technique("GeM pooling", "pooling", _keepdim(dsnn.GeM), {"p": 3.0, "learnable": True}),
    "lp": Technique(
        "Lp-pooling with a Gaussian kernel", "pooling", _keepdim(dsnn.LpPooling), {"p": 2.0, "sigma": 0.25}
    ),
    **{
        f"moment{n}": Technique(f"Moment of order {n}", "pooling", _keepdim(dsnn.MomentPooling, n))
        for n in (3, 4, 5, 6)
    },
    **BASELINES,
}
