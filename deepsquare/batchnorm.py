"""Batch normalization whose running statistics do not fit the model: computed anew from data."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepsquare.surgery import unwrap
from deepsquare.surgery.inputs import float_tensor

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def recalibrate_batchnorm(model: Model, batches: Iterable[Tensor | Sequence[Tensor]]) -> Model:
    """Set the running statistics of batch normalization to their mean over ``batches``, in place; returns ``model``.

    Squares amplify the error of running statistics that lag behind the weights, are of a model without the squares, or
    are still those of initialization: there a deep network with Square-Encoding overflows in eval mode.

    Args:
        model: its batch normalization (also ``SyncBatchNorm``) runs in training mode, all else, as dropout, in eval
            mode. Modes and momentum are restored. Layers without running statistics or with frozen ones do not change.
        batches: image tensors, or tuples that start with one, such as those of a ``DataLoader``; moved to the model's
            device. A few thousand training images suffice.
    """
    unwrap(model)  # refuses what is no model
    if isinstance(batches, Tensor):
        raise TypeError("batches is one tensor; expected an iterable of batches, as [images] or a DataLoader")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    before = [(norm, norm.momentum, [b.clone() for b in norm.buffers(recurse=False)]) for norm in norms]
    modes = [(module, module.training) for module in model.modules()]
    device, empty, complete = float_tensor(model).device, True, False
    try:
        model.eval()
        for norm in norms:
            norm.train(True).reset_running_stats()
            norm.momentum = None  # the cumulative average
        for batch in batches:
            model(_images_of(batch).to(device))
            empty = False
        complete = not empty
        broken = [norm for norm in norms if not all(bool(b.isfinite().all()) for b in norm.buffers(recurse=False))]
        if broken:
            complete = False
            name = next(name for name, module in model.named_modules() if module is broken[0])
            raise ValueError(
                f"the statistics of {len(broken)} layers, first {name}, are not finite with these batches: an image or "
                "an activation overflows; the model keeps its old statistics"
            )
    finally:
        for module, training in modes:
            module.training = training
        for norm, momentum, statistics in before:
            norm.momentum = momentum
            if not complete or not norm.num_batches_tracked:  # an error, or a layer that only training calls
                for buffer, value in zip(norm.buffers(recurse=False), statistics, strict=True):
                    buffer.copy_(value)
    if not complete:
        raise ValueError("batches is empty; recalibration needs at least one batch")
    return model


def _images_of(batch: Tensor | Sequence[Tensor]) -> Tensor:
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if not isinstance(first, Tensor):
        raise TypeError(
            f"a batch is a {type(batch).__name__}; expected a tensor of images, or a tuple or list that starts with one"
        )
    if not first.is_floating_point():
        raise TypeError(f"the images are of type {first.dtype}; expected floating point, normalized as for training")
    return first
