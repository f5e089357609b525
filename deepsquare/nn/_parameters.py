"""What modules with learned scalars share."""

from collections.abc import Mapping

import torch
from torch import Tensor


def require_finite(state: Mapping[str, Tensor], key: str) -> None:
    """Raise ValueError if ``key`` of the checkpoint ``state`` is NaN or infinite."""
    value = state.get(key)
    if value is not None and not value.is_meta and not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"The checkpoint holds {key} = {value.tolist()}, expected finite values: the training that "
            "wrote it diverged. Load an earlier checkpoint, or delete the key and load with strict=False."
        )


def is_sharded(value: Tensor) -> bool:
    """Whether this process holds a part of ``value`` only (a ``DTensor``), so that reading it is a collective call."""
    return hasattr(value, "full_tensor")


def format_scalar(value: Tensor) -> str:
    """A one-element parameter for ``extra_repr``; ``?`` on the meta device, which holds no values, and if sharded."""
    return "?" if value.is_meta or is_sharded(value) else f"{float(value.detach()):.4g}"
