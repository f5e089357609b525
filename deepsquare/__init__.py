"""DeepSquare: elementwise squares that improve CNNs at almost no cost.

    >>> import deepsquare as ds
    >>> model = ds.create_model("resnet50", "pooling+excitation")

:func:`equip` adds techniques to a model, :func:`sites` lists where they act, :func:`unequip` removes them,
:func:`fold` returns the inference form; :func:`save` and :func:`load` store model, spec and weights in one file.
"""

from deepsquare import baselines, functional, nn
from deepsquare.batchnorm import recalibrate_batchnorm
from deepsquare.checkpoint import load, load_weights, save
from deepsquare.cost import Cost, cost
from deepsquare.models import create_model, vanilla_cnn
from deepsquare.surgery import equip, fold, param_groups, set_beta, sites, unequip

__version__ = "0.1.0"

__all__ = [
    "Cost", "baselines", "cost", "create_model", "equip", "fold", "functional", "load", "load_weights", "nn",
    "param_groups", "recalibrate_batchnorm", "save", "set_beta", "sites", "unequip", "vanilla_cnn",
]  # fmt: skip
