"""Models that are no plain classifiers: embeddings, several outputs, detection, segmentation, video."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import Block, copied_state, create, images, same_state, square_pooled
from torch import Tensor, nn

import deepsquare as ds


def kinds(model: nn.Module, shape: tuple[int, ...] | None = None) -> dict[str, int]:
    """The number of sites of each kind."""
    sites = ds.sites(model, shape)
    return {kind: len(sites.of_kind(kind)) for kind in ds.surgery.KINDS}


# Embeddings: the output is the pooled vector.


def torchvision_embedding() -> nn.Module:
    model: Any = create("resnet18")
    model.fc = nn.Identity()
    return model  # type: ignore[no-any-return]


def timm_embedding(name: str) -> nn.Module:
    model: Any = create(f"timm/{name}")
    model.reset_classifier(0)
    return model  # type: ignore[no-any-return]


class Head(nn.Module):
    """A block, a last layer, and a global average pooling behind which nothing is learned."""

    def __init__(self, *last: nn.Module) -> None:
        super().__init__()
        self.block = Block(3, 8, 2)
        self.last = nn.Sequential(*last)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(self.last(self.block(x))).flatten(1)
        return out


@pytest.mark.parametrize("embedding", [torchvision_embedding, lambda: timm_embedding("resnet18")])
@pytest.mark.parametrize(
    ("term", "by_hand"),
    [
        ("pooling", square_pooled),
        ("gem", lambda x: x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)),
        ("moment3", lambda x: x.pow(3).mean((2, 3))),
    ],
)
def test_the_pooling_of_an_embedding(
    embedding: Callable[[], nn.Module], term: str, by_hand: Callable[[Tensor], Tensor]
) -> None:
    x, base = images().double(), embedding().double().eval()
    maps: list[Tensor] = []
    base.get_submodule("layer4").register_forward_hook(lambda _, args, output: maps.append(output))
    base(x)
    equipped = ds.equip(embedding().double().eval(), term)
    torch.testing.assert_close(equipped(x), by_hand(maps[0]))


@pytest.mark.parametrize(
    "embedding",
    [
        torchvision_embedding,
        lambda: timm_embedding("test_convnext"),
        lambda: timm_embedding("mobilenetv3_small_050"),  # a 1×1 convolution follows its pooling
        lambda: timm_embedding("dm_nfnet_f0"),  # a 1×1 convolution without normalization precedes it
    ],
)
def test_an_embedding_has_a_pooling_and_no_logits(embedding: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = embedding()
    sites = ds.sites(model)
    assert len(sites.of_kind("pooling")) == 1
    assert (sites.classifier, sites.dropout) == ("", "")
    with pytest.raises(ValueError, match="no logits site for the term 'softmin': the output is an embedding"):
        ds.equip(model, "softmin")
    with pytest.raises(ValueError, match="has no fully connected layer to put dropout before"):
        ds.equip(model, "pooling", dropout=0.2)


def test_a_pooling_behind_the_classifier_is_no_site() -> None:
    classifier, features = Head(nn.Dropout(), nn.Conv2d(8, 5, 1), nn.ReLU()), Head(nn.Conv2d(8, 5, 3), nn.ReLU())
    normalized = Head(nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5), nn.ReLU())
    counts = [(kinds(m, (3, 16, 16))["pooling"], kinds(m, (3, 16, 16))["logits"]) for m in (classifier, features)]
    assert counts == [(0, 1), (1, 0)]
    assert kinds(normalized, (3, 16, 16))["pooling"] == 1
    assert "if these are the classes, set model.num_classes = 5" in ds.sites(normalized, (3, 16, 16)).missing["logits"]
    normalized.num_classes = 5  # type: ignore[assignment]
    assert kinds(normalized, (3, 16, 16))["logits"] == 1
    assert ds.sites(normalized, (3, 16, 16)).missing["pooling"] == (
        "its global average pooling comes after the classifier"
    )


def test_an_embedding_takes_no_pooling_that_returns_more_values() -> None:
    with pytest.raises(ValueError, match="not by one fully connected layer"):
        ds.equip(torchvision_embedding(), "bilinear(size=8)")


# Several outputs.


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(3, 8, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(8, 4)


class Probabilities(Features):
    """As a YOLO classifier: in eval mode (probabilities, logits), from a module of its own."""

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(self.pool(self.block(x)).flatten(1))
        return logits if self.training else (logits.softmax(1), logits)


class EmbeddingAndLogits(Features):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.pool(self.block(x)).flatten(1)
        return pooled, self.linear(pooled)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


class OutputDict(OrderedDict[str, Any]):
    """A class of its own, which torch's pytree does not open."""


class OutputObject(Features):
    def forward(self, x: Tensor) -> Output:
        maps = self.block(x)
        return Output(None, self.linear(self.pool(maps).flatten(1)), (maps,))


class OutputMapping(Features):
    def forward(self, x: Tensor) -> OutputDict:
        maps = self.block(x)
        return OutputDict(features=maps, logits=self.linear(self.pool(maps).flatten(1)))


class Nested(nn.Module):
    """The module that returns several tensors is inside."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3)
        self.head = head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.stem(x))


def logits_of(output: Any) -> Tensor:
    if isinstance(output, Output):
        return output.logits
    logits: Tensor = output["logits"] if isinstance(output, dict) else output[1]
    return logits


@pytest.mark.parametrize("network", [Probabilities, EmbeddingAndLogits, OutputObject, OutputMapping])
@pytest.mark.parametrize("nested", [False, True])
def test_of_several_outputs_the_logits_are_found(network: type[Features], nested: bool) -> None:
    torch.manual_seed(0)
    base = network().eval()
    model = Nested(base).eval() if nested else base
    x = images(size=16)
    before = logits_of(model(x))
    ds.equip(model, "softmin", input_shape=(3, 16, 16))
    torch.testing.assert_close(logits_of(model(x)), -before.square())
    if network is Probabilities:
        torch.testing.assert_close(model(x)[0], (-before.square()).softmax(1))
        assert torch.is_tensor(model.train()(x))
    ds.equip(ds.unequip(model), "pooling+excitation", input_shape=(3, 16, 16))
    output = model(x)
    torch.autograd.backward(logits_of(output).square().sum())
    assert all(p.grad is not None for key, p in model.named_parameters() if "deepsquare_" in key)


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1)])
def test_logits_are_before_a_softmax_at_the_end(last: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(3, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), last).eval()
    x = images(size=16)
    expected = last(-model[:4](x).square())
    ds.equip(model, "softmin", input_shape=(3, 16, 16))
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(ds.fold(model)(x), expected)


class TwoHeads(Features):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pooled = self.pool(self.block(x)).flatten(1)
        return {"kind": self.linear(pooled), "color": self.other(pooled)}


def test_two_classifiers_are_refused_for_softmin_only() -> None:
    with pytest.raises(ValueError, match=r"several of its outputs may be the logits, of shapes \(4,\), \(2,\) without"):
        ds.equip(TwoHeads(), "softmin", input_shape=(3, 16, 16))
    base, x = TwoHeads().eval(), images(size=16)
    pooled = square_pooled(base.block(x))
    output = ds.equip(base, "pooling", input_shape=(3, 16, 16))(x)
    torch.testing.assert_close(output["kind"], base.linear(pooled))
    torch.testing.assert_close(output["color"], base.other(pooled))


class MapAndLogits(Features):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.block(x)
        return maps, self.linear(maps.mean((2, 3)))


def test_a_map_that_is_returned_is_not_pooled() -> None:
    with pytest.raises(ValueError, match=r"no pooling site .* its pooling is not a module"):
        ds.equip(MapAndLogits(), "pooling", input_shape=(3, 16, 16))


def test_a_module_that_returns_no_tensor_cannot_be_named() -> None:
    with pytest.raises(ValueError, match=r"^head is not called by Nested's forward, or returns no tensor"):
        ds.equip(Nested(EmbeddingAndLogits()), "square(after='head')", input_shape=(3, 16, 16))


def test_auxiliary_outputs_in_training_mode() -> None:
    model = ds.equip(create("googlenet", num_classes=3, aux_logits=True), "pooling+softmin", input_shape=(3, 64, 64))
    output = model.train()(images())
    assert type(output).__name__ == "GoogLeNetOutputs"
    assert bool((output.logits <= 0).all())
    assert not bool((output.aux_logits1 <= 0).all())


# Models that need another input, or cannot be traced.


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("test_resnet", 1, 160), ("test_resnet", 3, 160), ("test_resnet", 4, 160), ("tresnet_m", 3, 224)],
)
def test_the_input_of_timms_networks(name: str, channels: int, size: int) -> None:
    with torch.device("meta"):
        model = create(f"timm/{name}", in_chans=channels)  # TResNet's first convolution reads 4×4 positions as channels
    assert ds.sites(model).input_shape == (channels, size, size)


def test_larger_images_are_tried_where_the_usual_ones_are_too_small() -> None:
    stem = nn.Conv2d(3, 8, 3, 64)
    model = nn.Sequential(stem, nn.Conv2d(8, 8, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    assert ds.sites(model).input_shape == (3, 320, 320)


class TwoInputs(Features):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.linear(self.pool(self.block(x)).flatten(1)) * scale
        return out


class DictInput(Features):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.linear(self.pool(self.block(x["image"])).flatten(1))
        return out


class Branches(Features):
    """As a detector, which selects boxes by their scores."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.block(x)
        out: Tensor = self.linear(self.pool(maps)[maps.mean((1, 2, 3)) > 0].flatten(1))
        return out


class Lock(Features):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            TwoInputs,
            r"missing 1 required .*\. If it takes anything else than one tensor, equip a part of it that takes",
        ),
        (DictInput, r"If it takes anything else than one tensor, equip a part of it that takes one$"),
        (Branches, r"^the forward of Branches cannot be traced, .*\(aten.nonzero.*\)\. .*: equip\(model.block, spec,"),
        (Lock, r"^Lock cannot be copied, .*Make copy.deepcopy\(model\) work, or equip the part of it that can"),
    ],
)
def test_what_cannot_be_traced_says_what_to_do(model: type[Features], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ds.equip(model(), "pooling")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [224, (3, 224.0, 224), "224"])
def test_an_input_shape_that_is_none_is_named(shape: Any) -> None:
    message = rf"^input_shape is {re.escape(repr(shape))}; expected \(channels, height, width\) as integers, without"
    for call in (ds.sites, ds.cost):
        with pytest.raises(TypeError, match=message):
            call(create("resnet18"), shape)


@pytest.mark.parametrize("spec", ["se", "gsop1", "isqrt_cov", "fisher", "ge_theta"])
def test_terms_for_maps_name_those_that_take_signals(spec: str) -> None:
    model = create("signal")
    before = copied_state(model)
    with pytest.raises(
        ValueError, match=rf"^the term {spec[:4]}.* gives .* terms take maps of any shape: pooling, soft"
    ):
        ds.equip(model, spec, input_shape=(2, 64))
    assert same_state(model, before)


def test_data_parallel_inside_a_model() -> None:
    features = nn.DataParallel(Block(3, 8, 2))
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    x = images(size=16)
    expected = -model[3](square_pooled(features(x))).square()
    torch.testing.assert_close(ds.equip(model, "pooling+softmin", input_shape=(3, 16, 16))(x), expected)


def test_a_model_without_weights_is_equipped_but_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = ds.create_model("resnet18", "excitation")
    with pytest.raises(ValueError, match=r"^ResNet has no weights to save: conv1.weight is on the meta device"):
        ds.save(model, tmp_path / "model.safetensors")
