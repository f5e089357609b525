"""Where the sites of a model are: expected places written down from the architectures' own papers and sources."""

from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.models import Block, FunctionalBlock, attached, copied_state, create, same_state
from torch import Tensor, nn
from torch.nn import functional as F

import deepsquare as ds
from deepsquare.surgery import Kind, Sites

Place = tuple[str, str, tuple[int, ...]]  # position, path, shape


def built(name: str) -> nn.Module:
    """On the meta device: finding sites computes nothing."""
    with torch.device("meta"):
        return create(name)


def places(sites: Sites, kind: Kind) -> list[Place]:
    return [(site.position, site.path, site.shape) for site in sites.of_kind(kind)]


def one(position: str, path: str, *shape: int) -> list[Place]:
    return [(position, path, shape)]


def stages(pattern: str, lengths: Sequence[int], first: int = 1) -> list[str]:
    return [pattern.format(s=s, i=i) for s, length in enumerate(lengths, first) for i in range(length)]


RESNET50, RESNET18, SHUFFLE = (3, 4, 6, 3), (2, 2, 2, 2), (4, 8, 4)
# Dense layers count from 1; of MobileNetV2's bottlenecks those of stride 1 with as many channels out as in have a
# shortcut: each repetition within a stage of (1, 2, 3, 4, 3, 3, 1), whose blocks are features.1 to features.17.
DENSE = [f"features.denseblock{s}.denselayer{i + 1}" for s, n in enumerate((6, 12, 24, 16), 1) for i in range(n)]
MOBILE = [f"features.{i}.conv" for i in (3, 5, 6, 8, 9, 10, 12, 13, 15, 16)]
CONVNEXT = [f"features.{s}.{i}" for s, n in ((1, 3), (3, 3), (5, 9), (7, 3)) for i in range(n)]
# Res2Net: three 3×3 convolutions, one after the other, but side by side in the first block of a stage.
RES2 = [
    f"layer{s}.{i}.convs.{c}" for s, n in enumerate(RESNET50, 1) for i in range(n) for c in (0, 1, 2) if c == 2 or not i
]

# name: pooling, logits, branch ends, last spatial convolutions, classifier, dropout before it
EXPECTED: dict[str, tuple[list[Place], list[Place], list[str], list[str], str, str]] = {
    "resnet50": (
        one("input", "avgpool", 2048, 7, 7), one("output", "fc", 1000),
        stages("layer{s}.{i}.bn3", RESNET50), stages("layer{s}.{i}.conv2", RESNET50), "fc", "",
    ),
    "resnet18": (
        one("input", "avgpool", 512, 7, 7), one("output", "fc", 1000),
        stages("layer{s}.{i}.bn2", RESNET18), stages("layer{s}.{i}.conv2", RESNET18), "fc", "",
    ),
    "shufflenet_v2_x1_0": (
        one("output", "conv5.2", 1024, 7, 7), one("output", "fc", 1000),
        stages("stage{s}.{i}.branch2.7", SHUFFLE, 2), stages("stage{s}.{i}.branch2.3", SHUFFLE, 2), "fc", "",
    ),
    "densenet121": (
        one("output", "features.norm5", 1024, 7, 7), one("output", "classifier", 1000),
        [f"{layer}.conv2" for layer in DENSE], [f"{layer}.conv2" for layer in DENSE], "classifier", "",
    ),
    "mobilenet_v2": (
        one("output", "features.18.2", 1280, 7, 7), one("output", "classifier.1", 1000),
        [f"{block}.3" for block in MOBILE], [f"{block}.1.0" for block in MOBILE], "classifier.1", "classifier.0",
    ),
    "squeezenet1_1": ([], one("output", "classifier.3", 1000, 1, 1), [], [], "classifier.1", "classifier.0"),
    "vgg11": ([], one("output", "classifier.6", 1000), [], [], "classifier.6", "classifier.5"),
    "googlenet": (one("input", "avgpool", 1024, 7, 7), one("output", "fc", 1000), [], [], "fc", "dropout"),
    "inception_v3": (one("input", "avgpool", 2048, 5, 5), one("output", "fc", 1000), [], [], "fc", "dropout"),
    # The layer scale is the addition's other factor: the branch ends before it, in channels-first order (block.6).
    "convnext_tiny": (
        one("input", "avgpool", 768, 7, 7), one("output", "classifier.2", 1000),
        [f"{block}.block.6" for block in CONVNEXT], [f"{block}.block.0" for block in CONVNEXT], "classifier.2", "",
    ),
    "timm/resnet18": (
        one("input", "global_pool.pool", 512, 7, 7), one("output", "fc", 1000),
        stages("layer{s}.{i}.bn2", RESNET18), stages("layer{s}.{i}.conv2", RESNET18), "fc", "",
    ),
    # The outer addition is the block's, not those between its steps.
    "timm/res2net50_26w_4s": (
        one("input", "global_pool.pool", 2048, 7, 7), one("output", "fc", 1000),
        stages("layer{s}.{i}.bn3", RESNET50), RES2, "fc", "",
    ),
    # The inner additions are the blocks', not the concatenation around a cross-stage branch.
    "timm/cspresnet50": (
        one("input", "head.global_pool.pool", 1024, 8, 8), one("output", "head.fc", 1000),
        stages("stages.{s}.blocks.{i}.conv3.bn", (3, 3, 5, 2), 0),
        stages("stages.{s}.blocks.{i}.conv2.conv", (3, 3, 5, 2), 0), "head.fc", "head.drop",
    ),
    # Branches without a nonlinearity are one convolution, written as several.
    "timm/repvgg_a0": (
        one("input", "head.global_pool.pool", 1280, 7, 7), one("output", "head.fc", 1000), [], [], "head.fc",
        "head.drop",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_the_sites_are_those_of_the_architecture(name: str) -> None:
    pooling, logits, ends, convs, classifier, dropout = EXPECTED[name]
    sites = ds.sites(built(name))
    assert places(sites, "pooling") == pooling
    assert places(sites, "logits") == logits
    assert [(s.position, s.path) for s in sites.of_kind("branch_end")] == [("output", path) for path in ends]
    assert [(s.position, s.path) for s in sites.of_kind("last_spatial_conv")] == [("input", path) for path in convs]
    assert (sites.classifier, sites.dropout) == (classifier, dropout)
    assert set(sites.missing) == {kind for kind in ds.surgery.KINDS if not sites.of_kind(kind)}
    for site in sites:
        assert (site.channel_dim, site.keeps_size, site.term) == (1, False, "")
        assert site.relu_first == (name == "densenet121" and site.kind == "pooling")
        assert site.block == "" or site.path.startswith(site.block + ".")


def test_shapes_and_channels_at_the_branch_ends() -> None:
    sites = ds.sites(built("resnet50"), input_shape=(3, 64, 96))
    per_stage = [(256, 16, 24), (512, 8, 12), (1024, 4, 6), (2048, 2, 3)]
    expected = [shape for shape, n in zip(per_stage, RESNET50, strict=True) for _ in range(n)]
    assert [site.shape for site in sites.of_kind("branch_end")] == expected
    assert [site.channels for site in sites.of_kind("branch_end")] == [shape[0] for shape in expected]
    assert [site.block for site in sites.of_kind("branch_end")] == stages("layer{s}.{i}", RESNET50)
    assert sites.of_kind("logits")[0].channels == 1000


def test_ghostnet_ends_its_branches_before_the_addition() -> None:
    sites = ds.sites(built("timm/ghostnet_050"))
    ends = [site.path for site in sites.of_kind("branch_end")]
    assert len(ends) == 16  # the concatenations inside its ghost modules are no blocks of their own
    assert all(path.startswith("blocks.") and path.endswith(".ghost2") for path in ends)


def test_channels_last_inside_a_block() -> None:
    sites = ds.sites(built("timm/test_convnext"))
    blocks = stages("stages.{s}.blocks.{i}", (1, 2, 4, 2), 0)
    ends = sites.of_kind("branch_end")
    assert [site.path for site in ends] == [f"{block}.mlp.fc2" for block in blocks]
    assert {site.channel_dim for site in ends} == {3}
    assert [site.channels for site in ends] == [24, 32, 32, 48, 48, 48, 48, 64, 64]
    assert {site.channel_dim for site in sites.of_kind("last_spatial_conv")} == {1}
    pooling = ds.sites(built("timm/test_mambaout")).of_kind("pooling")[0]  # here the whole network is channels last
    assert (pooling.path, pooling.position, pooling.channel_dim, pooling.channels) == ("head", "input", 3, 64)


def test_the_reasons_why_a_kind_is_missing() -> None:
    squeezenet, vgg = ds.sites(built("squeezenet1_1")), ds.sites(built("vgg11"))
    assert "after the classifier" in squeezenet.missing["pooling"]
    assert "no global average pooling" in vgg.missing["pooling"]
    for kind in ("branch_end", "last_spatial_conv"):
        assert "no building block" in vgg.missing[kind]
    assert vgg.missing["pooling"] in str(vgg)
    assert vgg.summary() == "0 pooling, 1 logits, 0 branch_end, 0 last_spatial_conv"


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "timm/vit_tiny_patch16_224"])
def test_transformers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"Transformer is not a CNN: .*12 attention layers.*CNNs only"):
        ds.sites(built(name))


# Networks of a user's own.


# The last block's ReLU is functional, or a module that runs twice: the block itself is what can be attached to.
@pytest.mark.parametrize("block", [FunctionalBlock, Block])
def test_a_fixed_pooling_window_keeps_the_size(block: type[Block]) -> None:
    sites = ds.sites(create("cifar", block=block), input_shape=(3, 32, 32))
    (pooling,) = sites.of_kind("pooling")
    assert (pooling.position, pooling.path, pooling.shape) == ("output", "layer2.1", (32, 4, 4))
    assert pooling.keeps_size
    assert not pooling.relu_first
    blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert [site.path for site in sites.of_kind("branch_end")] == [f"{block}.bn2" for block in blocks]
    assert [site.path for site in sites.of_kind("last_spatial_conv")] == [f"{block}.conv2" for block in blocks]


def test_an_input_that_the_model_cannot_take_is_explained() -> None:
    with pytest.raises(ValueError, match=r"CifarResNet could not be run .*\(2, 3, 224, 224\).*input_shape=\(channels"):
        ds.sites(create("cifar"), (3, 224, 224))
    with pytest.raises(ValueError, match=r"MLP has no convolution"):
        ds.sites(type("MLP", (nn.Linear,), {})(3, 4))


@pytest.mark.parametrize(("name", "shape", "size"), [("signal", (2, 40), (20,)), ("volume", (2, 4, 6, 8), (2, 3, 4))])
def test_signals_and_volumes(name: str, shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    sites = ds.sites(create(name), input_shape=shape)
    assert places(sites, "pooling") == one("input", "pool", 8, *size)
    assert places(sites, "logits") == one("output", "fc", 5)
    assert places(sites, "branch_end") == [
        ("output", "block1.bn2", (6, *shape[1:])),
        ("output", "block2.bn2", (8, *size)),
    ]
    assert [site.path for site in sites.of_kind("last_spatial_conv")] == ["block1.conv2", "block2.conv2"]


def test_the_guessed_input_of_a_signal_network() -> None:
    assert ds.sites(create("signal")).of_kind("branch_end")[0].shape == (6, 1024)


class EndsInSharedReLU(Block):
    """Nothing can be attached between the branch's last ReLU, which also stands elsewhere, and the addition."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return out.add(self.shortcut(x))


class EndsInFunctionalReLU(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))).add(self.shortcut(x))


class SharedConvolution(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(self.relu(self.conv2(self.relu(self.conv1(x))))))
        return out.add(self.shortcut(x))


def network(block: nn.Module, head: bool = True) -> nn.Module:
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)] if head else []
    return nn.Sequential(block, nn.ReLU(), *tail)


@pytest.mark.parametrize("block", [EndsInSharedReLU, EndsInFunctionalReLU])
def test_a_branch_that_ends_in_no_module_of_its_own_is_refused(block: Callable[[int, int, int], nn.Module]) -> None:
    model = network(block(3, 8, 1))
    sites = ds.sites(model, input_shape=(3, 16, 16))
    assert places(sites, "last_spatial_conv") == one("input", "0.conv2", 8, 16, 16)
    with pytest.raises(ValueError, match=r"'excitation': the main branch of block 0 ends in relu.*make that"):
        ds.equip(model, "excitation", input_shape=(3, 16, 16))


def test_a_convolution_used_twice_is_no_place_for_encoding() -> None:
    model = network(SharedConvolution(3, 8, 1))
    assert places(ds.sites(model, input_shape=(3, 16, 16)), "branch_end") == one("output", "0.bn2", 8, 16, 16)
    with pytest.raises(
        ValueError, match=r"'encoding': the last spatial convolution of block 0 is not a module .* once"
    ):
        ds.equip(model, "encoding", input_shape=(3, 16, 16))


def test_a_model_without_logits() -> None:
    sites = ds.sites(network(Block(3, 8, 1), head=False), input_shape=(3, 16, 16))
    assert sites.missing["logits"] == "the output has shape (N, 8, 16, 16), not one value per class"
    assert "pooling" in sites.missing
    assert places(sites, "branch_end") == one("output", "0.bn2", 8, 16, 16)


def test_blocks_in_the_models_own_forward() -> None:
    sites = ds.sites(create("inline"))
    assert places(sites, "branch_end") == one("output", "bn2", 8, 224, 224)
    assert "pooling is not a module, and its input (computed by add)" in sites.missing["pooling"]


@pytest.mark.parametrize("training", [True, False])
def test_looking_leaves_the_model_as_it_is(training: bool) -> None:
    model = create("resnet18", num_classes=4).train(training)
    bn = model.get_submodule("layer1").eval()  # one part in another mode
    bn.register_forward_hook(lambda *_: None)
    before, modes = copied_state(model), [m.training for m in model.modules()]
    ds.sites(model)
    assert same_state(model, before)
    assert [m.training for m in model.modules()] == modes
    assert attached(model) == 1
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_failed_look_leaves_no_hooks_behind() -> None:
    model = create("cifar").train()
    with pytest.raises(ValueError, match="could not be run"):
        ds.sites(model, input_shape=(5, 32, 32))
    assert model.training
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_equipped_sites_name_their_words() -> None:
    model = ds.equip(built("resnet18"), "pooling+excitation(alpha=0.5)+square(after='conv1')")
    terms = {site.path: site.term for site in ds.sites(model) if site.term}
    ends = {f"{path}": "excitation(alpha=0.5)" for path in stages("layer{s}.{i}.bn2", RESNET18)}
    assert terms == {"avgpool": "pooling", "conv1": "square(after='conv1')", **ends}
    assert [site.term for site in ds.sites(model).of_kind("logits")] == [""]
    assert "512×7×7" in str(ds.sites(model))


def test_a_branch_that_serves_an_addition_and_a_concatenation_is_one_site() -> None:
    sites = ds.sites(create("timm/dpn48b"))
    paths = [site.path for site in sites.of_kind("last_spatial_conv")]
    assert len(set(paths)) == len(paths) == 16
