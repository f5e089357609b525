"""The modules that the paper compares with, each by its authors' definition."""

from deepsquare.peers.fisher import FisherVector, fit_fisher
from deepsquare.peers.gates import GatherExcite, GSoP
from deepsquare.peers.heads import BilinearPooling, CompactBilinearPooling, CovariancePooling

__all__ = [
    "BilinearPooling",
    "CompactBilinearPooling",
    "CovariancePooling",
    "FisherVector",
    "GSoP",
    "GatherExcite",
    "fit_fisher",
]
