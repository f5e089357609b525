"""The end of a building block, run in one pass where the tensors and modules allow it."""

from typing import Any

from torch import Tensor

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.nn import SquareExcitation
from deepsquare.surgery.block_ends import EXCITATION, End, Modules, compile_graph
from deepsquare.surgery.insertion import base_class, beta_of


class BlockPass:
    """An end as a function of the values that its branches start from."""

    def __init__(self, end: End, modules: Modules) -> None:
        self.end = end
        self.written_out = compile_graph(end.written_out(), modules)
        self.norm = end.main.norm
        self.norm_forward = base_class(end.main.norm).forward if end.main.norm is not None else None
        self.shortcut = compile_graph(end.shortcut.written_out(), modules)
        excited = end.main.excited
        self.excitation: Any = None if excited is None else excited._modules[EXCITATION]
        self.modules = (*end.modules(modules), *(() if excited is None else (self.excitation,)))

    def run(self, z: Tensor, shortcut: Tensor) -> Tensor:
        """The end's output."""
        residual = self.shortcut(shortcut)
        backend = kernels.backend_for(z, residual)
        if backend is None or type(self.excitation) is not SquareExcitation:
            written_out: Tensor = self.written_out(z, shortcut)
            return written_out
        branch: Tensor = z if self.norm_forward is None else self.norm_forward(self.norm, z)
        if self.end.casts:
            residual = residual.to(branch.dtype)
        alpha, beta = self.excitation.alpha, beta_of(self.excitation)
        return DF.square_excitation_add_relu(branch, alpha, residual, beta, inplace=True)
