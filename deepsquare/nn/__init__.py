"""The modules: each holds the parameters of one function of :mod:`deepsquare.functional` and calls it."""

from deepsquare.nn.activation import EleSquare, ReLUSquare, SquareEncoding
from deepsquare.nn.excitation import ScaleProportion, SquareExcitation
from deepsquare.nn.pooling import GeM, LpPooling, MomentPooling, SquarePooling
from deepsquare.nn.softmin import SquareSoftmin

__all__ = [
    "EleSquare", "GeM", "LpPooling", "MomentPooling", "ReLUSquare", "ScaleProportion", "SquareEncoding",
    "SquareExcitation", "SquarePooling", "SquareSoftmin",
]  # fmt: skip
