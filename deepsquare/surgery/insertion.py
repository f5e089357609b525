"""Modules inserted at sites.

An inserted module becomes a child of the module at the site, named ``deepsquare_<term>``, and that module's ``forward``
runs it on its input or output. No module of the base model is wrapped, renamed or replaced: its ``state_dict`` keys,
attributes and indexing stay the same, and the new keys are recognized by their prefix.
"""

from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_module_registration_hook

from deepsquare import functional as DF
from deepsquare.nn import EleSquare, SquareExcitation, SquarePooling
from deepsquare.surgery.site import Site
from deepsquare.surgery.trace import float_tensor

PREFIX = "deepsquare_"
SITE = "deepsquare_site"
BETA = "beta"
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
    return module.deepsquare_base if isinstance(module, WithInserted) else type(module)


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
    """Let an inserted module act on any module that it becomes a child of.

    ``SyncBatchNorm.convert_sync_batchnorm`` and similar functions build a new normalization layer and move the
    children of the old one to it; so the parent's class changes wherever the child is registered.
    """
    site = child.__dict__.get(SITE) if child is not None and name.startswith(PREFIX) else None
    if site is None:
        return
    if not isinstance(parent, WithInserted):
        parent.__class__ = dynamic_subclass(WithInserted, type(parent))
        parent.deepsquare_inserted = {}  # type: ignore[assignment]
    parent.deepsquare_inserted[name] = site.position  # type: ignore[operator, index]


@cache
def register_hook() -> None:
    """Register :func:`_follow_registration` with torch, once: with the first inserted or unpickled module."""
    register_module_module_registration_hook(_follow_registration)


def remove_inserted(model: nn.Module) -> None:
    """Remove all inserted modules; every module gets the class of the base model back."""
    for module in list(model.modules()):
        if isinstance(module, WithInserted):
            for name in module.deepsquare_inserted:
                module._modules.pop(name, None)
            del module.deepsquare_inserted
        while isinstance(module, DynamicSubclass):
            module.__class__ = module.deepsquare_base  # type: ignore[assignment]
