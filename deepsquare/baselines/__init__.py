"""The modules that the paper compares with, each by its authors' definition."""

from deepsquare.baselines.channel_attention import GatherExcite, GSoP
from deepsquare.baselines.fisher import FisherVector, fit_fisher
from deepsquare.baselines.second_order import BilinearPooling, CompactBilinearPooling, CovariancePooling

__all__ = [
    "BilinearPooling", "CompactBilinearPooling", "CovariancePooling", "FisherVector", "GSoP", "GatherExcite",
    "fit_fisher",
]  # fmt: skip
