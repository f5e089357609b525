"""Residual blocks that end with Square-Excitation, run in fewer passes over the map.

A ResNet's block ends with an addition and a ReLU, each a pass over the map. With the excitation fused into them
(:func:`deepsquare.functional.square_excitation_add_relu`) the equipped block needs no more passes than the base block.
This is done for the classes in ``BRANCHES``, in eager mode; other blocks, and whatever observes modules or operations
one by one (hooks, compilers, exporters), run the block's original ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.nn import SquareExcitation
from deepsquare.surgery.insertion import PREFIX, DynamicSubclass, WithInserted, dynamic_subclass

Branch = Callable[[Any, Tensor], Tensor]
EXCITATION = PREFIX + "excitation"


def _torchvision_basic(block: Any, x: Tensor) -> Any:
    return block.conv2(block.relu(block.bn1(block.conv1(x))))


def _torchvision_bottleneck(block: Any, x: Tensor) -> Any:
    x = block.relu(block.bn1(block.conv1(x)))
    return block.conv3(block.relu(block.bn2(block.conv2(x))))


def _timm_basic(block: Any, x: Tensor) -> Any:
    x = block.aa(block.act1(block.drop_block(block.bn1(block.conv1(x)))))
    return block.conv2(x)


def _timm_bottleneck(block: Any, x: Tensor) -> Any:
    x = block.act1(block.bn1(block.conv1(x)))
    return block.conv3(block.aa(block.act2(block.drop_block(block.bn2(block.conv2(x))))))


# By module and name, as neither library is imported for it: the main branch up to the last normalization, the names of
# that normalization and of the last ReLU.
BRANCHES: dict[tuple[str, str], tuple[Branch, str, str]] = {
    ("torchvision.models.resnet", "BasicBlock"): (_torchvision_basic, "bn2", "relu"),
    ("torchvision.models.resnet", "Bottleneck"): (_torchvision_bottleneck, "bn3", "relu"),
    ("timm.models.resnet", "BasicBlock"): (_timm_basic, "bn2", "act2"),
    ("timm.models.resnet", "Bottleneck"): (_timm_bottleneck, "bn3", "act3"),
}


def _key(block_class: type[nn.Module]) -> tuple[str, str]:
    return block_class.__module__, block_class.__qualname__


class FusedBlock(DynamicSubclass):
    """A block of ``BRANCHES``: ``forward`` runs its end in one pass where possible."""

    def forward(self, x: Tensor) -> Tensor:
        """The output of the block."""
        fused = kernels.backend_for(x)
        if fused is None:
            return self._as_written(x)
        branch, norm_name, relu_name = BRANCHES[_key(self.deepsquare_base)]
        norm, relu = self._modules[norm_name], self._modules[relu_name]
        if not _can_fuse(self, norm, relu):
            return self._as_written(x)
        assert isinstance(norm, WithInserted)
        inside = norm.base_forward(branch(self, x))
        downsample = self._modules.get("downsample")
        residual = x if downsample is None else downsample(x)
        excitation: SquareExcitation = getattr(norm, EXCITATION)
        residual = residual.to(inside.dtype)
        known = type(residual) is Tensor and residual.shape == inside.shape and fused.supports(inside)
        if known and not torch.is_grad_enabled():  # skips the checks: for one image, Python's time counts
            forward = kernels.SquareExcitationAddReLU.forward
            return forward(fused, inside, excitation.alpha, residual, inplace=True)
        return DF.square_excitation_add_relu(inside, excitation.alpha, residual, inplace=True)  # as the block's own end

    def _as_written(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y


def fuse_blocks(model: nn.Module) -> None:
    """Let every block of ``BRANCHES`` that ends with Square-Excitation run its end in one pass."""
    for block in model.modules():
        _, norm_name, _ = BRANCHES.get(_key(type(block)), (None, "", ""))
        plain = not isinstance(block, DynamicSubclass)  # nothing is inserted at the block itself
        if plain and norm_name and hasattr(getattr(block, norm_name), EXCITATION):
            block.__class__ = dynamic_subclass(FusedBlock, type(block))


def unfuse_blocks(model: nn.Module) -> None:
    """The opposite of :func:`fuse_blocks`."""
    for block in model.modules():
        if isinstance(block, FusedBlock):
            block.__class__ = block.deepsquare_base  # type: ignore[assignment]


def _can_fuse(block: nn.Module, norm: nn.Module | None, relu: nn.Module | None) -> bool:
    """Runs at every call: modules are looked up in ``_modules``, not through the slower ``__getattr__``."""
    if not isinstance(norm, WithInserted) or type(relu) is not nn.ReLU:
        return False
    inserted, parts = norm._modules.get(EXCITATION), block._modules
    return (
        type(inserted) is SquareExcitation
        and len(norm.deepsquare_inserted) == 1
        and parts.get("se") is None  # timm's blocks may have these two in between
        and parts.get("drop_path") is None
        and not torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        and not (_is_watched(norm) or _is_watched(inserted) or _is_watched(relu))
    )


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook or a patched ``forward`` observes the module's own input or output."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )
