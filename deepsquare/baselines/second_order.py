"""Second-order statistics of a map, their normalizations, and the poolings by them.

They are computed :func:`in_fp32`: a covariance is a sum of products, and a matrix root loses half of the digits. A
pooling takes a map (N, C, H, W) to (N, ``out_channels``, 1, 1): more values than channels, for a wider classifier.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

P = ParamSpec("P")

for _name in ("covariance", "covariance_root", "bilinear_vector", "compact_bilinear_vector"):
    fx.wrap(_name)  # as in :mod:`deepsquare.functional`


def in_fp32(function: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """``function`` of a map in at least float32, with autocast disabled; its result is in the map's dtype."""

    @wraps(function)
    def run(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        kind = x.device.type if x.device.type != "meta" else "cpu"
        with torch.autocast(kind, enabled=False):
            return function(x if x.dtype == torch.float64 else x.float(), *args, **kwargs).to(x.dtype)

    return run


@in_fp32
def covariance(x: Tensor) -> Tensor:
    """Σ = X·(1/N)(I − 11ᵀ/N)·Xᵀ of the N positions of a map: (B, C, spatial…) → (B, C, C)."""
    x = x.flatten(2)
    centered = x - x.mean(2, keepdim=True)
    return centered @ centered.transpose(1, 2) / x.shape[2]  # not mT, which ONNX's older exporter and Core ML lack


def root_by_eigenvalues(matrix: Tensor) -> Tensor:
    """The square root of symmetric positive semidefinite matrices (…, C, C), by eigendecomposition (MPN-COV).

    Its gradient is that of the Sylvester equation dΣ = dR·R + R·dR: in the basis of the eigenvectors, division by
    √λ_i + √λ_j. It has no term 1/(λ_i − λ_j), for which ``torch.linalg.eigh`` returns NaN where eigenvalues
    coincide, as the zeros of a rank-deficient matrix do. Where both are zero the gradient is set to zero: a covariance
    of N positions keeps its rank under small changes of the map, so that block does not change to first order.
    """
    # A graph of torch.jit.trace cannot hold a Python function: its gradient is that of eigh.
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return _RootByEigenvalues.forward(matrix)[0]
    root: Tensor = _RootByEigenvalues.apply(matrix)[0]  # type: ignore[no-untyped-call]
    return root


class _RootByEigenvalues(torch.autograd.Function):
    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        matrix = torch.where(finite, matrix, 0)  # eigh fails on values that are not finite
        try:
            values, vectors = torch.linalg.eigh(matrix)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # LAPACK's divide and conquer may not converge on an ill-conditioned matrix in float32; in float64 it does.
            values, vectors = (t.to(matrix.dtype) for t in torch.linalg.eigh(matrix.double()))
        # Eigenvalues within rounding error are zero, whatever their sign.
        noise = values[..., -1:].abs() * (values.shape[-1] * torch.finfo(values.dtype).eps)
        roots = torch.where(values > noise, values, 0).sqrt()
        root = (vectors * roots.unsqueeze(-2)) @ vectors.transpose(-2, -1)
        return torch.where(finite, root, torch.nan), roots, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gradient: Tensor = _Sylvester.apply(grads[0], *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return gradient


class _Sylvester(torch.autograd.Function):
    """X of R·X + X·R = Q for a symmetric R with eigenvalues ``roots`` and eigenvectors ``vectors``."""

    @staticmethod
    def forward(q: Tensor, root: Tensor, roots: Tensor, vectors: Tensor) -> Tensor:
        sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        x = vectors.mT @ q @ vectors
        x = torch.where(sums > 0, x / torch.where(sums > 0, sums, 1), 0)
        return vectors @ x @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        *matrices, x = ctx.saved_tensors
        y: Tensor = _Sylvester.apply(grads[0], *matrices)  # type: ignore[no-untyped-call]
        return y, -(y @ x.mT + x.mT @ y), None, None


def root_by_newton_schulz(matrix: Tensor, iterations: int = 5) -> Tensor:
    """The square root of symmetric positive semidefinite matrices (…, C, C) by matrix products only (iSQRT-COV).

    A = Σ/tr Σ, Y₀ = A, Z₀ = I; then T = ½(3I − Z·Y), Y ← Y·T, Z ← T·Z; the result is √(tr Σ)·Y. It is close to the
    root for the large eigenvalues and below it for the small ones. A zero matrix has a zero root, and a zero gradient.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; expected at least 1 (its authors use 5)")
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    empty = trace <= torch.finfo(torch.float32).tiny
    trace = torch.where(empty, 1, trace)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    y, z = matrix / trace, identity
    for step in range(iterations):
        t = 1.5 * identity - 0.5 * (y if step == 0 else z @ y)
        y = y @ t
        if step < iterations - 1:
            z = t if step == 0 else t @ z
    return torch.where(empty, 0, trace.sqrt() * y)


def upper_triangle(matrix: Tensor) -> Tensor:
    """The C(C + 1)/2 values on and above the diagonal: (B, C, C) → (B, C(C + 1)/2)."""
    size = matrix.shape[-1]
    row, column = torch.triu_indices(size, size, device=matrix.device)
    return matrix.flatten(1)[:, row * size + column]


def signed_root(x: Tensor, eps: float = 1e-8) -> Tensor:
    """sign(x)·√(|x| + ε), elementwise; its gradient is at most 1/(2√ε), and 0 at 0."""
    return torch.sign(x) * (x.abs() + eps).sqrt()


def bilinear(x: Tensor) -> Tensor:
    """Equation (6): B = X·Xᵀ/N, the second moments of all pairs of channels: (B, C, spatial…) → (B, C²)."""
    x = x.flatten(2)
    return (x @ x.transpose(1, 2) / x.shape[2]).flatten(1)


def tensor_sketch(x: Tensor, index: Tensor, sign: Tensor, size: int) -> Tensor:
    """A random projection of :func:`bilinear` that preserves inner products in expectation, without its C² values.

    A count sketch adds channel c, times ``sign[c]``, to bin ``index[c]`` of ``size`` bins; there are two independent
    ones, so both are (2, C). The count sketch of an outer product is the circular convolution of two count sketches,
    hence a product of their Fourier transforms. The mean over the positions is taken before the inverse transform:
    (B, C, spatial…) → (B, size).
    """
    if not x.numel():  # torch.fft.rfft refuses empty tensors
        return x.new_zeros(x.shape[0], size)
    x = x.flatten(2).transpose(1, 2)  # (B, N, C)
    sketches = (x.new_zeros(*x.shape[:-1], size).index_add(-1, index[i], x * sign[i]) for i in (0, 1))
    first, second = map(torch.fft.rfft, sketches)
    sketch: Tensor = torch.fft.irfft((first * second).mean(1), n=size)
    return sketch


@in_fp32
def covariance_root(x: Tensor, iterations: int) -> Tensor:
    """The upper triangle of the covariance's square root: (B, C, spatial…) → (B, C(C + 1)/2)."""
    matrix = covariance(x)
    return upper_triangle(root_by_newton_schulz(matrix, iterations) if iterations else root_by_eigenvalues(matrix))


@in_fp32
def bilinear_vector(x: Tensor) -> Tensor:
    """:func:`bilinear` with signed square root and L2 normalization."""
    return F.normalize(signed_root(bilinear(x)))


@in_fp32
def compact_bilinear_vector(x: Tensor, index: Tensor, sign: Tensor, size: int) -> Tensor:
    """:func:`tensor_sketch` with signed square root and L2 normalization."""
    return F.normalize(signed_root(tensor_sketch(x, index, sign.to(x.dtype), size)))


class SecondOrderPooling(nn.Module, ABC):
    """Pools a map to ``out_channels`` values, computed by ``values``.

    The subclasses take the map's ``channels`` first; ``reduce`` is applied before the statistics are computed.
    """

    def __init__(self, reduce: nn.Module, out_channels: int) -> None:
        super().__init__()
        self.reduce = reduce
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, 1, 1)."""
        return self.values(self.reduce(x))[..., None, None]

    @abstractmethod
    def values(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels)."""


def init_kaiming(layer: nn.Module) -> None:
    """Initialize a convolution as in ResNet and the authors' releases: normal, by the fan-out."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _reduction(channels: int, size: int) -> nn.Sequential:
    layers = nn.Conv2d(channels, size, 1, bias=False), nn.BatchNorm2d(size), nn.ReLU(inplace=True)
    return nn.Sequential(*layers).apply(init_kaiming)


class CovariancePooling(SecondOrderPooling):
    """MPN-COV (Li et al., 2017) and iSQRT-COV (Li et al., 2018): the square root of the channels' covariance.

    The channels are reduced to ``size``, which gives size·(size + 1)/2 values. ``iterations`` are those of the
    Newton–Schulz method (iSQRT-COV), 0 for the eigendecomposition (MPN-COV).
    """

    def __init__(self, channels: int, size: int = 256, iterations: int = 0) -> None:
        super().__init__(_reduction(channels, size), size * (size + 1) // 2)
        self.iterations = iterations

    def values(self, x: Tensor) -> Tensor:
        return covariance_root(x, self.iterations)


class BilinearPooling(SecondOrderPooling):
    """Bilinear pooling (Lin et al., 2015), Equation (6): second moments, signed square root, L2 normalization.

    The channels are reduced to ``size``, which gives size² values, or for 0 not reduced.
    """

    def __init__(self, channels: int, size: int = 128) -> None:
        super().__init__(_reduction(channels, size) if size else nn.Identity(), (size or channels) ** 2)

    def values(self, x: Tensor) -> Tensor:
        return bilinear_vector(x)


class CompactBilinearPooling(SecondOrderPooling):
    """Compact bilinear pooling (Gao et al., 2016): a tensor sketch, of ``size`` values, of the second moments."""

    index: Tensor
    sign: Tensor

    def __init__(self, channels: int, size: int = 8192) -> None:
        super().__init__(nn.Identity(), size)
        self.register_buffer("index", torch.randint(size, (2, channels)))
        self.register_buffer("sign", 2.0 * torch.randint(2, (2, channels)) - 1)

    def values(self, x: Tensor) -> Tensor:
        return compact_bilinear_vector(x, self.index, self.sign, self.out_channels)
