"""Square-Excitation and its scale."""

from typing import Any

import torch
from torch import Tensor, nn

from deepsquare import functional as DF
from deepsquare.nn._parameters import format_scalar, require_finite


class _Alpha(nn.Module):
    """The parameter α of Equation (25).

    NOTE not in paper: the initial α. After a batch normalization with γ = 1 the mean square G is about 1, and
    α² = E[G] gives s = ½, where it is most sensitive to G: ds/d(log G) = s·(1 - s). Hence 1 for training from scratch.
    For a trained network use ``equip(…, init="identity")``. At 0 the gradient of α is
    always 0, so 0 raises an error.
    """

    def __init__(
        self, alpha: float = 1.0, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not 1e-18 <= alpha <= 1e18:  # α² and its inverse are float32
            raise ValueError(
                f"alpha is {alpha!r}, expected a positive finite number from 1e-18 to 1e18, such as 1: from 0 it would "
                "never learn. To leave a trained network unchanged at first, use equip(…, init='identity')."
            )
        self.initial_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.initial_alpha)

    def extra_repr(self) -> str:
        return f"alpha={format_scalar(self.alpha)}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        require_finite(state_dict, prefix + "alpha")
        super()._load_from_state_dict(state_dict, prefix, *args)


class ScaleProportion(_Alpha):
    """Scale-Proportion, Equation (25): s = G / (G + α²)."""

    def forward(self, g: Tensor) -> Tensor:
        """G ≥ 0 of any shape to s in [0, 1] of the same shape."""
        return DF.scale_proportion(g, self.alpha)


class SquareExcitation(_Alpha):
    """Square-Excitation (SEx): each channel F_k of a branch times G_k / (G_k + α²), G_k the mean of F_k²."""

    def forward(self, x: Tensor, beta: Tensor | None = None) -> Tensor:
        """(N, C, spatial…) to the same shape and type."""
        return DF.square_excitation(x, self.alpha, beta)
