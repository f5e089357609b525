"""Square-Softmin."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepsquare import functional as DF
from deepsquare.nn._parameters import is_sharded, require_finite


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

    def set_num_classes(self, num_classes: int) -> None:
        """For a new classifier with another number of classes; one scale for each class starts anew."""
        self.num_classes = num_classes
        if self.scaling == "channel" and self.root_scale is not None:
            ones = self.root_scale.new_ones(num_classes)
            self.root_scale = nn.Parameter(ones, requires_grad=self.root_scale.requires_grad)

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
        if root is not None and not root.is_meta and (is_sharded(root) or bool((root < 0).any())):
            destination[prefix + "root_scale"] = root.abs() if keep_vars else root.detach().abs()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "root_scale"
        require_finite(state_dict, key)
        root = state_dict.get(key)
        if root is not None and not root.is_meta and bool((root < 0).any()):
            raise ValueError(
                f"The checkpoint holds {key} = {root.tolist()}, expected nonnegative values: it is the "
                "square root of the scale. If its sign is known to be meaningless, store the absolute value."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
