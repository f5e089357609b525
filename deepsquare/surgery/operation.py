"""Putting techniques onto the sites of a model and taking them off again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepsquare.surgery.finder import CONTAINERS, find_sites
from deepsquare.surgery.insertion import PREFIX, Equipped, insert, remove_inserted
from deepsquare.surgery.site import Site, Sites
from deepsquare.surgery.techniques import Word, format_spec, parse_spec

FOLDED = "deepsquare_folded"
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Equipment:
    """What ``equip`` did to a model; kept on the model as ``deepsquare_equipment``.

    Attributes:
        spec: the spec in its canonical spelling.
        dropout: the ratio before the last fully connected layer, or ``None`` when it was left as it is.
        sites: all sites of the base model, with the word that stands at each.
        revived: the factors (γ of a normalisation) that were set from 0 to 1.
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
    _refuse_wrapped_and_folded(model)
    present = equipment(model)
    if present is not None:
        check_intact(model)
        if (set(parse_spec(present.spec)), present.dropout) == (set(words), dropout):
            return model
        raise ValueError(
            f"{type(model).__name__} is already equipped with {present.spec!r} (dropout={present.dropout}), so it "
            f"cannot take {format_spec(words)!r} (dropout={dropout}); call unequip(model) first"
        )
    refuse_inner(model)
    if not words and dropout is None:
        return model
    sites = find_sites(model, input_shape)
    placed: dict[Site, Word] = {}
    for word in words:
        for site in _places(model, word, sites):
            if site in placed:
                raise ValueError(
                    f"{placed[site]} and {word} of the spec both stand after {site.path}; keep one of them"
                )
            placed[site] = word
    inserted = {site: word.build(site) for site, word in placed.items()}
    dies_at_zero = any(word.technique.dies_at_zero for word in words)
    if dies_at_zero:
        _refuse_zero_convolutions(model, sites)
    if dropout is not None:
        _check_dropout(model, sites, dropout)
    # What can fail has been tried by now: from here on the model changes.
    try:
        for site, module in inserted.items():
            insert(model, site, placed[site].name, module)
        base_dropout = _set_dropout(model, sites, dropout) if dropout is not None else None
        revived = _revive(model, sites) if dies_at_zero else ()
        filled = sites.filled({site: str(word) for site, word in placed.items()})
        record = Equipment(format_spec(words), dropout, filled, revived, base_dropout)
        model.deepsquare_equipment = record  # type: ignore[assignment]
    except BaseException:  # a model that takes no new attributes, say
        remove_inserted(model)
        raise
    if revived:
        warnings.warn(
            f"{len(revived)} layers at the end of a block started at γ = 0 ({revived[0]}, …), which the excitation "
            "would keep at zero for ever; they now start at γ = 1. Build the model without zero initialisation of the "
            "residual branch (zero_init_residual=False, zero_init_last=False), where it can be, to do without this "
            "message",
            stacklevel=2,
        )
    return model


def unequip(model: Model) -> Model:
    """Take off everything that :func:`equip` added, in place: the base model again, with the same weights."""
    _refuse_wrapped_and_folded(model)
    present = equipment(model)
    if present is None:
        return model
    remove_inserted(model)
    if present.base_dropout is not None:
        path, ratio = present.base_dropout
        _dropout_layer(model, path).p = ratio
    for name in present.revived:
        factor = model.get_parameter(name)
        if bool((factor == 1).all()):  # not trained since: as it was
            nn.init.zeros_(factor)
    del model.deepsquare_equipment
    return model


def equipment(model: nn.Module) -> Equipment | None:
    """What stands in ``model`` (or in the model that DDP, EMA or ``torch.compile`` wrapped), if anything."""
    return getattr(unwrap(model), "deepsquare_equipment", None)


def is_folded(model: nn.Module) -> bool:
    """Whether the model is in the test-phase form that :func:`deepsquare.fold` makes."""
    return bool(getattr(model, FOLDED, False))


def _refuse_wrapped_and_folded(model: nn.Module) -> None:
    name = type(model).__name__
    if unwrap(model) is not model:
        raise ValueError(f"this is a {name} around a model; change the model itself, before it is wrapped")
    if is_folded(model):
        raise ValueError(f"this {name} is folded, which cannot be undone; use the model it was made of")


def sites(model: nn.Module, input_shape: Sequence[int] | None = None) -> Sites:
    """What stands where: every site of ``model``, with the word that fills it once the model is equipped."""
    refuse_inner(model)
    check_intact(model)
    present = equipment(model)
    return present.sites if present is not None else find_sites(unwrap(model), input_shape)


def refuse_inner(model: nn.Module) -> None:
    """Refuse a model that only has an equipped one inside: what stands there is known to the inner one alone."""
    model = unwrap(model)
    if equipment(model) is None:
        inner = next((path for path, module in model.named_modules() if isinstance(module, Equipped)), None)
        if inner is not None:
            raise ValueError(f"{type(model).__name__} has an equipped model inside ({inner}, …); use that one instead")


def check_intact(model: nn.Module) -> None:
    """Refuse a model in which a module was replaced after ``equip``, and took along what stood at it."""
    present = equipment(model)
    if present is None:
        return
    expected = {f"{site.path}.{PREFIX}{site.word.split('(')[0]}": site.word for site in present.sites if site.word}
    if present.dropout is not None and present.base_dropout is None:
        expected[f"{present.sites.classifier}.{PREFIX}dropout"] = "dropout"
    names = dict(unwrap(model).named_modules())
    for path, word in expected.items():
        if path not in names:
            raise ValueError(
                f"{path.rpartition('.')[0]} has lost its {word}: the module was replaced after equip. Change the model "
                "first and equip it then"
            )


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, out of ``DistributedDataParallel``, ``AveragedModel``, timm's EMA or a compiled model.

    They have one child, named ``module`` or ``_orig_mod``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (nn.Module), got {model!r}")
    while list(model._modules) in (["module"], ["_orig_mod"]):
        (model,) = model.children()
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


def _dropout_layer(model: nn.Module, path: str) -> nn.Dropout:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Dropout)
    return layer


def _check_dropout(model: nn.Module, sites: Sites, ratio: float) -> None:
    if not (isinstance(ratio, (int, float)) and 0 <= ratio < 1):
        raise ValueError(f"dropout={ratio!r} is no ratio; give a number from 0 up to, not including, 1")
    if not sites.classifier:
        raise ValueError(f"{type(model).__name__} has no fully connected layer that dropout could stand before")
    own = getattr(model, "drop_rate", 0)  # timm's, where it is no layer but a call of F.dropout
    if own and not sites.dropout:
        raise ValueError(
            f"{type(model).__name__} has a dropout of its own already; build it with drop_rate=0, not {own}"
        )


def _set_dropout(model: nn.Module, sites: Sites, ratio: float) -> tuple[str, float] | None:
    """Dropout before the last fully connected layer: the model's own layer if it has one there, else a new one."""
    if not sites.dropout:
        insert(model, Site("named", sites.classifier, "input", ()), "dropout", nn.Dropout(ratio))
        return None
    layer = _dropout_layer(model, sites.dropout)
    before = layer.p
    layer.p = ratio
    return sites.dropout, before


def _all_zero(parameter: object) -> bool:
    return isinstance(parameter, Tensor) and not parameter.is_meta and not bool(parameter.any())


def _revive(model: nn.Module, sites: Sites) -> tuple[str, ...]:
    """Set to 1 the factors of the blocks' layers that give nothing but zeros; their names.

    NOTE not in paper: a branch that starts at F = 0 has G = 0 and s = 0, and d(s·F)/dF = 0: neither γ nor α would ever
    get a gradient. Initialising the last γ of a block at zero and Square-Excitation exclude each other. A trained γ of
    zero does no harm, as β has moved and with it F.
    """
    revived: list[str] = []
    for path in dict.fromkeys(site.block or site.path for site in sites.of("branch_end")):
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            # γ of a normalisation, or the gain of timm's scaled convolutions
            factor = "weight" if isinstance(module, NORMS) else "gain"
            values, bias = getattr(module, factor, None), getattr(module, "bias", None)
            if isinstance(values, nn.Parameter) and _all_zero(values) and (bias is None or _all_zero(bias)):
                nn.init.ones_(values)
                revived.append(f"{name}.{factor}")
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
