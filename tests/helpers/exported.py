"""A model to export, and its preprocessing."""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import ShuffleNetV2

import deepsquare as ds
from deepsquare.preprocessing import Preprocessing

IMAGES = Preprocessing(("blue", "green", "red"), 64, 72)


def trained(name: str, spec: str, size: int = 64) -> tuple[nn.Module, Tensor]:
    """A model whose batch normalization has the statistics of its input, as after training, and six images."""
    torch.manual_seed(0)
    images = torch.randn(64, 3, size, size)
    if name == "small shufflenet":  # a unit with stride 2 and one with a channel split
        network = ShuffleNetV2([1, 2, 1], [8, 16, 32, 64, 64], num_classes=3)
        equipped = ds.equip(network, spec, input_shape=(3, size, size))
        return ds.recalibrate_batchnorm(equipped, [images]).eval(), images[:6]
    options: dict[str, Any] = {"zero_init_last": False} if name.startswith("timm/") else {}
    model = ds.create_model(name, spec, num_classes=3, input_shape=(3, size, size), **options)
    return ds.recalibrate_batchnorm(model, [images]).eval(), images[:6]
