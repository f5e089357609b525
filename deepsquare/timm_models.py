"""The networks of Tables 4, 5 and 7 under timm's own factory: ``timm.create_model("deepsquare_resnet50_pooling")``.

Importing this module registers them.
"""

from collections.abc import Callable
from typing import Any

from timm.models import is_model, register_model
from torch import nn

from deepsquare.models import NETWORKS, create_model
from deepsquare.preprocessing import IMAGENET_MEAN, IMAGENET_STD

__all__: list[str] = []  # timm's register_model adds each name

# timm reads the input size and the normalization from here; the values are those of ImageNet.
CONFIG = {
    "input_size": (3, 224, 224),
    "crop_pct": 224 / 256,
    "interpolation": "bilinear",
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "num_classes": 1000,
}


def timm_name(name: str, spec: str) -> str:
    """The registered name of ``name`` with ``spec``: ``deepsquare_resnet50_pooling_excitation``."""
    return "_".join(["deepsquare", name, *spec.split("+")] if spec else ["deepsquare", name])


def _entry_point(name: str, spec: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, drop_rate: float | None = None, in_chans: int = 3, **kwargs: Any) -> nn.Module:
        if pretrained or in_chans != 3:
            raise ValueError(
                f"{build.__name__} has no pretrained weights and takes 3 channels, got pretrained={pretrained}, "
                f"in_chans={in_chans}; for other base models use deepsquare.equip"
            )
        for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):  # timm passes these
            kwargs.pop(key, None)
        model = create_model(f"torchvision/{name}", spec, dropout=drop_rate or None, **kwargs)
        config = {**CONFIG, "architecture": build.__name__, "num_classes": kwargs.get("num_classes", 1000)}
        model.pretrained_cfg = model.default_cfg = config  # type: ignore[assignment]
        return model

    build.__name__ = timm_name(name, spec)
    build.__doc__ = f"{name} equipped with {spec!r}." if spec else f"torchvision's {name}, the base model."
    return build


for _network in NETWORKS:
    if not is_model(timm_name(_network.model, _network.spec)):
        register_model(_entry_point(_network.model, _network.spec))
