"""The end of a building block, run in one pass where the tensors and modules allow it."""

from typing import Any

import torch
from torch import Tensor, nn

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import cpu
from deepsquare.nn import SquareExcitation
from deepsquare.surgery.block_ends import EXCITATION, NORMS, Branch, End, Modules, compile_graph, is_fresh
from deepsquare.surgery.insertion import base_class, beta_of

_PLAIN_TYPES = (Tensor, nn.Parameter)


class BlockPass:
    """An end as a function of the values that its branches start from."""

    def __init__(self, end: End, modules: Modules) -> None:
        self.written_out = compile_graph(end.written_out(), modules)
        self.shuffled, self.casts = end.shuffled, end.casts
        self.main, self.shortcut = _Side(end.main, modules), _Side(end.shortcut, modules)
        self.fresh = is_fresh(end.main.source, modules)
        excited = end.main.excited
        self.excitation: Any = None if excited is None else excited.get_submodule(EXCITATION)
        # Their hooks are not called, or would see what is overwritten.
        self.modules: list[nn.Module] = [*end.modules(modules)]
        if excited is not None:
            self.modules.append(self.excitation)
        if self.fresh:
            self.modules.append(modules[str(end.main.source.target)])

    def run(self, z: Tensor, shortcut: Tensor) -> Tensor:
        """The end's output."""
        if self.excitation is None or type(self.excitation) is SquareExcitation:
            y = self._with_grad(z, shortcut) if torch.is_grad_enabled() else self._without_grad(z, shortcut)
            if y is not None:
                return y
        written_out: Tensor = self.written_out(z, shortcut)
        return written_out

    def _with_grad(self, z: Tensor, shortcut: Tensor) -> Tensor | None:
        """The excitation, addition and ReLU in one pass, after the normalization."""
        if self.excitation is None or self.shuffled or self.main.relu or kernels.backend_for(z, shortcut) is None:
            return None
        branch, residual = self.main.normalized(z), self.shortcut.written_out(shortcut)
        if self.casts:
            residual = residual.to(branch.dtype)
        alpha, beta = self.excitation.alpha, beta_of(self.excitation)
        return DF.square_excitation_add_relu(branch, alpha, residual, beta, inplace=True)

    def _without_grad(self, z: Tensor, shortcut: Tensor) -> Tensor | None:
        """The whole end in one pass."""
        backend = kernels.backend_for(z, shortcut)
        if backend is not cpu:
            return None if backend is None else self._with_grad(z, shortcut)
        if z.shape != shortcut.shape or (z.dtype is not shortcut.dtype and not self.casts):
            return None
        alpha = beta = 0
        if self.excitation is not None:
            alpha, beta = _address(self.excitation.alpha), _address(beta_of(self.excitation))
            if alpha < 0 or beta < 0:
                return None
        fresh, relu, norms = self.fresh, self.shortcut.relu, self.main.addresses()
        if norms is None:
            z, fresh, norms = self.main.normalized(z), True, cpu.NO_NORM
        norms_of_shortcut = self.shortcut.addresses()
        if norms_of_shortcut is None:
            shortcut, relu, norms_of_shortcut = self.shortcut.written_out(shortcut), False, cpu.NO_NORM
        if self.shuffled:
            n, c, *spatial = z.shape
            y = torch.empty(n, 2 * c, *spatial, dtype=z.dtype, memory_format=cpu.memory_layout(z))
        else:
            y = z if fresh else torch.empty_like(z)
        cpu.block_end(
            cpu.Kernel.BLOCK_SHUFFLE if self.shuffled else cpu.Kernel.BLOCK_ADD, z, shortcut.to(z.dtype), y,
            norms=(*norms, *norms_of_shortcut), eps=(self.main.eps, self.shortcut.eps), alpha=alpha, beta=beta,
            relu=(self.main.relu, relu),
        )  # fmt: skip
        return y


class _Side:
    """A branch: its modules, and the numbers of its batch normalization."""

    def __init__(self, branch: Branch, modules: Modules) -> None:
        self.written_out = compile_graph(branch.written_out(), modules)
        self.norm: Any = branch.norm
        self.relu = branch.relu
        self.base = nn.Identity if branch.norm is None else base_class(branch.norm)
        self.affine = self.base in NORMS
        self.eps: float = getattr(branch.norm, "eps", 0.0)

    def normalized(self, x: Tensor) -> Tensor:
        """The branch up to its normalization, without what is inserted there."""
        normalized: Tensor = x if self.norm is None else self.base.forward(self.norm, x)
        return normalized

    def addresses(self) -> tuple[int, ...] | None:
        """Where the normalization's numbers are; None where it is not a fixed affine function."""
        norm = self.norm
        if norm is None:
            return cpu.NO_NORM
        buffers, parameters = norm._buffers, norm._parameters
        mean = buffers.get("running_mean")
        if norm.training or mean is None or not self.affine:
            return None
        tensors = (mean, buffers.get("running_var"), parameters.get("weight"), parameters.get("bias"))
        addresses = tuple(map(_address, tensors))
        return None if min(addresses) < 0 or tensors[1] is None else addresses


def _address(tensor: Tensor | None) -> int:
    """Where the float32 values of a tensor are; 0 for None, -1 for a tensor that a kernel cannot read."""
    if tensor is None:
        return 0
    plain = type(tensor) in _PLAIN_TYPES and tensor.dtype is torch.float32 and tensor.is_cpu
    return tensor.data_ptr() if plain and tensor.is_contiguous() else -1
