"""The equations once more, as loops over Python floats (float64): what every other form is compared with."""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def square(x: Array) -> Array:
    return _each(x, lambda t: t * t)


def relu_square(x: Array) -> Array:
    return _each(x, lambda t: max(0.0, t) * max(0.0, t))


def square_pooling(x: Array) -> Array:
    return moment_pooling(x, 2)


def moment_pooling(x: Array, order: int) -> Array:
    return _each_channel(x, lambda values: math.fsum(math.prod([v] * order) for v in values) / len(values))


def gem_pooling(x: Array, p: float, eps: float = 1e-6) -> Array:
    def mean(values: list[float]) -> float:
        return math.pow(math.fsum(math.pow(max(v, eps), p) for v in values) / len(values), 1 / p)

    return _each_channel(x, mean)


def lp_pooling(x: Array, p: float, kernel: Array) -> Array:
    weights = [float(w) for w in kernel.ravel()]

    def norm(values: list[float]) -> float:
        total = math.fsum(math.pow(abs(v), p) * w for v, w in zip(values, weights, strict=True))
        return math.pow(total, 1 / p)

    return _each_channel(x, norm)


def gaussian_kernel(size: tuple[int, ...], sigma: float) -> Array:
    kernel = np.empty(size)
    for position in np.ndindex(*size):
        distances = [(i - (side - 1) / 2) / side for i, side in zip(position, size, strict=True)]
        kernel[position] = math.exp(-sum(d * d for d in distances) / (2 * sigma * sigma))
    return np.asarray(kernel / math.fsum(kernel.ravel()), dtype=np.float64)


def square_softmin(x: Array, scale: Array | None = None) -> Array:
    y = np.empty_like(x)
    for index in np.ndindex(*x.shape):
        s = 1.0 if scale is None else float(scale.ravel()[index[1] if scale.size > 1 else 0])
        y[index] = -s * float(x[index]) ** 2
    return y


def scale_proportion(g: Array, alpha: float) -> Array:
    return _each(g, lambda value: 1.0 if value + alpha * alpha == 0 else value / (value + alpha * alpha))


def square_excitation(x: Array, alpha: float) -> Array:
    s = scale_proportion(square_pooling(x), alpha)
    y = np.empty_like(x)
    for n, c in np.ndindex(*x.shape[:2]):
        y[n, c] = x[n, c] * s[n, c]
    return y


def _each(x: Array, function: Callable[[float], float]) -> Array:
    return np.array([function(float(t)) for t in x.ravel()], dtype=np.float64).reshape(x.shape)


def _each_channel(x: Array, function: Callable[[list[float]], float]) -> Array:
    return np.array([function(values) for values in _channels(x)], dtype=np.float64).reshape(x.shape[:2])


def _channels(x: Array) -> Iterator[list[float]]:
    for n, c in np.ndindex(*x.shape[:2]):
        yield [float(v) for v in x[n, c].ravel()]
