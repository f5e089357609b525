"""Where DeepSquare and the baselines act in a CNN: the four kinds of site.

=================== ========================================================================================
pooling             the global average pooling before the classifier
logits              after the last fully connected layer
branch_end          the main branch's output, just before it is added or concatenated to the shortcut
last_spatial_conv   the input of the main branch's last spatial convolution
=================== ========================================================================================

An inserted module becomes a child of the module at the site, named ``deepsquare_<term>``, and that module's ``forward``
runs it on its input or output. No module of the base model is wrapped, renamed or replaced: its ``state_dict`` keys,
attributes and indexing stay the same, and the new keys are recognized by their prefix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_module_registration_hook

from deepsquare.surgery.trace import float_tensor

PREFIX = "deepsquare_"
SITE = "deepsquare_site"
Kind = Literal["pooling", "logits", "branch_end", "last_spatial_conv", "named"]
KINDS: tuple[Kind, ...] = ("pooling", "logits", "branch_end", "last_spatial_conv")


@dataclass(frozen=True)
class Site:
    """A position in the data flow of a model at which a module can be inserted."""

    kind: Kind  # "named" for a module that the spec names
    path: str  # the module it is attached to, as in model.get_submodule(path)
    position: Literal["input", "output"]  # whether the inserted module acts on that module's input or on its output
    shape: tuple[int, ...]  # of the tensor it acts on, without the batch, for the traced input size
    channel_dim: int = 1  # where the channels are in that tensor, counted with the batch
    block: str = ""  # for the two kinds inside building blocks, the path of the block
    stage: int = 0  # for the same two, the number of the stage: successive blocks whose maps have one shape
    relu_first: bool = False  # the model calls F.relu on that module's output before it pools: so does the insertion
    keeps_size: bool = False  # the model's pooling has a fixed window: the pooled value is expanded to the map's size
    term: str = ""  # the term of the spec that fills the site; empty while it is free

    @property
    def channels(self) -> int:
        """The number of channels (of classes, for ``logits``)."""
        return self.shape[self.channel_dim - 1]

    @property
    def spatial(self) -> tuple[int, ...]:
        """The shape without the channels."""
        return self.shape[: self.channel_dim - 1] + self.shape[self.channel_dim :]


@dataclass(frozen=True)
class Sites:
    """The sites of a model, block by block."""

    sites: tuple[Site, ...]
    missing: dict[Kind, str]  # for each kind that the model does not have, the reason
    input_shape: tuple[int, ...]  # of one input, without the batch, that the model was traced with
    classifier: str = ""  # the path of the last fully connected layer, if there is one
    dropout: str = ""  # the path of the model's own dropout layer directly before it, if there is one

    def of_kind(self, kind: Kind) -> list[Site]:
        """The sites of one kind."""
        return [site for site in self.sites if site.kind == kind]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def summary(self) -> str:
        """How many of each kind, in one line."""
        return ", ".join(f"{len(self.of_kind(kind))} {kind}" for kind in KINDS)

    def __str__(self) -> str:
        lines = []
        for site in self:
            size = "×".join(map(str, site.shape))
            line = f"{site.kind:<18} {site.position:>6} of {site.path:<32} {size:<14} {site.term}".rstrip()
            functional = site.kind == "pooling" and site.position == "output"
            lines.append(line + ("  (pools here: the pooling itself is not a module)" if functional else ""))
        lines += [f"{kind:<18} none: {reason}" for kind, reason in self.missing.items()]
        return "\n".join(lines)


def insert(model: nn.Module, site: Site, term: str, module: nn.Module) -> None:
    """Let ``module`` act at ``site`` of ``model``, in the model's precision, on its device and in its mode."""
    anchor = float_tensor(model)
    module.to(device=anchor.device, dtype=anchor.dtype)
    setattr(module, SITE, site)
    register_hook()  # which does the rest
    model.get_submodule(site.path).add_module(PREFIX + term, module.train(model.training))


class DynamicSubclass(nn.Module):
    """A mixin that is put in front of a module's class at run time, and removed again.

    A class, not a hook: ``torch.compile`` distinguishes classes, but by default shares compiled code between models
    that differ in hooks only, and would run an equipped model as its base.
    """

    deepsquare_mixin: "type[DynamicSubclass]"
    deepsquare_base: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the two classes: the combined one cannot be imported by name."""
        return _new, (self.deepsquare_mixin, self.deepsquare_base), super().__reduce_ex__(protocol)[2]


_classes: dict[tuple[type[DynamicSubclass], type[nn.Module]], type[DynamicSubclass]] = {}


def dynamic_subclass(mixin: type[DynamicSubclass], base: type[nn.Module]) -> type[DynamicSubclass]:
    """The subclass of ``mixin`` and ``base`` with the name of ``base``; one for all modules of that class."""
    if (mixin, base) not in _classes:
        names = {"deepsquare_mixin": mixin, "deepsquare_base": base, "__module__": base.__module__}
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
            y: Tensor = inserted(x)
            if site.keeps_size:
                y = y.expand(*y.shape[:2], *x.shape[2:])
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
