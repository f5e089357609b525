"""Networks beyond classifiers: the sites of each entry of ``docs/support.md``, and training with them."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.models import Block, copied_state, excited, images, same_state
from timm.utils.model import freeze_batch_norm_2d
from torch import Tensor, nn
from torchvision.models import detection, feature_extraction, resnet18, segmentation, video
from torchvision.models.detection.backbone_utils import mobilenet_backbone, resnet_fpn_backbone

import deepsquare as ds
from deepsquare.surgery.trace import tensors_in

ROOT = Path(__file__).parent.parent.parent
SCRIPT = importlib.util.spec_from_file_location("support_matrix", ROOT / "docs" / "support_matrix.py")
assert SCRIPT is not None
assert SCRIPT.loader is not None
support_matrix = importlib.util.module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(support_matrix)


def entry(name: str) -> Any:
    """The network of an entry, with random weights."""
    library, _, network = name.partition("/")
    network, _, argument = network.rstrip(")").partition("(")
    if library == "timm":
        kwargs: Any = {argument.split("=")[0]: argument.endswith("True")}
        return timm.create_model(network, **kwargs)
    if library == "transformers":
        transformers = pytest.importorskip(library, reason="transformers is optional")
        return transformers.ResNetForImageClassification(transformers.ResNetConfig())
    if library == "segmentation_models_pytorch":
        smp = pytest.importorskip(library, reason="segmentation-models-pytorch is optional")
        return getattr(smp, network)(argument, encoder_weights=None)
    if network == "create_feature_extractor":
        return feature_extraction.create_feature_extractor(resnet18(), ["layer2", "layer4"])
    module: Any = next(m for m in (detection, segmentation, video) if hasattr(m, network))
    return getattr(module, network)(**({} if module is video else {"weights": None, "weights_backbone": None}))


@pytest.mark.parametrize("name", support_matrix.BEYOND)
def test_the_sites_of_each_entry(name: str) -> None:
    part, expected = support_matrix.BEYOND[name]
    with torch.device("meta"):
        model = entry(name)
    sites = ds.sites(model.get_submodule(part))
    kinds = ("pooling", "logits", "branch_end", "last_spatial_conv")
    assert tuple(len(sites.of_kind(kind)) for kind in kinds) == expected  # type: ignore[arg-type]
    if part:
        with pytest.raises(
            ValueError, match=rf"depends on the values of its input .*: equip\(model.{part}, spec, input"
        ):
            ds.equip(model, "excitation")


def test_a_term_without_a_site_says_which_sites_there_are() -> None:
    with pytest.raises(ValueError, match=r"no pooling site for the term 'pooling': no global .* 8 branch_end"):
        ds.equip(resnet_fpn_backbone(backbone_name="resnet18", weights=None), "pooling", input_shape=(3, 64, 64))


def reference(model: nn.Module, sites: ds.surgery.Sites, alpha: Tensor) -> None:
    """Let a base model compute what the paper says, by hooks at the sites."""
    for site in sites.of_kind("branch_end"):
        spatial = tuple(range(2, len(site.shape) + 1))
        hook = lambda _, args, output, spatial=spatial: excited(output, alpha, spatial)  # noqa: E731
        model.get_submodule(site.path).register_forward_hook(hook)
    for site in sites.of_kind("last_spatial_conv"):
        model.get_submodule(site.path).register_forward_pre_hook(lambda _, args: (args[0] ** 2,))


NETWORKS = {
    "detection": lambda: resnet_fpn_backbone(backbone_name="resnet18", weights=None),  # with FrozenBatchNorm2d
    "mobilenet detection": lambda: mobilenet_backbone(backbone_name="mobilenet_v3_small", weights=None, fpn=True),
    "segmentation": lambda: segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None),
    "features_only": lambda: timm.create_model("resnet18", features_only=True, zero_init_last=False),
    "frozen by timm": lambda: freeze_batch_norm_2d(timm.create_model("mobilenetv3_small_050")),
    "Unet": lambda: entry("segmentation_models_pytorch/Unet(resnet18)"),
    "video": video.r3d_18,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_equipped_networks_compute_the_equations(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = NETWORKS[name]().double()
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    shape = (3, 4, 32, 32) if name == "video" else (3, 64, 64)
    x = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = copied_state(base)
    reference(base, ds.sites(base, shape), torch.tensor(0.5, dtype=torch.float64))
    ds.equip(model, "excitation(alpha=0.5)+encoding", input_shape=shape)
    model.load_state_dict(state, strict=False)
    assert [key for key in model.state_dict() if "deepsquare_" not in key] == list(state)
    for training in (True, False):
        networks = (ds.recalibrate_batchnorm(net, [x]).train(training) for net in (base, model))
        expected, actual = ([*tensors_in(net(x))] for net in networks)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        assert all(bool(tensor.isfinite().all()) for tensor in actual)
    torch.autograd.backward([tensor.square().mean() for tensor in actual])
    alphas = [p for key, p in model.named_parameters() if key.endswith("excitation.alpha")]
    assert len(alphas) == len(ds.sites(model).of_kind("branch_end")) > 1
    assert all(alpha.grad is not None and bool(alpha.grad.any()) for alpha in alphas)
    folded = ds.fold(model)
    torch.testing.assert_close([*tensors_in(folded(x))], actual, rtol=1e-7, atol=1e-7)
    if name != "video":  # whose convolutions have a class of their own
        assert not any("BatchNorm" in type(module).__name__ for module in folded.modules())
    ds.save(model, tmp_path / "model.safetensors")
    other = ds.equip(NETWORKS[name]().double(), "excitation(alpha=0.5)+encoding", input_shape=shape)
    ds.load_weights(other, tmp_path / "model.safetensors")
    assert same_state(other, copied_state(model))


def test_a_detector_trains_with_an_equipped_backbone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    model = detection.RetinaNet(backbone, num_classes=3, min_size=64, max_size=64)
    keys = list(model.state_dict())
    ds.equip(model.backbone, "excitation", input_shape=(3, 64, 64))
    assert [key for key in model.state_dict() if "deepsquare_" not in key] == keys
    target = {"boxes": torch.tensor([[5.0, 5, 40, 40]]), "labels": torch.tensor([1])}
    losses = model.train()([*images()], [target, target])
    torch.autograd.backward(list(losses.values()))
    alphas = [p for key, p in model.named_parameters() if "deepsquare_" in key]
    assert len(alphas) == 8
    assert all(
        alpha.grad is not None and bool(alpha.grad.isfinite().all()) and bool(alpha.grad.any()) for alpha in alphas
    )
    ds.unequip(model.backbone)
    assert list(model.state_dict()) == keys


class ProjectedPool(nn.Module):
    """The pooling of pytorchvideo's X3D: a fixed window between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_conv, self.act = nn.Conv3d(8, 16, 1), nn.ReLU()
        self.pool, self.post_conv = nn.AvgPool3d(4, stride=1), nn.Conv3d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.post_conv(self.pool(self.act(self.pre_conv(x)))).relu()
        return out


class X3D(nn.Module):
    """A block and the head of X3D: in eval mode a softmax, then a mean over the positions that the window left."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.pool, self.proj = Block(3, 8, 2, 3), ProjectedPool(), nn.Linear(32, 5)
        self.activation, self.output_pool = nn.Softmax(1), nn.AdaptiveAvgPool3d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.pool(x if x.shape[1] == 8 else self.block(x)).permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
        out: Tensor = self.output_pool(x if self.training else self.activation(x)).flatten(1)
        return out


@pytest.mark.parametrize("training", [True, False])
def test_the_head_of_x3d(training: bool) -> None:
    torch.manual_seed(0)
    model = X3D().double().train(training)
    clip = torch.randn(2, 3, 8, 8, 8, dtype=torch.float64)
    pooled = model.pool.pre_conv(model.block(clip)).relu().square().mean((2, 3, 4), keepdim=True)
    logits = -model.proj(model.pool.post_conv(pooled).relu().flatten(1)).square()
    ds.equip(model, "pooling+softmin", input_shape=(3, 8, 8, 8))
    torch.testing.assert_close(model(clip), logits if training else logits.softmax(1))
    # Several positions are left of a larger clip, so the window is no global average pooling.
    with pytest.raises(ValueError, match="global average pooling comes after the classifier"):
        ds.equip(X3D(), "pooling", input_shape=(3, 16, 16, 16))
    with pytest.raises(ValueError, match=r"input_shape=\(channels, frames, height, width\)"):
        ds.equip(X3D(), "pooling", input_shape=(3, 4, 4, 4))
