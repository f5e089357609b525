"""The paper's equations, one pure function each: the reference that every other form is held to.

Chen et al., "DeepSquare: Boosting the Learning Power of Deep Convolutional Neural Networks with Elementwise Square
Operators". A *map* is a tensor (N, C, spatial…) with one, two or three spatial dimensions, in any memory layout; HW
stands for the number of its spatial positions. A pooling returns (N, C), or (N, C, 1, …) with ``keepdim``. The fused
forms of :mod:`deepsquare.kernels` decorate their formula.

NOTE not in paper: β. Where a function takes ``beta``, a tensor of one element, it returns (1 − β) · base + β · result
in the same number of passes over the map; the base is what a network without it has there: the mean for a pooling, else
``x`` itself. So β = 0 leaves a trained network as it is, and β = 1, as None, is the paper's function.

NOTE not in paper: number formats. Half types (float16, bfloat16) are squared and summed in float32. Under autocast the
poolings and Square-Softmin return float32, as torch's own ``pow`` and ``norm`` do; in a half-precision model they
return its type, where a value beyond that type's range becomes inf.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from deepsquare import kernels

# ``torch.fx`` calls these as a whole: their checks and formulas depend on the shape and the type of the map.
for _name in (
    "square", "relu_square", "square_pooling", "blend", "moment_pooling", "gem_pooling", "lp_pooling",
    "gaussian_kernel", "square_softmin", "scale_proportion", "square_excitation", "square_excitation_add_relu",
):  # fmt: skip
    fx.wrap(_name)

_HALF = (torch.float16, torch.bfloat16)
_REAL = (torch.float64, torch.float32, *_HALF)


def square(x: Tensor, beta: Tensor | None = None) -> Tensor:
    """Equation (14): σ(t) = t², elementwise; any shape, the type of ``x``. With β: t · (1 − β + β · t)."""
    _require_real(x)
    if beta is not None:
        _require_one_element("beta", beta)
        return _blended_square(x, beta)
    return x * x  # not pow: autocast would turn pow into float32 and double the memory of the map


@kernels.BlendedSquare
def _blended_square(x: Tensor, beta: Tensor) -> Tensor:
    beta = beta.to(x.dtype).reshape(())
    return x * (1 - beta + beta * x)  # x for β = 0, even where t² overflows


def relu_square(x: Tensor) -> Tensor:
    """Equation (19): σ(t) = max(0, t)², elementwise; any shape, the type of ``x``."""
    _require_real(x)
    return _relu_square(x)


@kernels.ReLUSquare
def _relu_square(x: Tensor) -> Tensor:
    positive = F.relu(x)
    return positive * positive  # autograd saves one tensor for both operations


def square_pooling(x: Tensor, keepdim: bool = False, beta: Tensor | None = None) -> Tensor:
    """Equation (20), Square-Pooling: G_k = 1/HW · Σ_ij F_ijk².

    ``x`` is F. The result is the second moment about the origin: mean² + variance (Equation 21). With β it is
    (1 − β) · mean + β · G.
    """
    _require_map(x)
    if beta is not None:
        _require_one_element("beta", beta)
        both = _mean_and_mean_square(x)
        return _pooled(blend(both[0], both[1], beta), x, keepdim)
    return _pooled(_mean_square(x), x, keepdim)


def blend(x: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """(1 − β) · base + β · value; for β = 0 the base, even where the value has overflowed.

    The base is ``x``, or the mean of this map where ``value`` is pooled.
    """
    base = (x if x.shape == value.shape else x.mean(_spatial(x), keepdim=True)).to(value.dtype)
    beta = beta.to(base.dtype).reshape(())
    bypassed = torch.logical_and(beta == 0, torch.logical_not(value.abs() < math.inf))
    return (1 - beta) * base + beta * torch.where(bypassed, base, value)


@kernels.MeanAndMeanSquare
def _mean_and_mean_square(x: Tensor) -> Tensor:
    wide = x.to(_accumulation_dtype(x))
    return torch.stack([wide.mean(_spatial(x)), wide.square().mean(_spatial(x))])  # (2, N, C)


@kernels.MeanSquare
def _mean_square(x: Tensor) -> Tensor:
    return x.to(_accumulation_dtype(x)).square().mean(_spatial(x))  # (N, C)


def moment_pooling(x: Tensor, order: int, keepdim: bool = False) -> Tensor:
    """Table 3: the moment about the origin 1/HW · Σ_ij F_ijk^order of F = ``x``; 1 is the mean, 2 Square-Pooling."""
    _require_map(x)
    if not isinstance(order, int) or order < 1:
        raise ValueError(f"order is {order!r}, expected a positive integer: 1 for the mean, 2 for Square-Pooling.")
    if order == 2:
        return square_pooling(x, keepdim)
    wide = _accumulation_dtype(x)
    powers = x if order == 1 else x.to(wide).pow(order)
    return _pooled(powers.mean(_spatial(x), dtype=wide), x, keepdim)


def gem_pooling(x: Tensor, p: float | Tensor, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """Equation (8), generalised-mean pooling: O = (1/HW · Σ_ij I(i, j)^p)^(1/p).

    ``x`` is the map I; ``p`` a positive number or a tensor of one element, which may be learned.

    NOTE not in paper: values below ``eps`` count as ``eps``, as in the GeM authors' release, so that the
    power of a negative value and the slope of the root at zero are never met.
    """
    _require_map(x)
    if isinstance(p, Tensor):
        _require_one_element("p", p)
        p = p.to(_accumulation_dtype(x)).reshape(())
    elif not 0 < p < math.inf:
        raise ValueError(f"p is {p!r}, expected a positive finite number; GeM starts from 3.")
    if not eps > 0:
        raise ValueError(f"eps is {eps!r}, expected a positive number such as 1e-6.")
    positive = x.to(_accumulation_dtype(x)).clamp(min=eps)
    # The mean is homogeneous, so dividing by the (detached) peak changes nothing but the range of the powers: without
    # it an all-eps map has eps^p = 0 in float32 from p = 8 on, and the gradient of p is NaN.
    peak = positive.amax(_spatial(x), keepdim=True).detach()
    mean = (positive / peak).pow(p).mean(_spatial(x))  # (N, C)
    return _pooled(mean.pow(1 / p) * peak.reshape(mean.shape), x, keepdim)


def lp_pooling(x: Tensor, p: float, kernel: Tensor, keepdim: bool = False) -> Tensor:
    """Equation (7), Lp-pooling: O = (Σ_ij |I(i, j)|^p · G(i, j))^(1/p).

    ``x`` is the map I; ``kernel`` is G, of the map's spatial shape (see ``gaussian_kernel``).

    NOTE not in paper: |I| for I, whose power is undefined where a map is negative; p ≥ 1, below which the
    slope at zero is infinite; the gradient at an all-zero map, where the root has none, is 0.
    """
    _require_map(x)
    if not 1 <= p < math.inf:
        raise ValueError(f"p is {p!r}, expected a finite number of at least 1, such as 2.")
    if kernel.shape != x.shape[2:]:
        raise ValueError(
            f"The kernel has shape {tuple(kernel.shape)}, expected the map's spatial shape "
            f"{tuple(x.shape[2:])}: build it with gaussian_kernel(x.shape[2:])."
        )
    magnitude = x.to(_accumulation_dtype(x)).abs()
    peak = magnitude.amax(_spatial(x), keepdim=True).detach()  # keeps the powers in range, as in gem_pooling
    peak = torch.where(peak > 0, peak, 1)
    total = ((magnitude / peak).pow(p) * kernel.to(magnitude.dtype)).sum(_spatial(x))  # (N, C)
    zero = total == 0
    root = torch.where(zero, 0, torch.where(zero, 1, total).pow(1 / p))
    return _pooled(root * peak.reshape(root.shape), x, keepdim)


def gaussian_kernel(
    size: Sequence[int], sigma: float = 0.25, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The Gaussian kernel G of Equation (7): shape ``size``, centred, sum 1.

    NOTE not in paper: the width. ``sigma`` is relative to each side of the map, so that one value fits every input
    size; at 0.25 the border is two standard deviations from the center, where the weight has fallen to 13%.
    """
    if not sigma > 0:
        raise ValueError(f"sigma is {sigma!r}, expected a positive fraction of the map's side, such as 0.25.")
    sigma = max(sigma, 1e-9)  # of a side below 2**25 only the center is left then, and no factor overflows
    dtype = dtype or torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    weights = []
    for side in size:
        distance = 2 * torch.arange(side, device=device, dtype=wide) + 1 - side  # from the center, in half positions
        # Less the square at the center, 0 or 1: the largest weight is 1 for any sigma, so they do not all underflow.
        square = distance.square() - (side + 1) % 2
        weight = torch.exp(square * (-0.125 / (side * sigma) / (side * sigma)))
        weights.append((weight / weight.sum()).to(dtype))
    return functools.reduce(lambda kernel, weight: kernel.unsqueeze(-1) * weight, weights)


def square_softmin(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Equation (24), Square-Softmin: y_k = -s_k · x_k².

    ``x`` holds the last FC layer's outputs, (N, K) or (N, K, 1, 1); ``scale`` is s, nonnegative, of one
    element (shared) or K; None leaves s out. Returns the logits, of the shape of ``x``.
    """
    _require_real(x)
    if x.ndim < 2:
        raise ValueError(f"The logits have shape {tuple(x.shape)}, expected (N, K) or (N, K, 1, 1): add the batch.")
    wide = _accumulation_dtype(x)
    logits = -x.to(wide).square()
    if scale is not None:
        if scale.numel() != 1 and scale.numel() != x.shape[1]:
            raise ValueError(
                f"The scale has {scale.numel()} elements, expected 1 (shared) or {x.shape[1]}, one per class "
                f"of the logits, which have shape {tuple(x.shape)}."
            )
        logits = logits * scale.to(wide).reshape(-1, *[1] * (x.ndim - 2))
    return logits.to(_result_dtype(x))


def scale_proportion(g: Tensor, alpha: Tensor) -> Tensor:
    """Equation (25), Scale-Proportion: s_k = G_k / (G_k + α²).

    ``g`` is G ≥ 0 of any shape, ``alpha`` a tensor of one element; returns s in [0, 1], shape and type of ``g``.

    NOTE not in paper: s is 1 wherever G + α² is below the smallest normal number, so that α = 0 is exactly the
    identity and every gradient is finite. G = inf, an overflowed square, gives 1, the limit.
    """
    _require_real(g)
    _require_one_element("alpha", alpha)
    wide = g.to(_accumulation_dtype(g))
    offset = alpha.to(wide.dtype).reshape(()).square()
    below_normal = torch.logical_or(offset == 0, wide + offset < torch.finfo(wide.dtype).tiny)
    one = torch.logical_or(below_normal, wide == math.inf)
    # Both summands are replaced, not the quotient: a gradient through 0/0 would be NaN times 0.
    wide, offset = torch.where(one, 1, wide), torch.where(one, 0, offset)
    # The quotient of the smaller summand: autograd's 1/(G + α²) − G/(G + α²)² would cancel where α² ≪ G.
    small = wide < offset
    quotient = torch.where(small, wide, offset) / (wide + offset)
    return torch.where(small, quotient, 1 - quotient).to(g.dtype)


def square_excitation(x: Tensor, alpha: Tensor, beta: Tensor | None = None) -> Tensor:
    """Square-Excitation: F_ijk · s_k, where s is Scale-Proportion (25) of Square-Pooling (20) of F.

    ``x`` is F (N, C, spatial…), ``alpha`` a tensor of one element; returns the shape and type of ``x``. For half types
    G and s stay in float32, and the product is rounded once: accurate for every finite float16 map. With β the factor
    is 1 − β + β · s_k.
    """
    _require_map(x)
    _require_one_element("alpha", alpha)
    if beta is not None:
        _require_one_element("beta", beta)
    return _square_excitation(x, alpha, beta)


@kernels.SquareExcitation
def _square_excitation(x: Tensor, alpha: Tensor, beta: Tensor | None) -> Tensor:
    s = scale_proportion(_mean_square(x), alpha)
    if beta is not None:
        beta = beta.to(s.dtype).reshape(())
        s = 1 - beta + beta * s
    return (x * _unflatten(s, x)).to(x.dtype)  # autograd saves x and s, never a float32 copy of x


_square_excitation_add_relu = kernels.SquareExcitationAddReLU(_square_excitation)


def square_excitation_add_relu(
    x: Tensor, alpha: Tensor, residual: Tensor, beta: Tensor | None = None, *, inplace: bool = False
) -> Tensor:
    """The end of a residual block with Square-Excitation: max(0, F_ijk · s_k + R_ijk).

    ``x`` is F, ``alpha`` and ``beta`` as in :func:`square_excitation`, ``residual`` is R, of the shape and type of
    ``x``. Fused, it costs no more than the addition and the ReLU alone. ``inplace`` allows the result to be written
    over ``x``, which must not be used afterwards; it has no effect where a gradient needs ``x``.
    """
    _require_map(x)
    _require_one_element("alpha", alpha)
    if beta is not None:
        _require_one_element("beta", beta)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"The residual has shape {tuple(residual.shape)} and type {residual.dtype}, expected those of the "
            f"branch: {tuple(x.shape)} and {x.dtype}."
        )
    return _square_excitation_add_relu(x, alpha, beta, residual, inplace=inplace)


def _pooled(pooled: Tensor, x: Tensor, keepdim: bool) -> Tensor:
    """A pooling's result (N, C) of the map ``x``, in the type and shape the caller gets."""
    if pooled.dtype is not x.dtype:
        pooled = pooled.to(_result_dtype(x))
    return _unflatten(pooled, x) if keepdim else pooled


def _unflatten(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.reshape(*per_channel.shape, *[1] * (x.ndim - 2))  # (N, C) → (N, C, 1, …)


def _spatial(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _HALF else x.dtype


def _result_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)  # the meta device knows no autocast
    return _accumulation_dtype(x) if autocast else x.dtype


def _require_real(x: Tensor) -> None:
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.").strip("_")
        convert = "call this for each of its parts" if x.is_nested else "convert it by x.to_dense()"
        raise TypeError(f"The tensor is {kind}, expected a dense one: {convert}.")
    if x.dtype not in _REAL:
        raise TypeError(f"The tensor has type {x.dtype}, expected a real floating-point type: convert it by x.float().")


def _require_map(x: Tensor) -> None:
    if x.layout is torch.strided and not x.is_nested and x.dtype in _REAL and x.ndim > 2 and x.numel():
        return  # the common case: this runs at every call
    _require_real(x)
    if x.ndim < 3:
        raise ValueError(
            f"The map has shape {tuple(x.shape)}, expected (N, C, spatial…) with spatial dimensions: "
            "apply this before the map is pooled or flattened."
        )
    if any(side == 0 for side in x.shape[2:]):
        raise ValueError(
            f"The map has shape {tuple(x.shape)}, expected at least one spatial position: "
            "the input image is too small for the network's strides."
        )


def _require_one_element(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {value!r}, expected a tensor of one element.")
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected one element shared by all channels.")
    if value.is_complex():
        raise TypeError(f"{name} is of type {value.dtype}, expected real numbers.")
