"""The networks of Tables 4, 5 and 7 under timm's own factory: ``timm.create_model("deepsquare_resnet50_pooling")``.

Importing this module registers them. The ResNets are timm's class and ShuffleNetV2 is torchvision's with timm's
methods, so that what timm does with its own models works with these: a new head, features, checkpoints, its training
script. With ``features_only=True`` the excitations and encodings act, as they are inside the blocks; Square-Pooling and
Square-Softmin do not, as the features end before them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torchvision
from timm.layers import create_classifier
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, is_model, register_model
from timm.models import resnet as timm_resnet
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare.models import NETWORKS, ModelConfig
from deepsquare.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from deepsquare.surgery import PREFIX, EquipRecord, Init, Site, equip, equip_record, format_spec, is_folded, parse_spec
from deepsquare.surgery.head import set_dropout
from deepsquare.surgery.inputs import float_tensor
from deepsquare.surgery.insertion import add_beta, insert, remove_inserted
from deepsquare.surgery.spec_key import add_spec_key, remove_spec_key

__all__: list[str] = []  # timm's register_model adds each name


@dataclass(frozen=True)
class HeadRecord(EquipRecord):
    """The record of a model without some of its sites: what acts now, and in ``full`` what ``equip`` inserted."""

    full: EquipRecord | None = None


class KeepsTechniques(nn.Module):
    """A mixin: timm's ``reset_classifier``, in which the techniques of the head stay."""

    if TYPE_CHECKING:  # at run time torch.jit.script does not accept them
        num_classes: int
        num_features: int
        global_pool: nn.Module
        fc: nn.Module

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """Give the model a new classifier, and another pooling if ``global_pool`` differs.

        A term whose site is gone, Square-Softmin with ``num_classes=0`` and Square-Pooling with ``global_pool=""``,
        comes back with the next head that has it. Square-Softmin starts anew with its classifier.
        """
        record = equip_record(self)
        full = record.full if isinstance(record, HeadRecord) else record
        if full is not None:
            _check_head(full, global_pool)
        pool, fc = create_classifier(self.num_features, num_classes, pool_type=global_pool)
        if pool.pool_type != self.global_pool.pool_type:
            remove_inserted(self.global_pool)  # else the old pooling would ask the new one to take its techniques over
            self.global_pool = pool.train(self.training)
        anchor = float_tensor(self)
        remove_inserted(self.fc)
        self.fc = fc.to(anchor.device, anchor.dtype).train(self.training)
        self.num_classes = num_classes
        config: ModelConfig | None = getattr(self, "deepsquare_config", None)
        if config is not None:
            head = {"num_classes": num_classes, "global_pool": global_pool}
            self.deepsquare_config = replace(config, kwargs={**config.kwargs, **head})
        if full is not None:
            self.deepsquare_record = _fill_head(self, full)
            remove_spec_key(self)
            if not isinstance(
                self.deepsquare_record, HeadRecord
            ):  # features take the weights of a classifier of any spec
                add_spec_key(self, full.spec)


def _check_head(record: EquipRecord, global_pool: str) -> None:
    pooling = next((site.term for site in record.sites.of_kind("pooling") if site.term), "")
    if pooling and global_pool not in ("avg", ""):
        raise ValueError(
            f"global_pool={global_pool!r} has no average for the term {pooling} to replace; expected 'avg', or '' for "
            "features that are not pooled"
        )
    if any(patch.path == "fc" for patch in record.patches):
        raise ValueError(
            f"reset_classifier cannot keep the term {pooling}, which widened the classifier; call unequip(model), "
            "reset the classifier, then equip the model again"
        )


def _fill_head(model: KeepsTechniques, full: EquipRecord) -> EquipRecord:
    """Insert the terms that a new head lacks; returns the record of what acts now."""
    # With num_classes=0 fc is the identity; prune_intermediate_layers makes whole stages the identity.
    gone = {name: f"{name} is removed" for name, child in model.named_children() if isinstance(child, nn.Identity)}
    if model.global_pool.pool_type != "avg":
        gone["global_pool"] = f"global_pool={model.global_pool.pool_type!r} is no average"
    sites: list[Site] = []
    missing = dict(full.sites.missing)
    for site in full.sites:
        owner = site.path.split(".")[0]
        if owner in gone:
            missing[site.kind] = gone[owner]
            continue
        if owner == "fc":
            site = replace(site, shape=(model.num_classes,))
        sites.append(site)
        for term in parse_spec(site.term):
            if not hasattr(model.get_submodule(site.path), PREFIX + term.name):
                module = term.build(site)
                if full.init != "paper":
                    add_beta(module, full.init)
                insert(model, site, term.name, module)
    now = replace(
        full.sites,
        sites=tuple(sites),
        missing={kind: reason for kind, reason in missing.items() if all(site.kind != kind for site in sites)},
        classifier=full.sites.classifier if model.num_classes else "",
    )
    dropout = full.dropout if model.num_classes else None
    if dropout is not None:
        set_dropout(model, now, dropout)
    acting = {site.term for site in sites}
    spec = format_spec([term for term in parse_spec(full.spec) if str(term) in acting])
    record = {**vars(full), "spec": spec, "dropout": dropout, "sites": now}
    complete = (len(now), dropout) == (len(full.sites), full.dropout)
    return EquipRecord(**record) if complete else HeadRecord(**record, full=full)


class ResNet(KeepsTechniques, timm_resnet.ResNet):
    """timm's ResNet, whose weights have torchvision's names."""

    STAGES = ("layer1", "layer2", "layer3", "layer4")

    def prune_intermediate_layers(self, indices: int | list[int] = 1, *args: Any, **kwargs: Any) -> list[int]:
        """Remove the stages behind the last of ``indices``, and the head; returns the indices from the first stage."""
        _, last = feature_take_indices(1 + len(self.STAGES), indices)  # of the stem and the stages
        for name in self.STAGES[last:]:
            remove_inserted(getattr(self, name))
        kept: list[int] = super().prune_intermediate_layers(indices, *args, **kwargs)
        return kept


class ShuffleNetV2(KeepsTechniques, torchvision.models.ShuffleNetV2):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ShuffleNetV2 with the methods of timm's models; the weights have torchvision's names."""

    STAGES = ("conv1", "maxpool", "stage2", "stage3", "stage4")  # each at half the resolution of the one before
    if TYPE_CHECKING:
        conv1: nn.Sequential
        maxpool: nn.Module
        stage2: nn.Module
        stage3: nn.Module
        stage4: nn.Module
        conv5: nn.Module

    def __init__(
        self,
        stages_repeats: Sequence[int],
        stages_out_channels: Sequence[int],
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(list(stages_repeats), list(stages_out_channels))
        stem, *widths, self.num_features = stages_out_channels
        self.head_hidden_size = self.num_features
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False
        if in_chans != 3:
            self.conv1[0] = nn.Conv2d(in_chans, stem, 3, 2, 1, bias=False)
        self.feature_info = [
            {"num_chs": width, "reduction": 2**i, "module": name}
            for i, (width, name) in enumerate(zip((stem, stem, *widths), self.STAGES, strict=True), 1)
        ]
        self.global_pool, self.fc = create_classifier(self.num_features, num_classes, pool_type=global_pool)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns by which timm groups the parameters into layers."""
        stages = r"^stage(\d+)" if coarse else r"^stage(\d+)\.(\d+)"
        return {"stem": r"^conv1", "blocks": [(stages, None), (r"^conv5", (99999,))]}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the stages in the backward pass."""
        self.grad_checkpointing = enable

    def get_classifier(self, name_only: bool = False) -> nn.Module | str:
        """The classifier, or its name."""
        return "fc" if name_only else self.fc

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of ``feature_info`` at ``indices`` (all by default; the last n for an int), and the final one."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt!r}; expected 'NCHW'")
        if is_folded(self):
            raise ValueError(
                "in a folded ShuffleNetV2 the maps between the stages have their channels in another order; call "
                "forward_intermediates on the model that was folded"
            )
        taken, last = feature_take_indices(len(self.STAGES), indices)
        stages = self.STAGES[: last + 1] if stop_early else self.STAGES
        intermediates = []
        for i, name in enumerate(stages):
            x = getattr(self, name)(x)
            if i in taken:
                intermediates.append(x)
        if intermediates_only:
            return intermediates
        return self.conv5(x) if stages == self.STAGES else x, intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages behind the last of ``indices``, and the head; returns the indices from the first stage."""
        taken, last = feature_take_indices(len(self.STAGES), indices)
        for name in (*self.STAGES[last + 1 :], *(["conv5"] if prune_head else [])):
            remove_inserted(getattr(self, name))
            setattr(self, name, nn.Identity())
        if prune_head:
            self.reset_classifier(0, "")
        kept: list[int] = taken
        return kept

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) → (N, num_features, H/32, W/32)."""
        x = self.maxpool(self.conv1(x))
        if self.grad_checkpointing and not torch.jit.is_scripting():  # type: ignore[attr-defined]
            x = checkpoint_seq([self.stage2, self.stage3, self.stage4], x, flatten=True)
        else:
            x = self.stage4(self.stage3(self.stage2(x)))
        out: Tensor = self.conv5(x)
        return out

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits, or with ``pre_logits`` what the classifier reads."""
        x = self.global_pool(x)
        if self.drop_rate:
            x = F.dropout(x, p=self.drop_rate, training=self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


BASIC_BLOCK: Any = timm_resnet.BasicBlock  # timm annotates the class that it expects as an object of it
BOTTLENECK: Any = timm_resnet.Bottleneck

# NOTE not in paper: the last γ of a residual block starts at 1, as in torchvision, where timm's own default is 0. An
# excitation needs it (surgery/reset_gammas.py), and so all networks of a table start alike.
BUILDERS: dict[str, Callable[..., KeepsTechniques]] = {
    "resnet18": partial(ResNet, BASIC_BLOCK, (2, 2, 2, 2), zero_init_last=False),
    "resnet50": partial(ResNet, BOTTLENECK, (3, 4, 6, 3), zero_init_last=False),
    "shufflenet_v2_x1_0": partial(ShuffleNetV2, (4, 8, 4), (24, 116, 232, 464, 1024)),
    "shufflenet_v2_x0_5": partial(ShuffleNetV2, (4, 8, 4), (24, 48, 96, 192, 1024)),
}


def timm_name(name: str, spec: str) -> str:
    """The registered name of ``name`` with ``spec``: ``deepsquare_resnet50_pooling_excitation``."""
    return "_".join(["deepsquare", name, *spec.split("+")] if spec else ["deepsquare", name])


default_cfgs = generate_default_cfgs(
    {
        timm_name(network.model, network.spec): {
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 224 / 256,
            "interpolation": "bilinear",
            "mean": IMAGENET_MEAN,
            "std": IMAGENET_STD,
            "num_classes": 1000,
            "first_conv": "conv1" if network.model.startswith("resnet") else "conv1.0",
            "classifier": "fc",
            "paper_ids": "arXiv:1906.04979",
        }
        for network in NETWORKS
    }
)


def _build(
    name: str, spec: str, num_classes: int = 1000, global_pool: str = "avg", init: Init = "paper", **kwargs: Any
) -> nn.Module:
    """The network with ``spec``, equipped as a classifier: without one its head has not the sites of all terms."""
    model = BUILDERS[name](num_classes=num_classes or 1, **kwargs)
    kwargs = {"num_classes": model.num_classes, "global_pool": "avg", **kwargs}
    model.deepsquare_config = ModelConfig(f"timm/{timm_name(name, '')}", kwargs)
    equip(model, spec, init=init)
    if (num_classes, global_pool) != (model.num_classes, "avg"):
        model.reset_classifier(num_classes, global_pool)
    return model


def _entry_point(name: str, spec: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        model: nn.Module = build_model_with_cfg(partial(_build, name, spec), build.__name__, pretrained, **kwargs)
        return model

    build.__name__ = timm_name(name, spec)
    build.__doc__ = f"{name} equipped with {spec!r}." if spec else f"{name}, the base model."
    return build


for _network in NETWORKS:
    if not is_model(timm_name(_network.model, _network.spec)):
        register_model(_entry_point(_network.model, _network.spec))
