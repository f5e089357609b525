"""Models by name: torchvision's, timm's and the paper's vanilla CNN, equipped by a spec."""

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare._dry_run import DryRun
from deepsquare.surgery import Init, equip, equip_record


@dataclass(frozen=True)
class Network:
    """A base model by name, and the spec that it is equipped with."""

    model: str
    spec: str = ""

    @property
    def name(self) -> str:
        """As in ``resnet18+pooling``."""
        return f"{self.model}+{self.spec}" if self.spec else self.model


_COMBINED = ("pooling+excitation", "pooling+encoding", "pooling+excitation+encoding")
_SPECS: dict[str, tuple[str, ...]] = {
    "resnet18": ("", "pooling", "softmin", "excitation", "encoding", *_COMBINED),  # Table 4
    "resnet50": ("", "pooling", "softmin", "encoding", "pooling+excitation"),  # Table 5
    "shufflenet_v2_x1_0": ("", "pooling", "softmin", "encoding", "pooling+excitation"),  # Table 7
    "shufflenet_v2_x0_5": ("", "pooling"),
}
NETWORKS: tuple[Network, ...] = tuple(Network(model, spec) for model, specs in _SPECS.items() for spec in specs)
"""The networks that the paper trains on ImageNet, in the order of its tables."""


# Where weights come from. A checkpoint holds the weights, so it does not store these arguments.
WEIGHT_KWARGS = ("weights", "pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


@dataclass(frozen=True)
class ModelConfig:
    """How :func:`create_model` built a model; kept on the model as ``deepsquare_config`` and in its checkpoints."""

    name: str
    kwargs: dict[str, Any]


class ConvLayer(nn.Module):
    """A layer of Table 1: 3×3 convolution of stride 2, batch normalisation, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) → (N, out_channels, H/stride, W/stride)."""
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


class VanillaCNN(nn.Module):
    """The vanilla CNN of Table 1, for 32×32 images.

    The rows of Table 2 are specs: position ``i_j`` for i < 3 is ``square(after='layer<i>')``, ``3_4`` is
    ``pooling``, ``4_5`` is ``square(after='pool')`` and ``5_`` is ``softmin`` with its options.
    """

    pretrained_cfg = {"input_size": (3, 32, 32)}  # noqa: RUF012  # the input size, as in timm's models

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
    init: Init = "paper",
    dropout: float | None = None,
    input_shape: Sequence[int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a model by name and equip it.

    Args:
        name: ``vanilla_cnn`` or a name of torchvision or timm; ``torchvision/NAME`` or ``timm/NAME`` for one of them.
        spec: terms joined by ``+``; empty for the base model.
        init: how the modules start, see :func:`deepsquare.equip`.
        dropout: ratio before the last fully connected layer, see :func:`deepsquare.equip`.
        input_shape: shape of one input without the batch, if not the model's default; GE-θ is built for it.
        kwargs: passed to the library's builder (``num_classes``; torchvision's ``weights``, timm's ``pretrained``, …).
    """
    return _equip(_build(name, kwargs), spec, init=init, dropout=dropout, input_shape=input_shape)


def _equip(model: nn.Module, spec: str, *, dropout: float | None, **options: Any) -> nn.Module:
    """Equip a model that was built by name, unless its name says how it is equipped."""
    if equip_record(model) is not None and not spec and dropout is None:
        return model
    return equip(model, spec, dropout=dropout, **options)


def create_on_meta(
    name: str,
    spec: str,
    *,
    max_calls: int,
    init: Init = "paper",
    dropout: float | None = None,
    input_shape: Sequence[int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """As :func:`create_model`, without the memory of the model; an error after ``max_calls`` calls of torch."""
    with torch.device("meta"):
        with DryRun(max_calls):
            model = _build(name, kwargs).to("meta")
        return _equip(model, spec, init=init, dropout=dropout, input_shape=input_shape)


def _build(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """The base model, with its config; any error of the library's builder becomes one that names the model."""
    library, builder = find_builder(name)
    try:
        model = builder(**kwargs)
    except (OSError, ImportError, MemoryError):  # of weights that are fetched, and of the machine
        raise
    except Exception as error:  # builders fail in any way on kwargs that they do not check
        if isinstance(error, KeyError) and library == "torchvision" and error.args == (kwargs.get("weights"),):
            from torchvision.models import get_model_weights

            known = ", ".join(get_model_weights(name.split("/")[-1]).__members__)
            raise ValueError(f"{name} has no weights {error}; torchvision has {known}") from None
        kind, bare = TypeError if isinstance(error, TypeError) else ValueError, name.split("/")[-1]
        hint = ""
        if library == "torchvision" and kind is TypeError and bare in _libraries()["timm"][0]:
            hint = f". timm's network takes other arguments: 'timm/{bare}'"
        elif "in_chans" in kwargs:
            hint = ". Build the model without in_chans, replace its first convolution, then call deepsquare.equip"
        reason = str(error).partition("\n")[0] or repr(error)  # torch may add a stack of C++
        raise kind(f"{library or 'deepsquare'}'s {name} could not be built with {kwargs}: {reason}{hint}") from error
    if equip_record(model) is not None:
        return model  # a name of deepsquare.timm_models, which is equipped already
    stored = {key: value for key, value in kwargs.items() if key not in WEIGHT_KWARGS}
    if library == "torchvision":
        # Set by torchvision itself when it loads weights; and loaded weights need no slow initialization.
        stored |= {key: getattr(model, key) for key in ("transform_input", "aux_logits") if hasattr(model, key)}
        if "init_weights" in inspect.signature(type(model)).parameters:
            stored["init_weights"] = False
    config = ModelConfig(f"{library}/{name.split('/')[-1]}" if library else name, stored)
    model.deepsquare_config = config  # type: ignore[assignment]  # a plain attribute, no submodule
    return model


def _libraries() -> dict[str, tuple[list[str], Callable[..., nn.Module]]]:
    """The names and the builder of each library; no names for timm where it is not installed."""
    import torchvision

    timm: Any = None
    if importlib.util.find_spec("timm") is not None:
        import timm
    return {
        "torchvision": (torchvision.models.list_models(module=torchvision.models), torchvision.models.get_model),
        "timm": (timm.list_models(), timm.create_model) if timm else ([], nn.Module),
    }


def find_builder(name: str) -> tuple[str, Callable[..., nn.Module]]:
    """The library that has ``name``, and the function that builds the model."""
    if not isinstance(name, str):
        raise TypeError(
            f"expected the name of a model, got {name!r}; to add techniques to a model object use deepsquare.equip"
        )
    if name == "vanilla_cnn":
        return "", vanilla_cnn
    libraries = _libraries()
    library, _, bare = name.rpartition("/")
    if library and library not in libraries:
        raise ValueError(f"unknown library {library!r} in {name!r}; expected torchvision or timm")
    untagged = {"torchvision": bare, "timm": bare.split(".")[0]}  # timm's names may end in a weights tag
    matches = [key for key, (names, _) in libraries.items() if untagged[key] in names and library in ("", key)]
    if not matches:
        every = [name for names, _ in libraries.values() for name in names]
        known = libraries[library][0] if library else list(dict.fromkeys([*every, "vanilla_cnn"]))
        close = difflib.get_close_matches(bare.lower(), known, n=4) or known[:4]
        hint = "" if libraries["timm"][0] else " (timm is not installed: pip install 'deepsquare[timm]')"
        raise ValueError(f"no model named {name!r}; the nearest names are {', '.join(close)}{hint}")
    if len(matches) == 2 and not _same_network(bare):
        raise ValueError(
            f"{name!r} names different networks in torchvision and in timm; write 'torchvision/{bare}' or 'timm/{bare}'"
        )
    return matches[0], partial(libraries[matches[0]][1], bare)


@cache
def _same_network(name: str) -> bool:
    """Whether torchvision's and timm's model of this name have the same parameters."""
    with torch.device("meta"):
        models = [build(name) for _, build in _libraries().values()]
    first, second = ({key: value.shape for key, value in model.state_dict().items()} for model in models)
    return first == second
