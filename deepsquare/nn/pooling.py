"""Global poolings: Square-Pooling and those of Table 3."""

import math

import torch
from torch import Tensor, nn

from deepsquare import functional as DF
from deepsquare.nn._parameters import format_scalar


class SquarePooling(nn.Module):
    """Square-Pooling (SP), Equation (20): the mean of squares of each channel."""

    def __init__(self, keepdim: bool = False) -> None:
        super().__init__()
        self.keepdim = keepdim

    def forward(self, x: Tensor, beta: Tensor | None = None) -> Tensor:
        """(N, C, spatial…) to (N, C) or (N, C, 1, …)."""
        return DF.square_pooling(x, self.keepdim, beta)

    def extra_repr(self) -> str:
        return f"keepdim={self.keepdim}"


class MomentPooling(nn.Module):
    """The moment about the origin of the given order, Table 3: 1 is the mean, 2 Square-Pooling."""

    def __init__(self, order: int, keepdim: bool = False) -> None:
        super().__init__()
        self.order = order
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, spatial…) to (N, C) or (N, C, 1, …)."""
        return DF.moment_pooling(x, self.order, self.keepdim)

    def extra_repr(self) -> str:
        return f"{self.order}, keepdim={self.keepdim}"


class GeM(nn.Module):
    """Generalised-mean pooling, Equation (8), with one exponent ``p`` for all channels.

    ``p`` is a parameter or, with ``learnable=False``, a float, which adds no key to the state_dict.

    NOTE not in paper: p is initialized to 3 and values are clamped to ``eps``, as in the GeM authors' release; the
    paper's Table 3 has p = 2, frozen.
    """

    def __init__(
        self,
        p: float = 3.0,
        learnable: bool = True,
        eps: float = 1e-6,
        keepdim: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < p < math.inf:
            raise ValueError(f"p is {p!r}, expected a positive finite number; GeM starts from 3.")
        self.initial_p = p
        self.eps = eps
        self.keepdim = keepdim
        initial = torch.full((1,), float(p), device=device, dtype=dtype)
        self.p: nn.Parameter | float = nn.Parameter(initial) if learnable else p

    def reset_parameters(self) -> None:
        if isinstance(self.p, nn.Parameter):
            nn.init.constant_(self.p, self.initial_p)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, spatial…) to (N, C) or (N, C, 1, …)."""
        return DF.gem_pooling(x, self.p, self.eps, self.keepdim)

    def extra_repr(self) -> str:
        learnable = isinstance(self.p, Tensor)
        p = format_scalar(self.p) if isinstance(self.p, Tensor) else self.p
        return f"p={p}, learnable={learnable}, eps={self.eps}, keepdim={self.keepdim}"


class LpPooling(nn.Module):
    """Lp-pooling, Equation (7), over the whole map; each call builds the Gaussian kernel of the map's size.

    NOTE not in paper: p = 2, which the paper calls close to Square-Pooling, and ``sigma`` relative to the map's side
    (see ``functional.gaussian_kernel``).
    """

    def __init__(self, p: float = 2.0, sigma: float = 0.25, keepdim: bool = False) -> None:
        super().__init__()
        if not 1 <= p < math.inf or not 0 < sigma < math.inf:
            raise ValueError(f"p is {p!r} and sigma {sigma!r}, expected a finite p of at least 1 and a positive sigma.")
        self.p = p
        self.sigma = sigma
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, spatial…) to (N, C) or (N, C, 1, …)."""
        dtype = torch.promote_types(x.dtype, torch.float32)  # a half kernel would not sum to 1
        kernel = DF.gaussian_kernel(x.shape[2:], self.sigma, device=x.device, dtype=dtype)
        return DF.lp_pooling(x, self.p, kernel, self.keepdim)

    def extra_repr(self) -> str:
        return f"p={self.p}, sigma={self.sigma}, keepdim={self.keepdim}"
