"""A module inside another module: how an inserted module comes to act at its site.

It becomes a child of the module at the site, named ``deepsquare_<term>``, and that module's ``forward`` runs it on its
input or output. No module of the base model is wrapped, renamed or replaced: its ``state_dict`` keys, its attributes
and its indexing stay as they were, and the new keys are recognised by their name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_module_registration_hook

from deepsquare.surgery.site import Site

PREFIX = "deepsquare_"
SITE = "deepsquare_site"


def insert(model: nn.Module, site: Site, term: str, module: nn.Module) -> None:
    """Let ``module`` act at ``site`` of ``model``, in the model's precision, on its device and in its mode."""
    anchor = next((p for p in model.parameters() if p.is_floating_point()), None)
    if anchor is not None:
        module.to(device=anchor.device, dtype=anchor.dtype)
    setattr(module, SITE, site)
    # _follow_registration does the rest.
    model.get_submodule(site.path).add_module(PREFIX + term, module.train(model.training))


class DynamicSubclass(nn.Module):
    """What goes in front of a module's class, and off it again.

    A class of its own, not a hook: ``torch.compile`` tells classes apart, but by default shares compiled code between
    models that differ in hooks alone, and would run an equipped model as its base.
    """

    deepsquare_front: type[DynamicSubclass]
    deepsquare_base: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the two classes: the combined one has no name that could be imported."""
        return _new, (self.deepsquare_front, self.deepsquare_base), super().__reduce_ex__(protocol)[2]


_classes: dict[tuple[type[DynamicSubclass], type[nn.Module]], type[DynamicSubclass]] = {}


def dynamic_subclass(front: type[DynamicSubclass], base: type[nn.Module]) -> type[DynamicSubclass]:
    """``base`` with ``front`` before it, under the same name; one class for all modules of a kind."""
    if (front, base) not in _classes:
        names = {"deepsquare_front": front, "deepsquare_base": base, "__module__": base.__module__}
        _classes[front, base] = type(base.__name__, (front, base), {**names, "__doc__": base.__doc__})
    return _classes[front, base]


def _new(front: type[DynamicSubclass], base: type[nn.Module]) -> nn.Module:
    both = dynamic_subclass(front, base)
    return both.__new__(both)


class WithInserted(DynamicSubclass):
    """A module at a site: ``forward`` runs the inserted modules too."""

    deepsquare_inserted: dict[str, str]  # name of the child → its position, in the order of insertion

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the base class computes, with the inserted modules before and after it."""
        if args:
            args = (self._run_all("input", args[0]), *args[1:])
        else:  # called by keyword: conv(input=x)
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: self._run_all("input", kwargs[first])}
        return self._run_all("output", super().forward(*args, **kwargs))

    def base_forward(self, x: Tensor) -> Tensor:
        """What the base class computes, alone."""
        y: Tensor = super().forward(x)
        return y

    def _run_all(self, at: str, x: Tensor) -> Tensor:
        for name, position in self.deepsquare_inserted.items():
            if position == at:
                x = _run(getattr(self, name), x)
        return x


def base_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, as it is without anything inserted."""
    return module.deepsquare_base if isinstance(module, WithInserted) else type(module)


def _follow_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Let an inserted module act on whichever module it becomes a child of.

    ``SyncBatchNorm.convert_sync_batchnorm`` and its like build a new normalisation layer and move the old one's
    children over; so the parent's class is changed wherever the child is registered, not only in ``equip``.
    """
    site = child.__dict__.get(SITE) if child is not None and name.startswith(PREFIX) else None
    if site is None:
        return
    if not isinstance(parent, WithInserted):
        parent.__class__ = dynamic_subclass(WithInserted, type(parent))
        parent.deepsquare_inserted = {}  # type: ignore[assignment]
    parent.deepsquare_inserted[name] = site.position  # type: ignore[operator, index]


register_module_module_registration_hook(_follow_registration)


def remove_inserted(model: nn.Module) -> None:
    """The opposite of :func:`insert`, for all that was inserted."""
    for parent in [module for module in model.modules() if isinstance(module, WithInserted)]:
        for name in parent.deepsquare_inserted:
            parent._modules.pop(name, None)
        del parent.deepsquare_inserted
        parent.__class__ = parent.deepsquare_base  # type: ignore[assignment]


def _run(inserted: nn.Module, x: Tensor) -> Tensor:
    """Call the inserted module, which takes (N, C, …), on a tensor as it stands at the site."""
    site: Site = inserted.deepsquare_site  # type: ignore[assignment]
    if site.relu_first:
        x = F.relu(x)
    if site.channel_dim != 1:
        x = x.movedim(site.channel_dim, 1)
    y: Tensor = inserted(x)
    if site.keeps_size:
        y = y.expand(*y.shape[:2], *x.shape[2:])
    return y if site.channel_dim == 1 else y.movedim(1, site.channel_dim)
