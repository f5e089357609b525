"""Putting modules onto sites and taking them off again.

A technique's module becomes a child of the module at the site, named ``deepsquare_<word>``, and a forward hook runs
it on that module's input or output. No module of the base model is wrapped, renamed or replaced: its ``state_dict``
keys, its classes and its indexing stay as they were, and the new keys are recognised by their name.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from deepsquare.surgery.finder import CONTAINERS, Site, Sites, find_sites
from deepsquare.surgery.techniques import Word, format_spec, parse_spec

PREFIX = "deepsquare_"
PLACEMENT = "deepsquare_placement"
FOLDED = "deepsquare_folded"
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Equipment:
    """What ``equip`` did to a model; kept on the model as ``deepsquare_equipment``.

    Attributes:
        spec: the spec in its canonical spelling.
        dropout: the ratio before the last fully connected layer, or ``None`` when it was left as it is.
        sites: all sites of the base model, with the word that stands at each.
        revived: normalisation layers whose γ was set from 0 to 1.
        base_dropout: path and ratio of the base model's own dropout layer where ``dropout`` replaced it.
    """

    spec: str
    dropout: float | None
    sites: Sites
    revived: tuple[str, ...] = ()
    base_dropout: tuple[str, float] | None = None


def equip(model: Model, spec: str, *, dropout: float | None = None, input_shape: Sequence[int] | None = None) -> Model:
    """Add the techniques of ``spec`` to ``model``, in place, and return it.

    Every key of the base ``state_dict`` stays, so pretrained weights load before or after. Equipping again with the
    same spec changes nothing; with another one it is an error (``unequip`` first).

    Args:
        model: a CNN classifier, from torchvision, from timm or your own.
        spec: words joined by ``+``, as in ``"pooling+excitation"``.
        dropout: the dropout ratio before the last fully connected layer (the paper trains its networks with 0.2).
        input_shape: shape of one input without the batch, ``(channels, height, width)``, if it cannot be guessed.
    """
    words = parse_spec(spec)
    if dropout is not None and not (isinstance(dropout, (int, float)) and 0 <= dropout < 1):
        raise ValueError(f"dropout={dropout!r} is no ratio; give a number from 0 up to, not including, 1")
    if unwrap(model) is not model:
        raise ValueError(f"equip the model before it is wrapped: this is a {type(model).__name__}")
    _refuse_folded(model)
    present = equipment(model)
    if present is not None:
        if (present.spec, present.dropout) == (format_spec(words), dropout):
            return model
        raise ValueError(
            f"{type(model).__name__} is already equipped with {present.spec!r} (dropout={present.dropout}), so it "
            f"cannot take {format_spec(words)!r} (dropout={dropout}); call unequip(model) first"
        )
    if not words and dropout is None:
        return model
    sites = find_sites(model, input_shape)
    placed = {site: word for word in words for site in _places(model, word, sites)}
    inserted = {site: word.build(site) for site, word in placed.items()}
    if any(word.technique.dies_at_zero for word in words):
        _refuse_zero_convolutions(model, sites)
    if dropout is not None and not sites.classifier:
        raise ValueError(f"{type(model).__name__} has no fully connected layer that dropout could stand before")
    # Everything that can fail has been tried by now: from here on the model changes.
    for site, module in inserted.items():
        _insert(model, site, placed[site].name, module)
    base_dropout = _set_dropout(model, sites, dropout) if dropout is not None else None
    revived = _revive(model, sites) if any(word.technique.dies_at_zero for word in words) else ()
    filled = sites.filled({site: str(word) for site, word in placed.items()})
    model.deepsquare_equipment = Equipment(format_spec(words), dropout, filled, revived, base_dropout)  # type: ignore[assignment]
    return model


def unequip(model: Model) -> Model:
    """Take off everything that :func:`equip` added, in place: the base model again, with the same weights."""
    present = equipment(model)
    if present is None:
        return model
    _refuse_folded(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            placement = child.__dict__.get(PLACEMENT)
            if placement is not None:
                placement.detach()
                delattr(parent, name)
    if present.base_dropout is not None:
        path, ratio = present.base_dropout
        _dropout_layer(model, path).p = ratio
    for path in present.revived:
        gamma = model.get_submodule(path).weight
        if isinstance(gamma, Tensor) and bool((gamma == 1).all()):  # not trained since: as it was
            nn.init.zeros_(gamma)
    del model.deepsquare_equipment
    return model


def equipment(model: nn.Module) -> Equipment | None:
    """What stands in ``model`` (or in the model that DDP, EMA or ``torch.compile`` wrapped), if anything."""
    return getattr(unwrap(model), "deepsquare_equipment", None)


def is_folded(model: nn.Module) -> bool:
    """Whether the model is in the test-phase form that :func:`deepsquare.fold` makes."""
    return bool(getattr(model, FOLDED, False))


def _refuse_folded(model: nn.Module) -> None:
    if is_folded(model):
        raise ValueError(
            f"this {type(model).__name__} is folded, which cannot be undone; work on the model it was made of"
        )


def sites(model: nn.Module, input_shape: Sequence[int] | None = None) -> Sites:
    """What stands where: every site of ``model``, with the word that fills it once the model is equipped."""
    present = equipment(model)
    return present.sites if present is not None else find_sites(unwrap(model), input_shape)


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, out of ``DistributedDataParallel``, ``AveragedModel`` or ``torch.compile``'s wrapper."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif "_orig_mod" in model._modules:  # torch.compile's; importing its class would load the whole compiler
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _places(model: nn.Module, word: Word, sites: Sites) -> list[Site]:
    kind = word.technique.kind
    if kind is None:
        return [_named(model, dict(word.options).get("after", ""))]
    places = sites.of(kind)
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no {kind} site for the word {word.name!r}: {sites.missing[kind]}. "
            f"Its sites: {sites.summary()}"
        )
    return places


def _named(model: nn.Module, path: str) -> Site:
    children = ", ".join(name for name, _ in model.named_children())
    try:
        module = model.get_submodule(path) if path else None
    except AttributeError:
        module = None
    if module is None:
        raise ValueError(
            f"{type(model).__name__} has no module {path!r} for the word 'square'; name one as in "
            f"square(after='…'). At its top are: {children}"
        )
    while isinstance(module, nn.Sequential) and len(module):  # a child of a Sequential would be run by it
        name, module = list(module.named_children())[-1]
        path = f"{path}.{name}"
    if isinstance(module, CONTAINERS):
        raise ValueError(f"{path} is a {type(module).__name__}, which has no output of its own; name a module in it")
    return Site("named", path, "output", ())


def _insert(model: nn.Module, site: Site, word: str, module: nn.Module) -> None:
    anchor = next((p for p in model.parameters() if p.is_floating_point()), None)
    if anchor is not None:
        module.to(device=anchor.device, dtype=anchor.dtype)
    setattr(module, PLACEMENT, _Placement(site))
    # The registration hook below does the rest.
    model.get_submodule(site.path).add_module(PREFIX + word, module.train(model.training))


class _Placement:
    """How an inserted module acts on its parent; it is stored on the inserted module and travels with it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.handle: RemovableHandle | None = None

    def attach(self, parent: nn.Module, name: str) -> None:
        self.detach()  # a conversion registers children anew, even with the parent that they have
        if self.site.position == "input":
            self.handle = parent.register_forward_pre_hook(partial(_before, name))
        else:
            self.handle = parent.register_forward_hook(partial(_after, name))

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def _follow_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Let an inserted module act on whichever module it becomes a child of.

    ``SyncBatchNorm.convert_sync_batchnorm`` and its like build a new normalisation layer and move the old one's
    children over, but not its hooks; so the hook is made wherever the child is registered.
    """
    placement = child.__dict__.get(PLACEMENT) if child is not None else None
    if placement is not None:
        placement.attach(parent, name)


register_module_module_registration_hook(_follow_registration)


def _before(name: str, parent: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_run(getattr(parent, name), args[0]), *args[1:])


def _after(name: str, parent: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return _run(getattr(parent, name), output)


def _run(inserted: nn.Module, x: Tensor) -> Tensor:
    """Call the inserted module, which takes (N, C, …), on a tensor as it stands at the site."""
    site: Site = inserted.deepsquare_placement.site  # type: ignore[union-attr, assignment]
    if site.relu_first:
        x = F.relu(x)
    if site.channel_dim != 1:
        x = x.movedim(site.channel_dim, 1)
    y: Tensor = inserted(x)
    if site.keeps_size:
        y = y.expand(*y.shape[:2], *x.shape[2:])
    return y if site.channel_dim == 1 else y.movedim(1, site.channel_dim)


def _dropout_layer(model: nn.Module, path: str) -> nn.Dropout:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Dropout)
    return layer


def _set_dropout(model: nn.Module, sites: Sites, ratio: float) -> tuple[str, float] | None:
    """Dropout before the last fully connected layer: the model's own layer if it has one there, else a new one."""
    if not sites.dropout:
        _insert(model, Site("named", sites.classifier, "input", ()), "dropout", nn.Dropout(ratio))
        return None
    layer = _dropout_layer(model, sites.dropout)
    before = layer.p
    layer.p = ratio
    return sites.dropout, before


def _all_zero(parameter: object) -> bool:
    return isinstance(parameter, Tensor) and not parameter.is_meta and not bool(parameter.any())


def _revive(model: nn.Module, sites: Sites) -> tuple[str, ...]:
    """Set γ to 1 in untrained normalisation layers that start at 0 within the blocks.

    NOTE not in paper: a branch that starts at F = 0 has G = 0 and s = 0, and d(s·F)/dF = 0: neither γ nor α would ever
    get a gradient. Initialising the last γ of a block at zero and Square-Excitation exclude each other.
    """
    revived: dict[str, None] = {}
    for block in {site.block: None for site in sites.of("branch_end") if site.block}:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if not isinstance(module, (_BatchNorm, nn.GroupNorm, nn.LayerNorm)) or not _all_zero(module.weight):
                continue
            if isinstance(module, _BatchNorm) and not _all_zero(module.running_mean):
                continue  # trained to be zero: reviving it would change what the network computes
            nn.init.ones_(module.weight)
            revived[name] = None
    if revived:
        warnings.warn(
            f"{len(revived)} normalisation layers at the end of a block started at γ = 0 ({next(iter(revived))}, …), "
            "which the excitation would keep at zero for ever; they now start at γ = 1. Build the model without zero "
            "initialisation of the residual branch (zero_init_residual=False, zero_init_last=False) to do without "
            "this message",
            stacklevel=3,
        )
    return tuple(revived)


def _refuse_zero_convolutions(model: nn.Module, sites: Sites) -> None:
    for site in sites.of("branch_end"):
        module = model.get_submodule(site.path)
        if isinstance(module, nn.modules.conv._ConvNd) and _all_zero(module.weight):
            raise ValueError(
                f"the branch end {site.path} is a convolution with zero weights, which an excitation would keep at "
                "zero for ever; build the model without zero initialisation of the residual branch "
                "(zero_init_last=False), or load its weights first"
            )
