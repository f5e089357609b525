"""Fused kernels for the functions of :mod:`deepsquare.functional`: one pass over a map instead of several.

:mod:`~deepsquare.kernels.operations` has one object per operation, with its forward and backward;
:mod:`~deepsquare.kernels.cpu` and :mod:`~deepsquare.kernels.gpu` implement them, and
:mod:`~deepsquare.kernels.dispatch` decides which one runs.
"""

from deepsquare.kernels.dispatch import backend_for, without_kernels
from deepsquare.kernels.operations import MeanSquare, ReLUSquare, SquareExcitation, SquareExcitationAddReLU

__all__ = ["MeanSquare", "ReLUSquare", "SquareExcitation", "SquareExcitationAddReLU", "backend_for", "without_kernels"]
