"""Blocks whose last normalization starts at γ = 0 (``zero_init_residual``) and end in an excitation.

NOTE not in paper: where γ and the bias are 0 the branch is F = 0, so G = 0, s = 0 and d(s·F)/dF = 0: with
Square-Excitation neither γ nor α would ever get a gradient. So γ is set to 1. A zero γ beside a nonzero bias (a trained
one) gives F ≠ 0 and is kept.
"""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from deepsquare.surgery.site import Sites


def reset_gammas(model: nn.Module, sites: Sites) -> tuple[str, ...]:
    """Set γ = 0 with a zero bias to γ = 1 in all blocks; returns the names of the parameters that were reset.

    A branch that ends in a convolution with zero weights is refused, as it has no γ.
    """
    branch_ends = sites.of_kind("branch_end")
    for site in branch_ends:
        module = model.get_submodule(site.path)
        if isinstance(module, _ConvNd) and _is_zero(module.weight):
            raise ValueError(
                f"the branch end {site.path} is a convolution with zero weights, where an excitation gets no gradient; "
                "build the model without zero initialization of the residual branch (zero_init_last=False), or load "
                "its weights first"
            )
    names: list[str] = []
    for path in dict.fromkeys(site.block or site.path for site in branch_ends):
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            # Of timm's scaled convolutions the gain is γ.
            gamma = "weight" if isinstance(module, (_BatchNorm, nn.GroupNorm, nn.LayerNorm)) else "gain"
            values, bias = getattr(module, gamma, None), getattr(module, "bias", None)
            if isinstance(values, nn.Parameter) and _is_zero(values) and (bias is None or _is_zero(bias)):
                nn.init.ones_(values)
                names.append(f"{name}.{gamma}")
    return tuple(names)


def _is_zero(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and not bool(value.any())
