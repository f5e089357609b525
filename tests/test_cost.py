"""What a model costs, against counts made by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepsquare as ds
from deepsquare.nn import EleSquare

TABLE_1_MACS = 16 * 16 * 32 * (9 * 3) + 8 * 8 * 64 * (9 * 32) + 4 * 4 * 128 * (9 * 64) + 128 * 10
# What the backward pass needs: the image, what each convolution and each ReLU of Table 1 writes, the pooled map.
TABLE_1_KEPT = 3 * 32 * 32 + 2 * (32 * 16 * 16 + 64 * 8 * 8 + 128 * 4 * 4) + 128
SMALL = (3, 64, 64)
# The two blocks of each stage of ResNet-18 on a 64×64 image: the side and the channels of what its branches write.
RESNET18_STAGES = [(16, 64), (8, 128), (4, 256), (2, 512)]
BRANCH_VALUES = sum(2 * side * side * channels for side, channels in RESNET18_STAGES)
BRANCH_CHANNELS = sum(2 * channels for _, channels in RESNET18_STAGES)


def added(name: str, spec: str, shape: tuple[int, ...]) -> dict[str, int]:
    with torch.device("meta"):
        base = ds.cost(ds.create_model(name), shape)
        return ds.cost(ds.create_model(name, spec), shape).added_to(base)


def test_resnet50() -> None:
    with torch.device("meta"):
        base = ds.cost(ds.create_model("resnet50"))
        equipped = {
            spec: ds.cost(ds.create_model("resnet50", spec)).added_to(base)
            for spec in ("pooling+excitation", "softmin", "pooling", "encoding")
        }
    assert base.parameters == 25_557_032
    assert base.macs == 4_089_184_256
    assert base.elementwise_muls == 0
    parameters = {spec: more["parameters"] for spec, more in equipped.items()}
    assert parameters == {"pooling+excitation": 16, "softmin": 1, "pooling": 0, "encoding": 0}
    assert {more["macs"] for more in equipped.values()} == {0}
    # The last map has 2048 channels of 7×7: a square of each value, and one of each channel's norm.
    assert equipped["pooling"]["elementwise_muls"] == 2048 * 7 * 7 + 2048
    assert equipped["pooling"]["activation_bytes"] == 0  # the map is kept anyway, by its ReLU


def test_vanilla_cnn() -> None:
    cost = ds.cost(ds.vanilla_cnn(), (3, 32, 32))
    assert cost.parameters == 94_762
    assert cost.macs == TABLE_1_MACS == 2_581_760
    assert cost.elementwise_muls == 0
    statistics = 2 * (32 + 64 + 128)  # batch normalisation keeps a mean and a deviation per channel, of the batch
    assert 4 * TABLE_1_KEPT <= cost.activation_bytes <= 4 * (TABLE_1_KEPT + statistics)


def test_the_vanilla_cnn_is_counted_at_its_own_size() -> None:
    assert ds.cost(ds.vanilla_cnn()).macs == TABLE_1_MACS


# For each spec: the products for one image, those of parameters alone (once a batch), and the values kept for backward.
COUNTS: dict[tuple[str, str], tuple[int, int, int]] = {
    ("vanilla_cnn", "pooling"): (128 * 4 * 4 + 128, 0, 0),
    ("vanilla_cnn", "square(after='layer1')"): (32 * 16 * 16, 0, 32 * 16 * 16),
    ("vanilla_cnn", "square(after='pool')"): (128, 0, 128),
    ("vanilla_cnn", "softmin(scale='none')"): (10, 0, 10),
    ("vanilla_cnn", "softmin"): (10 + 10, 1, 10 + 10),
    ("vanilla_cnn", "softmin(scale='channel')"): (10 + 10, 10, 10 + 10),
    ("resnet18", "encoding"): (BRANCH_VALUES, 0, BRANCH_VALUES),
    # G takes a square of each value and of each channel's norm; s is multiplied with each value; α² once a block.
    ("resnet18", "excitation"): (2 * BRANCH_VALUES + BRANCH_CHANNELS, 8, -1),
}


@pytest.mark.parametrize(("name", "spec"), COUNTS)
def test_what_is_added(name: str, spec: str) -> None:
    elementwise_muls, of_parameters, kept = COUNTS[name, spec]
    more = added(name, spec, (3, 32, 32) if name == "vanilla_cnn" else SMALL)
    assert more["macs"] == 0
    assert elementwise_muls <= more["elementwise_muls"] <= elementwise_muls + of_parameters
    if kept >= 0:
        assert 4 * kept <= more["activation_bytes"] <= 4 * (kept + of_parameters)
    else:  # the branch's output, and for each channel a handful of values on the way to s
        assert 4 * BRANCH_VALUES <= more["activation_bytes"] <= 4 * (BRANCH_VALUES + 8 * BRANCH_CHANNELS)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float16, 2), (torch.float64, 8)])
def test_two_linear_layers(dtype: torch.dtype, size: int) -> None:
    relu = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).to(dtype)
    assert ds.cost(relu, (4,)) == ds.Cost(
        parameters=4 * 3 + 3 + 3 * 2 + 2,
        macs=4 * 3 + 3 * 2,
        elementwise_muls=0,
        activation_bytes=size * (4 + 3),  # the input, and what ReLU writes: the second layer's input is the same tensor
    )
    square = nn.Sequential(nn.Linear(4, 3), EleSquare(), nn.Linear(3, 2)).to(dtype)
    more = ds.cost(square, (4,)).added_to(ds.cost(relu, (4,)))
    assert more == {
        "parameters": 0,
        "macs": 0,
        "elementwise_muls": 3,
        "activation_bytes": size * 3,
    }  # what it read, too


def test_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 3, stride=2, groups=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 5))
    cost = ds.cost(model, (2, 5, 5))
    assert cost.macs == 6 * 2 * 2 * 9 + 24 * 5  # each group sees one of the two channels
    assert cost.activation_bytes == 4 * (2 * 5 * 5 + 6 * 2 * 2)


def test_frozen_layers_keep_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert ds.cost(model, (4,)).activation_bytes == 4 * 3


def test_the_model_is_left_alone() -> None:
    model = ds.create_model("resnet18", "pooling+excitation+softmin", num_classes=3, dropout=0.5).eval()
    model.get_submodule("layer1").train()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    ds.cost(model, SMALL)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert int(model.get_buffer("bn1.num_batches_tracked")) == 0
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert all(p.grad is None and p.requires_grad and p.device.type == "cpu" for p in model.parameters())


def test_mode_and_device_do_not_matter() -> None:
    arguments: dict[str, Any] = {"num_classes": 3, "dropout": 0.5}
    real = ds.create_model("resnet18", "pooling+excitation", **arguments)
    with torch.device("meta"):
        hollow = ds.create_model("resnet18", "pooling+excitation", **arguments)
    assert ds.cost(real, SMALL) == ds.cost(copy.deepcopy(real).eval(), SMALL) == ds.cost(hollow, SMALL)
    assert {p.device.type for p in hollow.parameters()} == {"meta"}


def test_the_input_shape_is_guessed_or_given() -> None:
    with torch.device("meta"):
        model = ds.create_model("resnet18")
    assert ds.cost(model) == ds.cost(model, (3, 224, 224)) == ds.cost(model, [3, 224, 224])
    square, wide = (ds.cost(model, shape).macs - 512 * 1000 for shape in (SMALL, (3, 64, 128)))
    assert wide == 2 * square  # all but the fully connected layer goes with the area


@pytest.mark.parametrize("shape", [(1, 64, 64), (64, 64), (2, 3, 64, 64)])
def test_a_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = ds.create_model("resnet18")
    with pytest.raises(ValueError, match=r"ResNet could not be run on an input of shape") as caught:
        ds.cost(model, shape)
    assert str((2, *shape)) in str(caught.value)
    assert "input_shape=(channels, height, width)" in str(caught.value)


def test_a_module_that_multiplies_nothing_costs_nothing() -> None:
    assert ds.cost(nn.AdaptiveAvgPool2d(1), SMALL) == ds.Cost(0, 0, 0, 0)
