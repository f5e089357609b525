"""Models by name: torchvision's, timm's and the paper's vanilla CNN, equipped by a spec."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import deepsquare._torchvision  # noqa: F401  (before torchvision)
from deepsquare.surgery import equip, equip_record


@dataclass(frozen=True)
class Network:
    """A base model by name, and the spec that it is equipped with."""

    model: str
    spec: str = ""

    @property
    def name(self) -> str:
        """As in ``resnet18+pooling``."""
        return f"{self.model}+{self.spec}" if self.spec else self.model


def _networks(model: str, *specs: str) -> list[Network]:
    return [Network(model), *(Network(model, spec) for spec in specs)]


NETWORKS: tuple[Network, ...] = (
    *_networks(  # Table 4
        "resnet18",
        "pooling",
        "softmin",
        "excitation",
        "encoding",
        "pooling+excitation",
        "pooling+encoding",
        "pooling+excitation+encoding",
    ),
    *_networks("resnet50", "pooling", "softmin", "encoding", "pooling+excitation"),  # Table 5
    *_networks("shufflenet_v2_x1_0", "pooling", "softmin", "encoding", "pooling+excitation"),  # Table 7
    *_networks("shufflenet_v2_x0_5", "pooling"),
)
"""The networks that the paper trains on ImageNet, in the order of its tables."""


# They say where weights come from. A checkpoint has its own, so it neither stores nor obeys them.
WEIGHT_KWARGS = ("weights", "pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


@dataclass(frozen=True)
class ModelConfig:
    """How :func:`create_model` built a model; kept on the model as ``deepsquare_config`` and in its checkpoints."""

    name: str
    kwargs: dict[str, Any]


class ConvLayer(nn.Module):
    """A layer of Table 1: 3×3 convolution of stride 2, batch normalisation, ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) → (N, out_channels, H/2, W/2)."""
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


class VanillaCNN(nn.Module):
    """The vanilla CNN of Table 1, for 32×32 images.

    The placements of Table 2 are specs: position ``i_j`` for i < 3 is ``square(after='layer<i>')``, ``3_4`` is
    ``pooling``, ``4_5`` is ``square(after='pool')`` and ``5_`` is ``softmin`` with its options.
    """

    pretrained_cfg = {"input_size": (3, 32, 32)}  # noqa: RUF012  # as timm's models say what they take

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = ConvLayer(3, 32)
        self.layer2 = ConvLayer(32, 64)
        self.layer3 = ConvLayer(64, 128)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 32, 32) → (N, num_classes)."""
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(self.pool(x).flatten(1))
        return out


def vanilla_cnn(num_classes: int = 10) -> VanillaCNN:
    """The vanilla CNN of Table 1."""
    return VanillaCNN(num_classes)


def create_model(
    name: str,
    spec: str = "",
    *,
    dropout: float | None = None,
    input_shape: Sequence[int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a model by name and equip it.

    Args:
        name: ``vanilla_cnn`` or a name of torchvision or timm; ``torchvision/NAME`` and ``timm/NAME`` say which zoo.
        spec: words joined by ``+``; empty for the base model.
        dropout: ratio before the last fully connected layer, see :func:`deepsquare.equip`.
        input_shape: shape of one input without the batch, if not the model's usual one; GE-θ is built for it.
        arguments: for the zoo's own builder (``num_classes``; torchvision's ``weights``, timm's ``pretrained``, …).
    """
    zoo, builder = _find(name)
    try:
        model = builder(**kwargs)
    except (TypeError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{zoo or 'deepsquare'}'s {name} could not be built with {kwargs}: {error}") from error
    if equip_record(model) is not None and not spec and dropout is None:
        return model  # one of timm's registered names, which are equipped already
    stored = {key: value for key, value in kwargs.items() if key not in WEIGHT_KWARGS}
    if zoo == "torchvision":
        # Set by torchvision itself when it loads weights; and whatever is loaded needs no slow initialisation.
        stored |= {key: getattr(model, key) for key in ("transform_input", "aux_logits") if hasattr(model, key)}
        if "init_weights" in inspect.signature(type(model)).parameters:
            stored["init_weights"] = False
    config = ModelConfig(f"{zoo}/{name.split('/')[-1]}" if zoo else name, stored)
    model.deepsquare_config = config  # type: ignore[assignment]  # a plain attribute, no submodule
    return equip(model, spec, dropout=dropout, input_shape=input_shape)


def _torchvision_names() -> list[str]:
    import torchvision

    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _timm_names() -> list[str]:
    if importlib.util.find_spec("timm") is None:
        return []
    import timm

    names: list[str] = timm.list_models()
    return names


def _torchvision_builder(name: str) -> Callable[..., nn.Module]:
    import torchvision

    builder: Callable[..., nn.Module] = torchvision.models.get_model_builder(name)
    return builder


def _timm_builder(name: str) -> Callable[..., nn.Module]:
    import timm

    def build(**kwargs: Any) -> nn.Module:
        model: nn.Module = timm.create_model(name, **kwargs)
        return model

    return build


def _find(name: str) -> tuple[str, Callable[..., nn.Module]]:
    """The zoo that has ``name`` and what builds the model."""
    if not isinstance(name, str):
        raise TypeError(f"a model is created by its name, got {name!r}; use deepsquare.equip for a model of your own")
    if name == "vanilla_cnn":
        return "", vanilla_cnn
    zoos = {"torchvision": _torchvision_names(), "timm": _timm_names()}
    zoo, _, bare = name.rpartition("/")
    if zoo and zoo not in zoos:
        raise ValueError(f"unknown zoo {zoo!r} in {name!r}; the zoos are torchvision and timm")
    untagged = {"torchvision": bare, "timm": bare.split(".")[0]}  # timm's names may end in the tag of some weights
    holders = [z for z, names in zoos.items() if untagged[z] in names and zoo in ("", z)]
    if not holders:
        known = list(dict.fromkeys([*zoos["torchvision"], *zoos["timm"], "vanilla_cnn"] if not zoo else zoos[zoo]))
        close = difflib.get_close_matches(bare.lower(), known, n=4) or known[:4]
        hint = "" if zoos["timm"] else " (timm is not installed: pip install 'deepsquare[timm]')"
        raise ValueError(f"no model named {name!r}; the nearest names are {', '.join(close)}{hint}")
    if len(holders) == 2 and not _same_network(bare):
        raise ValueError(
            f"{name!r} names different networks in torchvision and in timm; say which: 'torchvision/{bare}' or "
            f"'timm/{bare}'"
        )
    build = _torchvision_builder if holders[0] == "torchvision" else _timm_builder
    return holders[0], build(bare)


@cache
def _same_network(name: str) -> bool:
    """Whether torchvision's and timm's model of this name have the same parameters, so that either will do."""
    shapes = []
    for build in (_torchvision_builder(name), _timm_builder(name)):
        with torch.device("meta"):
            shapes.append({key: value.shape for key, value in build().state_dict().items()})
    return shapes[0] == shapes[1]
