"""Modules inserted at sites.

An inserted module becomes a child of the module at the site, named ``deepsquare_<term>``, and that module's ``forward``
runs it on its input or output. No module of the base model is wrapped, renamed or replaced: its ``state_dict`` keys,
attributes and indexing stay the same, and the new keys are recognized by their prefix.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_module_registration_hook

from deepsquare import functional as DF
from deepsquare.nn import EleSquare, SquareExcitation, SquarePooling, SquareSoftmin
from deepsquare.surgery.inputs import float_tensor
from deepsquare.surgery.site import Site

PREFIX = "deepsquare_"
SITE = "deepsquare_site"
WIDTH = "deepsquare_width"  # on a layer that was widened for the pooling before it: how many values that returns
BETA = "beta"
PLAN = "deepsquare_plan"  # on a block that is fused: how it ran last; not copied with it
CLASSES = "deepsquare_classes"  # on the last fully connected layer: the module inserted at its logits
Init = Literal["paper", "identity", "anneal"]
INITS: tuple[Init, ...] = get_args(Init)
BLENDING = (EleSquare, SquareExcitation, SquarePooling)  # ``forward`` takes β: one pass over the map, not three


def insert(model: nn.Module, site: Site, term: str, module: nn.Module) -> None:
    """Let ``module`` act at ``site`` of ``model``, in the model's precision, on its device and in its mode."""
    anchor = float_tensor(model)
    module.to(device=anchor.device, dtype=anchor.dtype)
    setattr(module, SITE, site)
    register_hook()  # which does the rest
    model.get_submodule(site.path).add_module(PREFIX + term, module.train(model.training))


def add_beta(module: nn.Module, init: Init) -> None:
    """Let ``module`` start at the identity: give it β = 0, a parameter to learn or a buffer to be set."""
    beta = torch.zeros(1)
    if init == "identity":
        module.register_parameter(BETA, nn.Parameter(beta))
    else:
        module.register_buffer(BETA, beta)


def beta_of(module: nn.Module) -> Tensor | None:
    """β of an inserted module; None where it acts as the paper says, which is β = 1."""
    beta = module._parameters.get(BETA)  # not through the slower ``__getattr__``: this runs at every call
    return module._buffers.get(BETA) if beta is None else beta


def drop_beta(module: nn.Module) -> None:
    """Let an inserted module act as the paper says."""
    module._parameters.pop(BETA, None)
    module._buffers.pop(BETA, None)


def _blended(module: nn.Module, x: Tensor, beta: Tensor) -> Tensor:
    """(1 − β) · base + β · ``module(x)``: the base is the mean for a pooling, else ``x``."""
    if isinstance(module, BLENDING):
        blended: Tensor = module(x, beta)
        return blended
    return DF.blend(x, module(x), beta)


class DynamicSubclass(nn.Module):
    """A mixin that is put in front of a module's class at run time, and removed again.

    A class, not a hook: ``torch.compile`` distinguishes classes, but by default shares compiled code between models
    that differ in hooks only, and would run an equipped model as its base.
    """

    deepsquare_mixin: "type[DynamicSubclass]"
    deepsquare_base: type[nn.Module]

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` calls first."""
        raise TypeError(
            f"torch.jit.script cannot compile an equipped model (here {type(self).__name__}); use "
            "torch.jit.trace(model.eval(), x), torch.export.export(model, (x,)) or torch.compile(model)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the two classes: the combined one cannot be imported by name."""
        return _new, (self.deepsquare_mixin, self.deepsquare_base), super().__reduce_ex__(protocol)[2]


_classes: dict[tuple[type[DynamicSubclass], type[nn.Module]], type[DynamicSubclass]] = {}


def dynamic_subclass(mixin: type[DynamicSubclass], base: type[nn.Module]) -> type[DynamicSubclass]:
    """The subclass of ``mixin`` and ``base`` with the name of ``base``; one for all modules of that class."""
    if (mixin, base) not in _classes:
        names = {"deepsquare_mixin": mixin, "deepsquare_base": base, "__module__": base.__module__}
        # The name in the graphs of torch.jit.trace: pnnx takes a module for the base class by the name alone.
        names["_jit_override_qualname"] = f"__torch__.deepsquare.{base.__module__}.{base.__qualname__}"
        _classes[mixin, base] = type(base.__name__, (mixin, base), {**names, "__doc__": base.__doc__})
    return _classes[mixin, base]


def _new(mixin: type[DynamicSubclass], base: type[nn.Module]) -> nn.Module:
    register_hook()
    combined = dynamic_subclass(mixin, base)
    return combined.__new__(combined)


class WithInserted(DynamicSubclass):
    """A module at a site: ``forward`` also runs the inserted modules."""

    deepsquare_inserted: dict[str, str]  # name of the child → its position, in the order of insertion

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The ``forward`` of the base class, with the inserted modules before and after it."""
        if args:
            args = (self._run_all("input", args[0]), *args[1:])
        else:  # called by keyword: conv(input=x)
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: self._run_all("input", kwargs[first])}
        return self._run_all("output", super().forward(*args, **kwargs))

    def _run_all(self, at: str, x: Tensor) -> Tensor:
        """Call the modules inserted at this position, which take (N, C, …), on the tensor at their site."""
        for name, position in self.deepsquare_inserted.items():
            if position != at:
                continue
            inserted = getattr(self, name)
            site: Site = inserted.deepsquare_site
            if site.relu_first:
                x = F.relu(x)
            if site.channel_dim != 1:
                x = x.movedim(site.channel_dim, 1)
            beta = beta_of(inserted)
            y: Tensor = inserted(x) if beta is None else _blended(inserted, x, beta)
            if site.keeps_size:
                y = y.expand(y.shape[:2] + x.shape[2:])
            x = y if site.channel_dim == 1 else y.movedim(1, site.channel_dim)
        return x


def base_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without inserted modules."""
    cls = type(module)  # of which torch may have made a subclass since (parametrizations, ``fully_shard``)
    base: type[nn.Module] = vars(cls).get("deepsquare_base", cls)
    return base


def is_watched(module: nn.Module) -> bool:
    """Whether a hook or a patched ``forward`` observes the module's own input or output."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


def _follow_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Let an inserted module act on any module that it becomes a child of, and on what replaces that one.

    ``SyncBatchNorm.convert_sync_batchnorm`` and similar functions build a new normalization layer and move the
    children of the old one to it; so the parent's class changes wherever the child is registered.
    """
    site = child.__dict__.get(SITE) if child is not None and name.startswith(PREFIX) else None
    if site is None:
        old = parent._modules.get(name)
        if old is not None and old is not child:
            _carry_over(old, child)
        return
    if not isinstance(parent, WithInserted):
        parent.__class__ = dynamic_subclass(WithInserted, type(parent))
        parent.deepsquare_inserted = {}  # type: ignore[assignment]
    parent.deepsquare_inserted[name] = site.position  # type: ignore[operator, index]


@cache
def register_hook() -> None:
    """Register :func:`_follow_registration` with torch, once: with the first inserted or unpickled module."""
    register_module_module_registration_hook(_follow_registration)


def _carry_over(old: nn.Module, new: nn.Module | None) -> None:
    """Move the modules inserted in ``old``, or below it, to ``new``, which replaces it; all of them or none."""
    kept = set() if new is None else set(new.modules())
    same_layout = new is not None and _layout(old) == _layout(new)
    moves: list[tuple[nn.Module, nn.Module, str]] = []
    marks: list[tuple[nn.Module, nn.Module, str]] = []
    for path, module in _of_this_model(old):
        if module in kept:
            continue  # wrapped, not lost
        target = new if not path else new.get_submodule(path) if new is not None and same_layout else None
        for name in module.__dict__.get("deepsquare_inserted", ()):
            inserted = module.get_submodule(name)
            if inserted in kept or (target is not None and name in target._modules):
                continue  # moved or copied by who replaces the module
            problem = "it has no module at this place" if target is None else _misfit(inserted, target)
            if target is None or problem:
                raise _lost(inserted, target or new, problem)
            moves.append((module, target, name))
        at_logits = module.__dict__.get(CLASSES)
        knows_classes = target is not None and (outputs_of(target) is not None or type(target) is base_class(module))
        if at_logits is not None and not knows_classes:
            raise _lost(
                at_logits, target or new, "it does not say its number of classes (out_features or out_channels)"
            )
        marks += _marks(module, target)
    for module, target, mark in marks:
        target.__dict__[mark] = module.__dict__.pop(mark)
        if mark == CLASSES:
            _fit_classes(target.__dict__[mark], module, target)
    for module, target, name in moves:
        inserted = module.get_submodule(name)
        del module._modules[name]
        del module.deepsquare_inserted[name]  # type: ignore[union-attr, operator]
        target.add_module(name, inserted)
        if not module.deepsquare_inserted:
            _restore_class(module)


def _lost(inserted: nn.Module, new: nn.Module | None, problem: str) -> ValueError:
    site: Site = inserted.__dict__[SITE]
    kind = "None" if new is None else f"the new {type(new).__name__}"
    return ValueError(
        f"{site.path} has an inserted {type(inserted).__name__}, which {kind} cannot take over: {problem}. Call "
        "deepsquare.unequip(model) before you replace the module"
    )


def _layout(module: nn.Module) -> list[str]:
    return [path for path, _ in module.named_modules() if PREFIX not in path]


def _of_this_model(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``module`` and what is below it, without equipped models: those keep their modules wherever they are."""
    if "deepsquare_record" in module.__dict__:
        return
    yield path, module
    for name, child in module.named_children():
        if not name.startswith(PREFIX):
            yield from _of_this_model(child, f"{path}.{name}" if path else name)


def outputs_of(layer: nn.Module) -> int | None:
    """The number of values that a fully connected layer or a convolution returns; None for other modules."""
    outputs = getattr(layer, "out_features", getattr(layer, "out_channels", None))
    return outputs if isinstance(outputs, int) else None


def _misfit(inserted: nn.Module, new: nn.Module) -> str:
    """Why ``inserted`` cannot act in ``new`` as it did in the module before; empty if it can."""
    site: Site = inserted.__dict__[SITE]
    if isinstance(new, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return "its children are other layers"
    if site.kind == "pooling" and site.position == "input" and not _averages(new, site):
        return "it is not a global average pooling"
    return ""


def _averages(pool: nn.Module, site: Site) -> bool:
    """Whether ``pool`` returns the mean of each channel of a map."""
    spatial = [d for d in range(1, len(site.shape) + 1) if d != site.channel_dim]
    maps = torch.linspace(0, 1, math.prod(site.shape), device="cpu", dtype=torch.float32).square()
    maps = maps.reshape(1, *site.shape)
    try:
        return torch.allclose(pool(maps).flatten(), maps.mean(spatial).flatten())
    except Exception:  # it does not take the map, or returns another number of values
        return False


def _marks(old: nn.Module, new: nn.Module | None) -> list[tuple[nn.Module, nn.Module, str]]:
    """What the surgery noted on a layer, for the one that replaces it; refuses one that does not fit."""
    width = old.__dict__.get(WIDTH)
    inputs = getattr(new, "in_features", getattr(new, "in_channels", width))
    if width is not None and inputs != width:
        raise ValueError(
            f"the inserted pooling returns {width} values and the new {type(new).__name__} reads {inputs}; build it "
            f"for {width}, or call deepsquare.unequip(model) before you replace the layer"
        )
    return [(old, new, mark) for mark in (CLASSES, WIDTH) if mark in old.__dict__ and new is not None]


def _fit_classes(inserted: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Give what is inserted at the logits as many classes as the new classifier has."""
    site: Site = inserted.__dict__[SITE]
    classes = outputs_of(new)
    if classes is None or classes == site.channels or outputs_of(old) != site.channels:
        return
    setattr(inserted, SITE, site.of_channels(classes))
    if isinstance(inserted, SquareSoftmin):
        inserted.set_num_classes(classes)


def _restore_class(module: nn.Module) -> None:
    """Give a module without inserted modules its class in the base model."""
    for name in ("deepsquare_inserted", PLAN):
        module.__dict__.pop(name, None)
    if isinstance(module, DynamicSubclass):
        module.__class__ = _plain_class(type(module))  # type: ignore[assignment]


def _plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` without our mixins; a subclass that torch made of such a class for one module is made of the base."""
    while "deepsquare_base" in vars(cls):
        cls = vars(cls)["deepsquare_base"]
    if not issubclass(cls, DynamicSubclass):
        return cls
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(map(_plain_class, cls.__bases__)), body)


def remove_inserted(model: nn.Module) -> None:
    """Remove all inserted modules; every module gets the class of the base model back."""
    for module in list(model.modules()):
        for mark in (CLASSES, WIDTH):
            module.__dict__.pop(mark, None)
        for name in module.__dict__.get("deepsquare_inserted", ()):
            module._modules.pop(name, None)
        _restore_class(module)
