"""Putting techniques onto the sites of a model and taking them off again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepsquare.surgery.blocks import fuse_blocks, unfuse_blocks
from deepsquare.surgery.finder import find_sites, last_strides, named_site, reader_of_pooling
from deepsquare.surgery.insertion import PREFIX, WithInserted, insert, remove_inserted
from deepsquare.surgery.site import Site, Sites
from deepsquare.surgery.techniques import Term, format_spec, parse_spec
from deepsquare.surgery.trace import Graph, trace

FOLDED = "deepsquare_folded"
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Patch:
    """An attribute of a base module that a technique needs otherwise, with its value before."""

    path: str
    attribute: str
    before: Any


@dataclass(frozen=True)
class EquipRecord:
    """What ``equip`` did to a model; kept on the model as ``deepsquare_record``.

    Attributes:
        spec: the spec in its canonical spelling.
        dropout: the ratio before the last fully connected layer, or ``None`` when it was left as it is.
        sites: all sites of the base model, with the word that stands at each.
        revived: the factors (γ of a normalisation) that were set from 0 to 1.
        changes: what was changed in the base model itself, in that order: strides, a wider layer, a dropout ratio.
    """

    spec: str
    dropout: float | None
    sites: Sites
    reset_gammas: tuple[str, ...] = ()
    patches: tuple[Patch, ...] = ()


def equip(model: Model, spec: str, *, dropout: float | None = None, input_shape: Sequence[int] | None = None) -> Model:
    """Add the techniques of ``spec`` to ``model``, in place, and return it.

    Every key of the base ``state_dict`` stays, so pretrained weights load before or after; only the second-order
    heads need a wider layer behind the pooling, which starts anew. Equipping again with the same spec changes nothing;
    with another one it is an error (``unequip`` first).

    Args:
        model: a CNN classifier, from torchvision, from timm or your own.
        spec: words joined by ``+``, as in ``"pooling+excitation"``.
        dropout: the dropout ratio before the last fully connected layer (the paper trains its networks with 0.2).
        input_shape: shape of one input without the batch, ``(channels, height, width)``, if it cannot be guessed.
    """
    terms = parse_spec(spec)
    _refuse_wrapped_and_folded(model)
    present = equip_record(model)
    if present is not None:
        check_intact(model)
        if (set(parse_spec(present.spec)), present.dropout) == (set(terms), dropout):
            return model
        raise ValueError(
            f"{type(model).__name__} is already equipped with {present.spec!r} (dropout={present.dropout}), so it "
            f"cannot take {format_spec(terms)!r} (dropout={dropout}); call unequip(model) first"
        )
    refuse_inner(model)
    if not terms and dropout is None:
        return model
    graph = trace(model, input_shape)
    patches: list[Patch] = []
    try:
        if any(term.dense for term in terms):
            _require_maps(graph)
            patches += _make_dense(model, graph)
            graph = _trace_changed(model, graph, "at stride 1 in its last stage; give the word the option dense=False")
        sites = find_sites(model, graph)
        placed = _place(model, terms, graph, sites)
        inserted = {site: term.build(site) for site, term in placed.items()}
        needs_nonzero_branch = any(term.technique.needs_nonzero_branch for term in terms)
        if needs_nonzero_branch:
            _refuse_zero_convolutions(model, sites)
        if dropout is not None:
            _check_dropout(model, sites, dropout)
        for site, module in inserted.items():
            patches += _widen(model, graph, site, module)
            insert(model, site, placed[site].name, module)
        if any(patch.attribute == "weight" for patch in patches):
            _trace_changed(model, graph, "with more pooled values; something else reads them, or their number is fixed")
        fuse_blocks(model)
        if dropout is not None:
            patches += _set_dropout(model, sites, dropout)
        filled = sites.filled({site: str(term) for site, term in placed.items()})
        reset_gammas = _reset_gammas(model, sites) if needs_nonzero_branch else ()
        record = EquipRecord(format_spec(terms), dropout, filled, reset_gammas, tuple(patches))
        model.deepsquare_record = record  # type: ignore[assignment]
    except BaseException:  # a spec that does not suit, a model that takes no new attributes: as it was
        unfuse_blocks(model)
        remove_inserted(model)
        _undo(model, patches)
        raise
    if reset_gammas:
        warnings.warn(
            f"{len(reset_gammas)} layers at the end of a block started at γ = 0 ({reset_gammas[0]}, …), which the excitation "
            "would keep at zero for ever; they now start at γ = 1. Build the model without zero initialisation of the "
            "residual branch (zero_init_residual=False, zero_init_last=False), where it can be, to do without this "
            "message",
            stacklevel=2,
        )
    return model


def unequip(model: Model) -> Model:
    """Take off everything that :func:`equip` added, in place: the base model again, with the same weights."""
    _refuse_wrapped_and_folded(model)
    present = equip_record(model)
    if present is None:
        return model
    unfuse_blocks(model)
    remove_inserted(model)
    _undo(model, present.patches)
    for name in present.reset_gammas:
        factor = model.get_parameter(name)
        if bool((factor == 1).all()):  # not trained since: as it was
            nn.init.zeros_(factor)
    del model.deepsquare_record
    return model


def equip_record(model: nn.Module) -> EquipRecord | None:
    """What stands in ``model`` (or in the model that DDP, EMA or ``torch.compile`` wrapped), if anything."""
    return getattr(unwrap(model), "deepsquare_record", None)


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
    present = equip_record(model)
    if present is not None:
        return present.sites
    model = unwrap(model)
    return find_sites(model, trace(model, input_shape))


def refuse_inner(model: nn.Module) -> None:
    """Refuse a model that only has an equipped one inside: what stands there is known to the inner one alone."""
    model = unwrap(model)
    if equip_record(model) is None:
        inner = next((path for path, module in model.named_modules() if isinstance(module, WithInserted)), None)
        if inner is not None:
            raise ValueError(f"{type(model).__name__} has an equipped model inside ({inner}, …); use that one instead")


def check_intact(model: nn.Module) -> None:
    """Refuse a model in which a module was replaced after ``equip``, and took along what stood at it."""
    present = equip_record(model)
    if present is None:
        return
    expected = {f"{site.path}.{PREFIX}{site.term.split('(')[0]}": site.term for site in present.sites if site.term}
    if present.dropout is not None and not present.sites.dropout:
        expected[f"{present.sites.classifier}.{PREFIX}dropout"] = "dropout"
    names = dict(unwrap(model).named_modules())
    for path, term in expected.items():
        if path not in names:
            raise ValueError(
                f"{path.rpartition('.')[0]} has lost its {term}: the module was replaced after equip. Change the model "
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


def _place(model: nn.Module, terms: Sequence[Term], graph: Graph, sites: Sites) -> dict[Site, Term]:
    placed: dict[Site, Term] = {}
    for term in terms:
        for site in _places(model, term, graph, sites):
            if site in placed:
                raise ValueError(
                    f"{placed[site]} and {term} of the spec both stand after {site.path}; keep one of them"
                )
            placed[site] = term
    return placed


def _places(model: nn.Module, term: Term, graph: Graph, sites: Sites) -> list[Site]:
    kind = term.technique.kind
    if term.after is not None or kind is None:
        return [named_site(model, graph, term.after or "", term.name)]
    places = sites.of(kind)
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no {kind} site for the word {term.name!r}: {sites.missing[kind]}. "
            f"Its sites: {sites.summary()}{_hint(term)}"
        )
    return term.choose(places)


def _hint(term: Term) -> str:
    name = term.name
    return f". {name}(after='…') stands behind a module you name" if "after" in term.technique.options else ""


def _patch(model: nn.Module, path: str, attribute: str, value: Any) -> Patch:
    module = model.get_submodule(path)
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    return Patch(path, attribute, before)


def _undo(model: nn.Module, patches: Sequence[Patch]) -> None:
    for patch in reversed(patches):
        module, value = model.get_submodule(patch.path), patch.before
        if not hasattr(module, patch.attribute):
            continue  # the layer was replaced since, by one of another kind, which is left alone
        if isinstance(value, nn.Parameter):
            now = module.get_parameter(patch.attribute)
            if now.shape[0] != value.shape[0]:  # the layer was replaced since, by one of other classes
                value = _new_weight(now, value.shape[1])
            value = nn.Parameter(value.detach().to(now), requires_grad=now.requires_grad)
        setattr(module, patch.attribute, value)


def _make_dense(model: nn.Module, graph: Graph) -> list[Patch]:
    """Let the last stage go at stride 1, so that its map has four times the positions."""
    paths = last_strides(graph)
    if isinstance(paths, str):
        raise ValueError(
            f"the last stage of {type(model).__name__} cannot go at stride 1: {paths}. Give the word the option "
            "dense=False to leave the strides as they are (gsop instead of gsop1; for gsop2 write "
            "gsop(last=False)+isqrt_cov(iterations=3, dense=False))"
        )
    return [_patch(model, path, "stride", (1, 1)) for path in paths]


def _require_maps(graph: Graph) -> None:
    if len(graph.input_shape) != 3:
        shape = "×".join(map(str, graph.input_shape))
        raise ValueError(f"the spec has a word for maps with height and width; the model takes {shape}")


def _trace_changed(model: nn.Module, graph: Graph, how: str) -> Graph:
    try:
        return trace(model, graph.input_shape)
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} cannot run {how} ({error.__cause__})") from error


def _widen(model: nn.Module, graph: Graph, site: Site, module: nn.Module) -> list[Patch]:
    """Let the layer behind the pooling read as many values as ``module`` returns. It starts anew."""
    wanted = getattr(module, "out_channels", site.channels)
    if site.kind != "pooling" or wanted == site.channels:
        return []
    path = reader_of_pooling(graph)
    layer = model.get_submodule(path)
    size = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
    weight = layer.get_parameter("weight")
    wider = nn.Parameter(_new_weight(weight, wanted), requires_grad=weight.requires_grad)
    return [_patch(model, path, "weight", wider), _patch(model, path, size, wanted)]


def _new_weight(like: Tensor, inputs: int) -> Tensor:
    """A weight of a fully connected layer or 1×1 convolution for ``inputs`` values, as torch starts it."""
    weight = torch.empty(like.shape[0], inputs, *like.shape[2:], dtype=like.dtype, device=like.device)
    return weight if weight.is_meta else nn.init.kaiming_uniform_(weight, a=5**0.5)


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


def _set_dropout(model: nn.Module, sites: Sites, ratio: float) -> list[Patch]:
    """Dropout before the last fully connected layer: the model's own layer if it has one there, else a new one."""
    if not sites.dropout:
        insert(model, Site("named", sites.classifier, "input", ()), "dropout", nn.Dropout(ratio))
        return []
    return [_patch(model, sites.dropout, "p", ratio)]


def _all_zero(parameter: object) -> bool:
    return isinstance(parameter, Tensor) and not parameter.is_meta and not bool(parameter.any())


def _reset_gammas(model: nn.Module, sites: Sites) -> tuple[str, ...]:
    """Set to 1 the factors of the blocks' layers that give nothing but zeros; their names.

    NOTE not in paper: a branch that starts at F = 0 has G = 0 and s = 0, and d(s·F)/dF = 0: neither γ nor α would ever
    get a gradient. Initialising the last γ of a block at zero and Square-Excitation exclude each other. A trained γ of
    zero does no harm, as β has moved and with it F.
    """
    reset_gammas: list[str] = []
    for path in dict.fromkeys(site.block or site.path for site in sites.of("branch_end")):
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            # γ of a normalisation, or the gain of timm's scaled convolutions
            factor = "weight" if isinstance(module, NORMS) else "gain"
            values, bias = getattr(module, factor, None), getattr(module, "bias", None)
            if isinstance(values, nn.Parameter) and _all_zero(values) and (bias is None or _all_zero(bias)):
                nn.init.ones_(values)
                reset_gammas.append(f"{name}.{factor}")
    return tuple(reset_gammas)


def _refuse_zero_convolutions(model: nn.Module, sites: Sites) -> None:
    for site in sites.of("branch_end"):
        module = model.get_submodule(site.path)
        if isinstance(module, nn.modules.conv._ConvNd) and _all_zero(module.weight):
            raise ValueError(
                f"the branch end {site.path} is a convolution with zero weights, which an excitation would keep at "
                "zero for ever; build the model without zero initialisation of the residual branch "
                "(zero_init_last=False), or load its weights first"
            )
