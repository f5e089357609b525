"""DeepSquare: elementwise squares that add learning power to CNNs at next to no cost.

    >>> import deepsquare as ds
    >>> model = ds.create_model("resnet50", "pooling+excitation")

:func:`equip` adds techniques to a model, :func:`sites` shows where they stand, :func:`unequip` takes them off,
:func:`fold` makes the test-phase form; :func:`save` and :func:`load` keep model, spec and weights in one file.
"""

import importlib.util

import deepsquare._torchvision
from deepsquare import baselines, functional, nn
from deepsquare.checkpoint import load, load_weights, save
from deepsquare.cost import Cost, cost
from deepsquare.models import create_model, vanilla_cnn
from deepsquare.surgery import equip, fold, sites, unequip

if importlib.util.find_spec("timm") is not None:
    import deepsquare.timm_models  # noqa: F401  (registers the paper's networks)

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
