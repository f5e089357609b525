"""Building a model without its memory, from arguments that nobody has checked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

MAX_VALUES = 2**24  # that a builder may compute on the CPU, in all; torchvision's swin_v2_b computes 1.5 million
COUNTING = (torch.arange, torch.tensor)  # on the CPU: RegNets compute their widths by them


class DryRun(TorchFunctionMode):
    """An error after so many calls of torch, or before more values are computed than a model is described by.

    On the meta device nothing is computed, but builders name the CPU where they need numbers. Each such call is run on
    the meta device first, which tells the size of its result.
    """

    def __init__(self, max_calls: int) -> None:
        super().__init__()
        self.max_calls = self.calls_left = max_calls
        self.values_left = MAX_VALUES

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ValueError(f"more than {self.max_calls} calls of torch to build it")
        kwargs = {**({"device": "cpu"} if func in COUNTING else {}), **(kwargs or {})}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        devices = [torch.device(kwargs.get("device") or "meta"), *(tensor.device for tensor in tensors)]
        traced = any(isinstance(tensor, FakeTensor) for tensor in tensors)  # a builder that equips; it takes no memory
        if not traced and any(device.type != "meta" for device in devices):
            self.values_left -= _count(func, args, kwargs)
            if self.values_left < 0:
                raise ValueError(f"more than {MAX_VALUES} values computed to build it")
        return func(*args, **kwargs)


def _count(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of values in the result of a call, from the meta device; 0 if it returns no tensor."""
    args, kwargs = tree_map(_to_meta, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = "meta"
    try:
        result = func(*args, **kwargs)
    except Exception:  # it reads a value, as item does, or fails on the CPU too
        return 0
    return sum(value.numel() for value in tree_leaves(result) if isinstance(value, Tensor))


def _to_meta(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value
