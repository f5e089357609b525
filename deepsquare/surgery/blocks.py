"""Residual blocks that end with Square-Excitation, run in fewer passes over the map.

A ResNet's block ends with an addition and a ReLU, each a pass over the map. With the excitation fused into them
(:func:`deepsquare.functional.square_excitation_add_relu`) the equipped block needs no more passes than the base block.
This is done for the classes in ``BRANCHES``, in eager mode; other blocks, and whatever observes modules or operations
one by one (hooks, compilers, exporters), run the block's original ``forward``.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.nn import SquareExcitation
from deepsquare.surgery.insertion import (
    PREFIX,
    DynamicSubclass,
    WithInserted,
    beta_of,
    dynamic_subclass,
    is_watched,
)

EXCITATION = PREFIX + "excitation"

# By module and name of the class, as neither library is imported for it: the layers of the main branch, of which the
# last is the normalization that the excitation is attached to, and the ReLU after the addition.
BRANCHES: dict[tuple[str, str], tuple[str, str]] = {
    ("torchvision.models.resnet", "BasicBlock"): ("conv1 bn1 relu conv2 bn2", "relu"),
    ("torchvision.models.resnet", "Bottleneck"): ("conv1 bn1 relu conv2 bn2 relu conv3 bn3", "relu"),
    ("timm.models.resnet", "BasicBlock"): ("conv1 bn1 drop_block act1 aa conv2 bn2", "act2"),
    ("timm.models.resnet", "Bottleneck"): ("conv1 bn1 act1 conv2 bn2 drop_block act2 aa conv3 bn3", "act3"),
}


class FusedBlock(DynamicSubclass):
    """A block of ``BRANCHES``: ``forward`` runs its end in one pass where possible."""

    def forward(self, x: Tensor) -> Tensor:
        backend = kernels.backend_for(x)
        norm = None if backend is None else _fusable_norm(self)
        if backend is None or norm is None:
            out: Tensor = super().forward(x)
            return out
        branch = x
        for name in _branch(self.deepsquare_base)[0][:-1]:
            branch = self._modules[name](branch)  # type: ignore[misc]
        branch = norm.deepsquare_base.forward(norm, branch)  # without the inserted excitation
        downsample = self._modules.get("downsample")
        residual = (x if downsample is None else downsample(x)).to(branch.dtype)
        excitation: SquareExcitation = getattr(norm, EXCITATION)
        alpha, beta = excitation.alpha, beta_of(excitation)
        known = type(residual) is Tensor and residual.shape == branch.shape and backend.supports(branch)
        if known and not torch.is_grad_enabled():  # skips the checks: for one image, Python's time counts
            return kernels.SquareExcitationAddReLU.forward(backend, branch, alpha, beta, residual, inplace=True)
        return DF.square_excitation_add_relu(
            branch, alpha, residual, beta, inplace=True
        )  # in place, as the block's own end


def _branch(block_class: type[nn.Module]) -> tuple[list[str], str]:
    layers, relu = BRANCHES.get((block_class.__module__, block_class.__qualname__), ("", ""))
    return layers.split(), relu


def fuse_blocks(model: nn.Module) -> None:
    """Let every block of ``BRANCHES`` that ends with Square-Excitation run its end in one pass."""
    for block in model.modules():
        layers, _ = _branch(type(block))
        plain = not isinstance(block, DynamicSubclass)  # nothing is inserted at the block itself
        if plain and layers and hasattr(getattr(block, layers[-1]), EXCITATION):
            block.__class__ = dynamic_subclass(FusedBlock, type(block))


def _fusable_norm(block: FusedBlock) -> WithInserted | None:
    """The last normalization, if its excitation and the ReLU can run in one pass.

    Runs at every call: modules are looked up in ``_modules``, not through the slower ``__getattr__``.
    """
    layers, relu_name = _branch(block.deepsquare_base)
    parts = block._modules
    norm, relu = parts[layers[-1]], parts[relu_name]
    if not isinstance(norm, WithInserted) or type(relu) is not nn.ReLU:
        return None
    excitation = norm._modules.get(EXCITATION)
    fusable = (
        type(excitation) is SquareExcitation
        and len(norm.deepsquare_inserted) == 1
        and parts.get("se") is None  # timm's blocks may have these two in between
        and parts.get("drop_path") is None
        and not torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        and not (is_watched(norm) or is_watched(excitation) or is_watched(relu))
    )
    return norm if fusable else None
