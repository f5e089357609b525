"""The end of a building block, run in one pass where the tensors and modules allow it."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import cpu
from deepsquare.nn import SquareExcitation
from deepsquare.surgery.block_ends import EXCITATION, NORMS, Branch, End, Modules, compile_graph, is_fresh
from deepsquare.surgery.block_training import block_training
from deepsquare.surgery.insertion import base_class, beta_of

SMALL_PLANE = 16  # values: below it, contiguous planes take longer one by one
_PLAIN_TYPES = (Tensor, nn.Parameter)


class BlockPass:
    """An end as a function of the values that its branches start from."""

    def __init__(self, end: End, modules: Modules) -> None:
        self.written_out = compile_graph(end.written_out(), modules)
        self.shuffled, self.casts = end.shuffled, end.casts
        self.main, self.shortcut = _Side(end.main, modules), _Side(end.shortcut, modules)
        self.kernel = cpu.Kernel.BLOCK_SHUFFLE if end.shuffled else cpu.Kernel.BLOCK_ADD
        self.fresh = is_fresh(end.main.source, modules)
        self.parameters = _Addresses()
        excited = end.main.excited
        self.excitation: Any = None if excited is None else excited.get_submodule(EXCITATION)
        # Their hooks are not called, or would see what is overwritten.
        self.modules: list[nn.Module] = [*end.modules(modules)]
        if excited is not None:
            self.modules.append(excited.get_submodule(EXCITATION))
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
        """The excitation, addition and ReLU as one kernel; with the normalization, where it is that of the batch."""
        backend = kernels.backend_for(z, shortcut)
        if self.shuffled or self.main.relu or backend is None:
            return None
        normalizes = backend is cpu and self._normalizes(z)
        if self.excitation is None and not normalizes:
            return None
        alpha, beta = self._alpha_and_beta()
        residual = self.shortcut.written_out(shortcut)
        if normalizes and residual.shape == z.shape and (self.casts or residual.dtype is z.dtype):
            y = block_training(self.main.norm, z, residual, alpha, beta)
            if y is not None:
                return y
        branch = self.main.normalized(z)
        if alpha is not None and residual.shape == branch.shape and (self.casts or residual.dtype is branch.dtype):
            return DF.square_excitation_add_relu(branch, alpha, residual.to(branch.dtype), beta, inplace=True)
        if alpha is not None:
            branch = DF.square_excitation(branch, alpha, beta)
        return torch.relu(branch.add_(residual) if self.casts else branch + residual)

    def _alpha_and_beta(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.excitation is None else (self.excitation.alpha, beta_of(self.excitation))

    def _normalizes(self, z: Tensor) -> bool:
        """Whether the kernel can compute the normalization: that of the batch, with parameters that it can read."""
        norm, channels = self.main.norm, z.shape[1]
        if not self.main.affine or not norm.training or not self.main.takes(z) or norm.eps <= 0:
            return False
        values = z.numel() // channels  # of a channel
        if values < 2 or (values < SMALL_PLANE * len(z) and z.is_contiguous()):
            return False
        if not all(scalar is None or (_is_plain(scalar) and scalar.numel() == 1) for scalar in self._alpha_and_beta()):
            return False
        tensors = norm.weight, norm.bias, norm.running_mean, norm.running_var
        return all(tensor is None or (_is_plain(tensor) and tensor.numel() == channels) for tensor in tensors)

    def _without_grad(self, z: Tensor, shortcut: Tensor) -> Tensor | None:
        """The whole end in one pass. Whether something compiles or transforms operations, the block has asked."""
        if type(z) is not Tensor or type(shortcut) is not Tensor or z.shape != shortcut.shape or z.ndim < 3:
            return None
        if not z.is_cpu:
            return self._with_grad(z, shortcut)
        if shortcut.dtype is not z.dtype and self.casts:
            shortcut = shortcut.to(z.dtype)
        scalars = self._scalars()
        known = shortcut.dtype is z.dtype and shortcut.is_cpu and not shortcut.is_neg() and cpu.supports(z)
        if scalars is None or not known or not (self.main.takes(z) and self.shortcut.takes(shortcut)):
            return None
        main, other = self.main, self.shortcut
        channels, fresh, relu = z.shape[1], self.fresh, other.relu
        norm, norm_of_shortcut = main.numbers(channels), other.numbers(channels)
        if norm is None:
            z, fresh, norm = main.normalized(z), True, cpu.NO_NORM
        if norm_of_shortcut is None:
            shortcut, relu, norm_of_shortcut = other.written_out(shortcut), False, cpu.NO_NORM
        if self.shuffled:
            n, c, *spatial = z.shape
            layout = cpu.memory_layout(z)
            y = torch.empty(n, 2 * c, *spatial, dtype=z.dtype, device=z.device, memory_format=layout)
        else:
            y = z if fresh else torch.empty_like(z)
        eps = (main.norm.eps if main.affine else 0.0, other.norm.eps if other.affine else 0.0)
        cpu.block_end(self.kernel, z, shortcut, y, (*norm, *norm_of_shortcut), eps, scalars, (main.relu, relu))
        return y

    def _scalars(self) -> Sequence[int] | None:
        """Where α and β are; None for what a kernel cannot read."""
        excitation = self.excitation
        if excitation is None:
            return 0, 0
        alpha = excitation._parameters.get("alpha")
        return None if alpha is None else self.parameters.read((alpha, beta_of(excitation)))


class _Side:
    """A branch: its modules, and the numbers of its batch normalization."""

    def __init__(self, branch: Branch, modules: Modules) -> None:
        self.written_out = compile_graph(branch.written_out(), modules)
        self.norm: Any = branch.norm
        self.relu = branch.relu
        self.base = nn.Identity if branch.norm is None else base_class(branch.norm)
        self.affine = self.base in NORMS
        self.ndim = 3 + NORMS.index(self.base) if self.affine else 0
        self.parameters = _Addresses()

    def normalized(self, x: Tensor) -> Tensor:
        """The branch up to its normalization, without what is inserted there."""
        normalized: Tensor = x if self.norm is None else self.base.forward(self.norm, x)
        return normalized

    def numbers(self, channels: int) -> Sequence[int] | None:
        """Where the running mean and variance, weight and bias are; None where it is not a fixed affine function."""
        norm = self.norm
        if norm is None:
            return cpu.NO_NORM
        if not self.affine or norm.training:
            return None
        mean, variance = (_member(norm, norm._buffers, name) for name in ("running_mean", "running_var"))
        if mean is None or variance is None or mean.numel() != channels:
            return None
        weight, bias = (_member(norm, norm._parameters, name) for name in ("weight", "bias"))
        return self.parameters.read((mean, variance, weight, bias))

    def takes(self, z: Tensor) -> bool:
        """Whether the normalization takes a map of these dimensions, which it checks itself."""
        return not self.affine or z.ndim == self.ndim


def _member(norm: Any, members: dict[str, Any], name: str) -> Any:
    """An attribute that is usually one of ``members``, faster than ``nn.Module.__getattr__``."""
    return members[name] if name in members else getattr(norm, name)


class _Addresses:
    """Where the values of float32 tensors are. The tensors are checked when they, or their memory, are others."""

    def __init__(self) -> None:
        self.known: tuple[tuple[Tensor | None, ...], list[int]] = ((), [])

    def read(self, tensors: tuple[Tensor, *tuple[Tensor | None, ...]]) -> list[int] | None:
        """Their addresses, 0 for None; None if a kernel cannot read them."""
        known, addresses = self.known
        if known and all(map(operator.is_, tensors, known)):
            now = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            if now == addresses and all(tensor is None or tensor.is_contiguous() for tensor in tensors):
                return now
        for tensor in tensors:
            if tensor is not None and not (_is_plain(tensor) and tensor.shape == tensors[0].shape):
                return None
        now = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.known = tensors, now
        return now


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in _PLAIN_TYPES and tensor.dtype is torch.float32 and tensor.is_cpu
    return plain and tensor.is_contiguous()
