"""The spirals of Section 3.2: one arm for regression, three arms for classification.

NOTE not in paper: everything but the number of arms. Here the radius grows linearly from 0 to 1 along an arm, and

- the one arm makes 1.5 turns, as many as scikit-learn's Swiss roll; both coordinates have normal noise with
  σ = 0.02, so the expected squared error on noisy points is at least 0.0004;
- each of the three arms sweeps 4 radians and its angles have normal noise with σ = 0.2, as in the notes of
  Stanford's CS231n; the arms are a third of a turn apart.

A sample depends on its seed and split only; splits share no randomness.
"""

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Arms: TypeAlias = npt.NDArray[np.int64]
Split: TypeAlias = Literal["train", "validation", "test"]

TURNS, NOISE = 1.5, 0.02
SWEEP, ANGLE_NOISE = 4.0, 0.2
ARMS = 3


def trajectory(times: Array, turns: float = TURNS) -> Array:
    """The one arm without noise: the points (N, 2) at ``times`` (N,) in [0, 1]."""
    return _polar(times, 2 * math.pi * turns * times)


def one_arm(seed: int, split: Split, points: int, *, turns: float = TURNS, noise: float = NOISE) -> tuple[Array, Array]:
    """Evenly spaced times (N,) in [0, 1], and the noisy points of the trajectory at them (N, 2)."""
    rng = _generator(seed, split, points, noise)
    times = _evenly(points)
    return times, trajectory(times, turns) + noise * rng.standard_normal((points, 2))


def three_arms(seed: int, split: Split, points: int, *, noise: float = ANGLE_NOISE) -> tuple[Array, Arms]:
    """Points (3N, 2), ``points`` = N on each arm, and the arm of each, 0, 1 or 2 (3N,)."""
    rng = _generator(seed, split, points, noise)
    arms = np.repeat(np.arange(ARMS), points)
    radii = np.tile(_evenly(points), ARMS)
    angles = 2 * math.pi * arms / ARMS + SWEEP * radii + noise * rng.standard_normal(ARMS * points)
    return _polar(radii, angles), arms


def _evenly(points: int) -> Array:
    """The midpoints of equal intervals in [0, 1]: the arms have no common point at the center."""
    return (np.arange(points) + 0.5) / points


def _polar(radii: Array, angles: Array) -> Array:
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _generator(seed: int, split: Split, points: int, noise: float) -> np.random.Generator:
    splits: tuple[Any, ...] = get_args(Split)
    if split not in splits:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(splits)}")
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected 0 or more")
    if points < 1:
        raise ValueError(f"points is {points}; expected at least 1")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise is {noise}; expected a finite standard deviation, 0 for none")
    return np.random.default_rng([seed, splits.index(split)])
