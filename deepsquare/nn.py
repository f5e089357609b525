"""The modules: each holds the parameters of one function of :mod:`deepsquare.functional` and calls it."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepsquare import functional as DF

__all__ = [
    "EleSquare", "GeM", "LpPooling", "MomentPooling", "ReLUSquare", "ScaleProportion", "SquareEncoding",
    "SquareExcitation", "SquarePooling", "SquareSoftmin",
]  # fmt: skip


class EleSquare(nn.Module):
    """EleSquare, Equation (14): t², elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return DF.square(x)


class ReLUSquare(nn.Module):
    """ReLU-Square, Equation (19): max(0, t)², elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return DF.relu_square(x)


class SquareEncoding(EleSquare):
    """Square-Encoding (SEn): EleSquare as the input of the last spatial convolution of a main branch."""


class SquarePooling(nn.Module):
    """Square-Pooling (SP), Equation (20): the mean of squares of each channel."""

    def __init__(self, keepdim: bool = False) -> None:
        super().__init__()
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, spatial…) to (N, C) or (N, C, 1, …)."""
        return DF.square_pooling(x, self.keepdim)

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
        p = _format_scalar(self.p) if isinstance(self.p, Tensor) else self.p
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


class _Alpha(nn.Module):
    """The parameter α of Equation (25).

    NOTE not in paper: the initial α. After a batch normalization with γ = 1 the mean square G is about 1, and
    α² = E[G] gives s = ½, where it is most sensitive to G: ds/d(log G) = s·(1 - s). Hence 1 for training from scratch.
    A small value such as 1e-3 leaves the outputs of a pretrained network nearly unchanged. At 0 the gradient of α is
    always 0, so 0 raises an error.
    """

    def __init__(
        self, alpha: float = 1.0, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not 0 < alpha < math.inf:
            raise ValueError(
                f"alpha is {alpha!r}, expected a positive finite number: 1 to train from scratch, 1e-3 to "
                "leave a pretrained network nearly unchanged; from 0 it would never learn."
            )
        self.initial_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.initial_alpha)

    def extra_repr(self) -> str:
        return f"alpha={_format_scalar(self.alpha)}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _require_finite(state_dict, prefix + "alpha")
        super()._load_from_state_dict(state_dict, prefix, *args)


class ScaleProportion(_Alpha):
    """Scale-Proportion, Equation (25): s = G / (G + α²)."""

    def forward(self, g: Tensor) -> Tensor:
        """G ≥ 0 of any shape to s in [0, 1] of the same shape."""
        return DF.scale_proportion(g, self.alpha)


class SquareExcitation(_Alpha):
    """Square-Excitation (SEx): each channel F_k of a branch times G_k / (G_k + α²), G_k the mean of F_k²."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, spatial…) to the same shape and type."""
        return DF.square_excitation(x, self.alpha)


class SquareSoftmin(nn.Module):
    """Square-Softmin (SS), Equation (24): logits y_k = -s_k · x_k² with nonnegative scales s.

    Args:
        num_classes: K; needed for ``scale="channel"`` only.
        scale: ``"shared"``, one s for all classes (the paper's choice on ImageNet), ``"channel"``, one for each class,
            or ``"none"``.
        sign: -1, or +1 for the positive variants of Table 2 (DeepSquare5+ and 5s+).

    NOTE not in paper: how s stays nonnegative. The parameter is ``root_scale`` = √s, initialized to 1, which the test
    phase merges into the FC layer. Its sign has no effect, and an optimizer step may flip it. A state_dict always holds
    the nonnegative root, and loading a negative one raises an error, since it is more likely a broken s of another
    implementation. The live parameter keeps its sign: flipping it on the one rank that saves would flip that rank's
    gradients only.
    """

    root_scale: nn.Parameter | None

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        scale: Literal["shared", "channel", "none"] = "shared",
        sign: Literal[-1, 1] = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if scale not in ("shared", "channel", "none"):
            raise ValueError(f"scale is {scale!r}, expected 'shared', 'channel' or 'none'.")
        if sign not in (-1, 1):
            raise ValueError(f"sign is {sign!r}, expected -1 (Square-Softmin) or 1.")
        if scale == "channel" and (num_classes is None or num_classes < 1):
            raise ValueError(f"num_classes is {num_classes!r}, expected the number of classes for scale='channel'.")
        self.num_classes = num_classes
        self.scaling = scale
        self.sign = sign
        if scale == "none":
            self.register_parameter("root_scale", None)
        else:
            shape = (num_classes,) if scale == "channel" and num_classes is not None else (1,)
            self.root_scale = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.root_scale is not None:
            nn.init.ones_(self.root_scale)

    @property
    def scale(self) -> Tensor | None:
        """The scales s, of shape (1,) or (K,), or None."""
        return None if self.root_scale is None else DF.square(self.root_scale)

    def merge_scale(self) -> None:
        """Drop s, for the test phase, once √s is merged into the weights of the previous layer."""
        self.scaling = "none"
        self.root_scale = None

    def forward(self, x: Tensor) -> Tensor:
        """The FC layer's outputs, (N, K) or (N, K, 1, 1), to logits of the same shape."""
        logits = DF.square_softmin(x, self.scale)
        return logits if self.sign == -1 else -logits

    def extra_repr(self) -> str:
        return f"{self.num_classes}, scale={self.scaling!r}, sign={self.sign}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        root = self.root_scale
        if root is not None and not root.is_meta and bool((root < 0).any()):
            destination[prefix + "root_scale"] = root.abs() if keep_vars else root.detach().abs()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "root_scale"
        _require_finite(state_dict, key)
        root = state_dict.get(key)
        if root is not None and not root.is_meta and bool((root < 0).any()):
            raise ValueError(
                f"The checkpoint holds {key} = {root.tolist()}, expected nonnegative values: it is the "
                "square root of the scale. If its sign is known to be meaningless, store the absolute value."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _require_finite(state: Mapping[str, Tensor], key: str) -> None:
    """Raise ValueError if ``key`` of the checkpoint ``state`` is NaN or infinite."""
    value = state.get(key)
    if value is not None and not value.is_meta and not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"The checkpoint holds {key} = {value.tolist()}, expected finite values: the training that "
            "wrote it diverged. Load an earlier checkpoint, or delete the key and load with strict=False."
        )


def _format_scalar(value: Tensor) -> str:
    """A one-element parameter for ``extra_repr``; ``?`` on the meta device, which holds no values."""
    return "?" if value.is_meta else f"{float(value.detach()):.4g}"
