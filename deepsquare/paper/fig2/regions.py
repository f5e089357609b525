"""The decision regions of the two-unit network of Section 3.1, and an exact count of their components.

The class, Equations (9)–(13), is decided by the sign of

    D(h) = y₁ − y₂ = a·σ(h₁) + c·σ(h₂) + d,    a = w₁₁ − w₁₂,  c = w₂₁ − w₂₂,  d = b₁ − b₂.

An affine map has connected fibres, so {y₁ > y₂} has as many connected components in the x-plane as {D > 0}
has on the image of f₁, which is the whole h-plane (rank 2), a line (rank 1) or a point (rank 0). Cut that
image into cells on which D is monotone in each coordinate, with the ends at infinity as vertices:

- the plane, by its two axes: a wheel, with the origin as hub and a rim joining the ends of the half-axes;
- a line, where h₁ = 0 or h₂ = 0 (ReLU) or at the vertex of the parabola (EleSquare): a path.

In a cell, {D > 0} is connected, and it is empty unless D is positive at a vertex of that cell; two vertices
of one cell are joined by an edge. Hence the components of {D > 0} are those of the graph on the vertices with
D positive, and the claims of Section 3.1 can be read off the wheel. Round the rim D grows as (a, c, a, c)
for EleSquare, which alternates when ac < 0: two components, except that the hub joins those with the sign of d.
For ReLU it grows as (a, c, 0, 0), whose positive entries are neighbors, as are its negative ones: one component.

Every float is a rational number, so signs are taken in exact arithmetic: no grid, no window, no tolerance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy import ndimage

from deepsquare.functional import square

Activation: TypeAlias = Literal["square", "relu"]
Numbers: TypeAlias = Sequence[float | Fraction]
Vector: TypeAlias = tuple[Fraction, Fraction]
Triple: TypeAlias = tuple[Fraction, Fraction, Fraction]
Vertex: TypeAlias = tuple[Vector, Vector]  # (p, q): the end of p + t·q as t → ∞; the point p itself if q = 0
Edge: TypeAlias = tuple[int, int]
Window: TypeAlias = tuple[float, float, float, float]  # x₁ from and to, x₂ from and to
Floats: TypeAlias = npt.NDArray[np.float64]

ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {"square": square, "relu": F.relu}

ZERO = Fraction(0)
ORIGIN: Vector = (ZERO, ZERO)
ONE = Fraction(1)
HALF_AXES: tuple[Vector, ...] = ((ONE, ZERO), (ZERO, ONE), (-ONE, ZERO), (ZERO, -ONE))
PLANE: list[Vertex] = [(ORIGIN, ORIGIN), *((ORIGIN, axis) for axis in HALF_AXES)]  # the h-plane cut by its axes
WHEEL: tuple[Edge, ...] = ((0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (2, 3), (3, 4), (4, 1))


@dataclass(frozen=True)
class Network:
    """Two inputs, two hidden units, two classes: y = Wᵀσ(Ax + a₀) + b, Equations (9)–(12)."""

    first: tuple[Vector, Vector]  # A, by rows
    first_bias: Vector  # a₀
    second: tuple[Vector, Vector]  # W, by rows; W is not transposed
    second_bias: Vector  # b

    @classmethod
    def from_weights(
        cls, first: Sequence[Numbers], first_bias: Numbers, second: Sequence[Numbers], second_bias: Numbers
    ) -> "Network":
        """The network with exactly these weights, as fractions."""
        a1, a2, w1, w2 = (_vector(row) for row in (*first, *second))
        return cls((a1, a2), _vector(first_bias), (w1, w2), _vector(second_bias))

    @property
    def decision(self) -> Triple:
        """The coefficients (a, c, d) of D, Equation (16)."""
        (w11, w12), (w21, w22) = self.second
        return w11 - w12, w21 - w22, self.second_bias[0] - self.second_bias[1]

    @property
    def rank(self) -> int:
        (a11, a12), (a21, a22) = self.first
        if a11 * a22 != a12 * a21:
            return 2
        return int(any((a11, a12, a21, a22)))


def components(network: Network, activation: Activation) -> tuple[int, int]:
    """The numbers of connected components, over all of ℝ², of the open sets {y₁ > y₂} and {y₁ < y₂}."""
    if activation not in ("square", "relu"):
        raise ValueError(f"activation is {activation!r}; expected 'square' or 'relu'")
    decision = network.decision
    vertices, edges = (PLANE, WHEEL) if network.rank == 2 else _line(network, activation)
    signs = [_sign(decision, activation, vertex) for vertex in vertices]
    return _graph_components(signs, 1, edges), _graph_components(signs, -1, edges)


def on_grid(network: Network, activation: Activation, window: Window, size: int) -> npt.NDArray[np.bool_]:
    """Where y₁ > y₂ on a size × size grid over the window, by the network's forward pass in torch."""
    first, first_bias, second, second_bias = (
        torch.tensor(np.array(part, dtype=np.float64))
        for part in (network.first, network.first_bias, network.second, network.second_bias)
    )
    x1, x2 = (torch.linspace(*ends, size, dtype=torch.float64) for ends in (window[:2], window[2:]))
    points = torch.stack(torch.meshgrid(x1, x2, indexing="xy"), dim=-1)  # (size, size, 2)
    hidden = ACTIVATIONS[activation](F.linear(points, first, first_bias))
    y = F.linear(hidden, second.T, second_bias)
    return (y[..., 0] > y[..., 1]).numpy()


def window_components(network: Network, activation: Activation, window: Window, size: int = 600) -> tuple[int, int]:
    """``components`` estimated on a grid over a window: wrong if the window cuts a region."""
    above = on_grid(network, activation, window, size)
    return ndimage.label(above)[1], ndimage.label(~above)[1]


def boundary(network: Network, activation: Activation, reach: float = 50.0) -> list[Floats]:
    """The curves D = 0, Equation (16), in the x-plane: solved for one unit at each value of the other."""
    a, c, d = (float(value) for value in network.decision)
    first, bias = np.array(network.first, dtype=np.float64), np.array(network.first_bias, dtype=np.float64)
    free = np.linspace(-reach, reach, 20_001)
    level = free**2 if activation == "square" else np.maximum(free, 0)
    curves: list[Floats] = []
    for unit, coefficient, other in ((0, a, c), (1, c, a)):
        if coefficient == 0:
            continue
        target = -(d + other * level) / coefficient
        target = np.where(target > 0, target, np.nan)  # NaN: no such point; the plotted line breaks there
        for solved in (np.sqrt(target), -np.sqrt(target)) if activation == "square" else (target,):
            h = np.stack((solved, free) if unit == 0 else (free, solved))
            curves.append((np.linalg.inv(first) @ (h - bias[:, None])).astype(np.float64))
    return curves


def _line(network: Network, activation: Activation) -> tuple[list[Vertex], Sequence[Edge]]:
    """The line h = p + t·q, a point when q = 0, cut where D is not monotone."""
    (a11, a12), (a21, a22) = network.first
    q1, q2 = (a11, a21) if a11 or a21 else (a12, a22)  # a nonzero column spans the image of a matrix of rank 1
    p1, p2 = network.first_bias
    if activation == "square":
        a, c, _ = network.decision
        bend = a * q1 * q1 + c * q2 * q2  # D = bend·t² + 2·(a·p₁q₁ + c·p₂q₂)·t + …
        cuts = [-(a * p1 * q1 + c * p2 * q2) / bend] if bend else []
    else:
        cuts = sorted(-p / q for p, q in ((p1, q1), (p2, q2)) if q)
    points: list[Vertex] = [((p1 + t * q1, p2 + t * q2), ORIGIN) for t in cuts]
    vertices = [((p1, p2), (-q1, -q2)), *points, ((p1, p2), (q1, q2))]
    return vertices, list(pairwise(range(len(vertices))))


def _sign(decision: Triple, activation: Activation, vertex: Vertex) -> int:
    """The sign of D at a vertex: along p + t·q, as t → ∞, the highest power decides."""
    a, c, d = decision
    (p1, p2), (q1, q2) = vertex
    first, second = _activated(activation, p1, q1), _activated(activation, p2, q2)
    along = tuple(a * u + c * v + k for u, v, k in zip(first, second, (ZERO, ZERO, d), strict=True))
    zeros = (ZERO, ZERO, ZERO)
    return (along > zeros) - (along < zeros)  # tuples compare by the first entries that differ


def _activated(activation: Activation, p: Fraction, q: Fraction) -> Triple:
    """The coefficients of t², t and 1 in σ(p + t·q) for large t."""
    if activation == "square":
        return q * q, 2 * p * q, p * p
    return (ZERO, q, p) if (q, p) > (ZERO, ZERO) else (ZERO, ZERO, ZERO)


def _graph_components(signs: Sequence[int], sign: int, edges: Sequence[Edge]) -> int:
    """The number of connected components of the graph on the vertices with this sign."""
    labels = {vertex: vertex for vertex, value in enumerate(signs) if value == sign}
    for i, j in edges:
        if i in labels and j in labels:
            old, new = labels[i], labels[j]
            labels = {vertex: new if label == old else label for vertex, label in labels.items()}
    return len(set(labels.values()))


def _vector(values: Numbers) -> Vector:
    try:
        first, second = (Fraction(value) for value in values)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"got {list(values)}; expected two finite numbers") from error
    return first, second
