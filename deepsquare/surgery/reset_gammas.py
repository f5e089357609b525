"""Blocks whose last γ is initialized at zero (``zero_init_residual``), which Square-Excitation could not train.

NOTE not in paper: where γ and the bias are 0 the branch is F = 0, so G = 0, s = 0 and d(s·F)/dF = 0: neither γ nor α
would ever get a gradient. So γ is set to 1. A zero γ beside a nonzero bias (a trained one) gives F ≠ 0 and is kept.
"""

import warnings

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from deepsquare.surgery.site import Sites

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def _is_zero(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and not bool(value.any())


def reset_gammas(model: nn.Module, sites: Sites) -> tuple[str, ...]:
    """Set γ = 0 with a zero bias to γ = 1 in all blocks; returns the names of the parameters that were reset."""
    names: list[str] = []
    for path in dict.fromkeys(site.block or site.path for site in sites.of_kind("branch_end")):
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            gamma = "weight" if isinstance(module, NORMS) else "gain"  # the gain of timm's scaled convolutions
            values, bias = getattr(module, gamma, None), getattr(module, "bias", None)
            if isinstance(values, nn.Parameter) and _is_zero(values) and (bias is None or _is_zero(bias)):
                nn.init.ones_(values)
                names.append(f"{name}.{gamma}")
    return tuple(names)


def restore_gammas(model: nn.Module, names: tuple[str, ...]) -> None:
    """Set back to 0 those that were not trained since :func:`reset_gammas`."""
    for gamma in map(model.get_parameter, names):
        if bool((gamma == 1).all()):
            nn.init.zeros_(gamma)


def warn_reset(names: tuple[str, ...]) -> None:
    """Warn the caller of :func:`deepsquare.equip` about the parameters that were reset."""
    warnings.warn(
        f"{len(names)} layers at the end of a block were initialized with γ = 0 ({names[0]}, …), where an excitation "
        "gets no gradient; they now start at γ = 1. Build the model without zero initialization of the residual branch "
        "(zero_init_residual=False, zero_init_last=False), if possible, to avoid this warning",
        stacklevel=3,
    )


def refuse_zero_convolutions(model: nn.Module, sites: Sites) -> None:
    """Refuse a branch that ends in a convolution with zero weights, which have no γ to be reset."""
    for site in sites.of_kind("branch_end"):
        module = model.get_submodule(site.path)
        if isinstance(module, _ConvNd) and _is_zero(module.weight):
            raise ValueError(
                f"the branch end {site.path} is a convolution with zero weights, where an excitation gets no gradient; "
                "build the model without zero initialization of the residual branch (zero_init_last=False), or load "
                "its weights first"
            )
