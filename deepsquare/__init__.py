"""DeepSquare: elementwise squares that improve CNNs at almost no cost.

    >>> import deepsquare as ds
    >>> model = ds.create_model("resnet50", "pooling+excitation")

:func:`equip` adds techniques to a model, :func:`sites` lists where they act, :func:`unequip` removes them,
:func:`fold` returns the inference form; :func:`save` and :func:`load` store model, spec and weights in one file.
Each name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from deepsquare.cost import Cost, cost  # not lazily: once imported, the module cost would hide the function

if TYPE_CHECKING:
    from deepsquare import baselines, functional, nn
    from deepsquare.checkpoint import load, load_weights, save
    from deepsquare.models import create_model, vanilla_cnn
    from deepsquare.surgery.equip import equip, sites, unequip
    from deepsquare.surgery.fold import fold

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "baselines",
    "cost",
    "create_model",
    "equip",
    "fold",
    "functional",
    "load",
    "load_weights",
    "nn",
    "save",
    "sites",
    "unequip",
    "vanilla_cnn",
]

_MODULES = {
    "checkpoint": ("load", "load_weights", "save"),
    "models": ("create_model", "vanilla_cnn"),
    "surgery": ("equip", "fold", "sites", "unequip"),
}


if not TYPE_CHECKING:  # a type checker takes the names from above, and refuses others

    def __getattr__(name: str) -> Any:
        if name in (*_MODULES, "baselines", "functional", "nn"):
            return importlib.import_module(f"deepsquare.{name}")
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"deepsquare.{module}"), name)
        raise AttributeError(f"module 'deepsquare' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
