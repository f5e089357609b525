"""Adding techniques to the sites of a model, and removing them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepsquare.nn import EleSquare
from deepsquare.nn._parameters import is_sharded
from deepsquare.surgery import head
from deepsquare.surgery.blocks import fuse_blocks
from deepsquare.surgery.finder import find_sites, named_site
from deepsquare.surgery.insertion import (
    BETA,
    CLASSES,
    INITS,
    PREFIX,
    SITE,
    Init,
    WithInserted,
    add_beta,
    insert,
    outputs_of,
    remove_inserted,
)
from deepsquare.surgery.reset_gammas import reset_gammas
from deepsquare.surgery.site import Site, Sites
from deepsquare.surgery.spec import Term, format_spec, parse_spec
from deepsquare.surgery.spec_key import add_spec_key, remove_spec_key
from deepsquare.surgery.trace import Graph, trace

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class EquipRecord:
    """What ``equip`` did to a model; kept on the model as ``deepsquare_record``."""

    spec: str  # in its canonical spelling
    dropout: float | None  # the ratio before the last fully connected layer; None if it was not set
    sites: Sites  # of the base model, each with the term that fills it
    reset_gammas: tuple[str, ...]  # the parameters (γ of a normalization) that were set from 0 to 1
    patches: tuple[head.Patch, ...]  # changes to the base model in order: strides, a wider layer, a dropout ratio
    init: Init = "paper"


def equip(
    model: Model,
    spec: str,
    *,
    init: Init = "paper",
    dropout: float | None = None,
    input_shape: Sequence[int] | None = None,
) -> Model:
    """Add the techniques of ``spec`` to ``model``, in place, and return it.

    Every key of the base ``state_dict`` stays, so pretrained weights load before or after; only second-order poolings
    need a wider layer behind them, which is initialized anew. Running statistics of batch normalization stay too: where
    maps are squared, train the model or call :func:`deepsquare.recalibrate_batchnorm` before eval mode. Equipping again
    with the same spec changes nothing; with another spec it is an error (``unequip`` first).

    Args:
        model: a CNN from torchvision, from timm or your own: a classifier, an embedding or a backbone.
        spec: terms joined by ``+``, as in ``"pooling+excitation"``.
        init: how the modules start. ``"paper"``: as they are, for training from scratch. ``"identity"``, for a trained
            model: each returns (1 − β) · base + β · its result, with β learned from 0, so that the model computes what
            it did before. ``"anneal"``: the same, with β set from 0 to 1 during training by :func:`set_beta`.
        dropout: the dropout ratio before the last fully connected layer (the paper trains its networks with 0.2).
        input_shape: shape of one input without the batch, ``(channels, height, width)``, if it cannot be guessed.
    """
    terms = parse_spec(spec)
    if init not in INITS:
        raise ValueError(f"init is {init!r}; expected one of {', '.join(map(repr, INITS))}")
    _refuse_wrapped_and_folded(model)
    record = intact_record(model)
    if record is not None:
        if (set(parse_spec(record.spec)), record.dropout, record.init) == (set(terms), dropout, init):
            return model
        raise ValueError(
            f"{type(model).__name__} is already equipped with {record.spec!r} (dropout={record.dropout}, "
            f"init={record.init!r}), so it cannot take {format_spec(terms)!r} (dropout={dropout}, init={init!r}); call "
            "unequip(model) first"
        )
    if not terms and dropout is None:
        return model
    graph = trace(model, input_shape)
    patches: list[head.Patch] = []
    try:
        record = _insert_terms(model, terms, init, dropout, graph, patches)
        model.deepsquare_record = record  # type: ignore[assignment]
    except BaseException:  # a term that does not fit, a model that takes no new attributes
        _remove_terms(model, patches)
        raise
    if terms:
        add_spec_key(model, record.spec)
    squares = init == "paper" and any(isinstance(module, EleSquare) for module in model.modules())
    if squares and (trained := _trained_norms(model)):
        warnings.warn(
            f"the running statistics of {trained} layers of batch normalization are those of {type(model).__name__} "
            f"without the squares of {record.spec!r}; before you evaluate it, train it or call "
            "deepsquare.recalibrate_batchnorm(model, batches), or equip it with init='identity'",
            stacklevel=2,
        )
    if record.reset_gammas:
        warnings.warn(
            f"{len(record.reset_gammas)} layers at the end of a block were initialized with γ = 0 "
            f"({record.reset_gammas[0]}, …), where an excitation gets no gradient; they now start at γ = 1. Build the "
            "model without zero initialization of the residual branch (zero_init_residual=False, "
            "zero_init_last=False), if possible, or use init='identity', which needs no nonzero γ",
            stacklevel=2,
        )
    return model


def _insert_terms(
    model: nn.Module,
    terms: Sequence[Term],
    init: Init,
    dropout: float | None,
    graph: Graph,
    patches: list[head.Patch],
) -> EquipRecord:
    """Equip the model; ``patches`` receives each change of a base module as soon as it is made."""
    if dense := [term for term in terms if term.option("dense")]:
        if init != "paper":
            raise _not_the_identity(
                dense[0], init, "it sets the strides of the last stage to 1 (dense=False keeps them)"
            )
        dense[0].refuse_other_maps(graph.input_shape, "the input")
        patches += head.make_dense(model, graph)
        graph = head.retrace(model, graph, "at stride 1 in its last stage; give the term the option dense=False")
    sites = find_sites(model, graph)
    assigned = _assign(model, terms, graph, sites)
    modules = {site: term.build(site) for site, term in assigned.items()}
    if dropout is not None:
        patches += head.set_dropout(model, sites, dropout)
    for site, module in modules.items():
        if init != "paper":
            if getattr(module, "out_channels", site.channels) != site.channels:
                raise _not_the_identity(assigned[site], init, "it returns more values than an average")
            add_beta(module, init)
        patches += head.widen(model, graph, site, module)
        insert(model, site, assigned[site].name, module)
        if site.kind == "logits" and sites.classifier:
            model.get_submodule(sites.classifier).__dict__[CLASSES] = module
    if any(patch.attribute == "weight" for patch in patches):
        head.retrace(model, graph, "with more pooled values; something else reads them, or their number is fixed")
    fuse_blocks(model)
    # From the identity the branch learns first, and the excitation when it is no longer 0.
    needs_nonzero_branch = init == "paper" and any(term.technique.needs_nonzero_branch for term in terms)
    gammas = reset_gammas(model, sites) if needs_nonzero_branch else ()
    every = dict.fromkeys((*sites, *assigned))  # with those at named modules
    sites = replace(sites, sites=tuple(replace(site, term=str(assigned.get(site, ""))) for site in every))
    return EquipRecord(format_spec(terms), dropout, sites, gammas, tuple(patches), init)


def _trained_norms(model: nn.Module) -> int:
    """The number of batch normalization layers whose running means are no longer those of initialization."""
    means = (m.running_mean for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None)
    return sum(not mean.is_meta and bool(mean.any()) for mean in means)


def _not_the_identity(term: Term, init: Init, reason: str) -> ValueError:
    return ValueError(
        f"the term {term} cannot start at the identity (init={init!r}): {reason}; equip with init='paper', or with "
        "terms that keep the shape"
    )


def _assign(model: nn.Module, terms: Sequence[Term], graph: Graph, sites: Sites) -> dict[Site, Term]:
    """The term for each site that is to be filled."""
    assigned: dict[Site, Term] = {}
    for term in terms:
        kind = term.technique.kind
        if term.after is not None or kind is None:
            chosen = [named_site(model, graph, term.after or "", term.name)]
        elif candidates := sites.of_kind(kind):
            chosen = candidates
            if term.technique.stage_ends:
                ends = list({site.stage: site for site in candidates}.values())
                chosen = ends if term.option("last") else ends[:-1]
        else:
            hint = f". {term.name}(after='…') acts after a module you name" if "after" in term.technique.options else ""
            raise ValueError(
                f"{type(model).__name__} has no {kind} site for the term {term.name!r}: {sites.missing[kind]}. "
                f"Its sites: {sites.summary()}{hint}"
            )
        for site in chosen:
            if site in assigned:
                raise ValueError(f"the terms {assigned[site]} and {term} both fill {site.path}; keep one of them")
            assigned[site] = term
    return assigned


def set_beta(model: nn.Module, value: float) -> None:
    """Set β of all modules of a model equipped with ``init="anneal"``: 0 is the base model, 1 the paper's.

    Call it before each step, with the part of the annealing that is done.
    """
    record = equip_record(model)
    if record is None or record.init != "anneal":
        kind = "not equipped" if record is None else f"equipped with init={record.init!r}"
        raise ValueError(f"the model is {kind}; set_beta is for equip(model, spec, init='anneal')")
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"beta is {value!r}; expected a number from 0 to 1")
    for module in model.modules():
        if SITE in module.__dict__ and BETA in module._buffers:
            module.get_buffer(BETA).fill_(value)


def _remove_terms(model: nn.Module, patches: Sequence[head.Patch]) -> None:
    remove_inserted(model)
    head.revert(model, patches)


def unequip(model: Model) -> Model:
    """Remove everything that :func:`equip` added, in place: the base model again, with the same weights."""
    _refuse_wrapped_and_folded(model)
    record = equip_record(model)
    if record is None:
        return model
    head.require_parameters(model, record.patches)
    _remove_terms(model, record.patches)
    for path, _, name in (gamma.rpartition(".") for gamma in record.reset_gammas):
        gamma = getattr(model.get_submodule(path), name, None)  # in a frozen batch normalization a buffer
        if isinstance(gamma, Tensor) and bool((gamma == 1).all()):  # not trained since it was set to 1
            nn.init.zeros_(gamma)
    remove_spec_key(model)
    del model.deepsquare_record
    return model


def sites(model: nn.Module, input_shape: Sequence[int] | None = None) -> Sites:
    """Every site of ``model``, with the term that fills it once the model is equipped."""
    record = intact_record(model)
    if record is not None:
        return record.sites
    model = unwrap(model)
    return find_sites(model, trace(model, input_shape))


def equip_record(model: nn.Module) -> EquipRecord | None:
    """The record of ``model`` (or of the model that DDP, EMA or ``torch.compile`` wrapped), if it is equipped."""
    return getattr(unwrap(model), "deepsquare_record", None)


def intact_record(model: nn.Module, *, allow_inner: bool = False) -> EquipRecord | None:
    """As :func:`equip_record`; refuses a model in which a module at a site was replaced after ``equip``.

    It also refuses a model that contains an equipped one, since only the inner model has the record of its sites;
    ``allow_inner`` accepts that.
    """
    record, name = equip_record(model), type(unwrap(model)).__name__
    modules = dict(unwrap(model).named_modules())
    if record is None:
        inner = next((path for path, module in modules.items() if isinstance(module, WithInserted)), None)
        if inner is not None and isinstance(unwrap(model), torch.fx.GraphModule) and not allow_inner:
            raise ValueError(f"this {name} is a graph that torch.fx traced; use the model that was traced")
        if inner is not None and not allow_inner:
            raise ValueError(f"{name} has an equipped model inside ({inner}, …); use that one instead")
        return None
    expected = {f"{site.path}.{PREFIX}{site.term.split('(')[0]}": site.term for site in record.sites if site.term}
    if record.dropout is not None and not record.sites.dropout:
        expected[f"{record.sites.classifier}.{PREFIX}dropout"] = "dropout"
    for path, term in expected.items():
        if path not in modules:
            raise ValueError(
                f"{path.rpartition('.')[0]} has lost its {term}: the module was replaced after equip. Change the model "
                "first, then equip it"
            )
    layer = modules.get(record.sites.classifier)
    classes = None if layer is None else outputs_of(layer)
    if any(site.channels != classes for site in record.sites.of_kind("logits")) and classes is not None:
        record = _with_new_classes(unwrap(model), record)
    return record


def _with_new_classes(model: nn.Module, record: EquipRecord) -> EquipRecord:
    """Bring the record up to date with a classifier that replaced the one it was made for."""
    graph = trace(model, record.sites.input_shape)
    output = graph.nodes[graph.output]
    found = tuple(
        site.of_channels(output.shape[output.channel_dim]) if site.kind == "logits" else site for site in record.sites
    )
    record = replace(record, sites=replace(record.sites, sites=found))
    model.deepsquare_record = record  # type: ignore[assignment]
    return record


def is_folded(model: nn.Module) -> bool:
    """Whether the model is the inference form that :func:`deepsquare.fold` returns."""
    return bool(getattr(model, "deepsquare_folded", False))


def refuse_sharded(model: nn.Module, action: str) -> None:
    """Refuse a model whose parameters are sharded by ``fully_shard``: one process has a part of each."""
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"{action} needs whole parameters, and those of this {type(model).__name__} are sharded; call in every "
            "process get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
            "torch.distributed.checkpoint.state_dict, and in the first one load the result into an equipped model that "
            "is not sharded, and use that"
        )


def _refuse_wrapped_and_folded(model: nn.Module) -> None:
    name = type(model).__name__
    if unwrap(model) is not model:
        raise ValueError(f"this is a {name} around a model; change the model itself, before it is wrapped")
    if is_folded(model):
        raise ValueError(f"this {name} is folded, which cannot be undone; use the model that was folded")
    refuse_sharded(model, "a change of the model")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``, ``AveragedModel``, timm's EMA or a compiled model.

    These have one child, named ``module`` or ``_orig_mod``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (nn.Module), got {model!r}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"this is a {type(model).__name__}, whose code cannot change any more; equip the model first, then "
            "use torch.jit.trace"
        )
    while list(model._modules) in (["module"], ["_orig_mod"]):
        (model,) = model.children()
    return model
