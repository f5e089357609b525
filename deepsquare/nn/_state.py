"""What the modules with a parameter share: refusing a broken checkpoint, and showing a value."""

from collections.abc import Mapping

import torch
from torch import Tensor


def require_finite(state: Mapping[str, Tensor], key: str) -> None:
    """Raise ValueError if the checkpoint ``state`` holds ``key`` with a value that is NaN or infinite."""
    value = state.get(key)
    if value is not None and not value.is_meta and not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"The checkpoint holds {key} = {value.tolist()}, expected finite values: the training that "
            "wrote it diverged. Load an earlier checkpoint, or delete the key and load with strict=False."
        )


def shown(value: Tensor) -> str:
    """The value of a one-element parameter for a repr; a parameter on the meta device has none."""
    return "?" if value.is_meta else f"{float(value.detach()):.4g}"
