"""Fused kernels for the functions of :mod:`deepsquare.functional`: one pass over a map instead of several.

:mod:`~deepsquare.kernels.dispatch` has one object per operation, with its forward and backward, and decides which
backend runs it; :mod:`~deepsquare.kernels.cpu` and :mod:`~deepsquare.kernels.gpu` implement them.
"""

from deepsquare.kernels.dispatch import (
    BlendedSquare,
    MeanAndMeanSquare,
    MeanSquare,
    ReLUSquare,
    SquareExcitation,
    SquareExcitationAddReLU,
    backend_for,
    without_kernels,
)

__all__ = [
    "BlendedSquare", "MeanAndMeanSquare", "MeanSquare", "ReLUSquare", "SquareExcitation", "SquareExcitationAddReLU",
    "backend_for", "without_kernels",
]  # fmt: skip
