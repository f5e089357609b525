"""What a claim is, and the kinds of evidence that test it, as data; ``report/ledger.py`` judges them on the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from deepsquare.paper.verdict import Hypothesis


@dataclass(frozen=True)
class Accuracy:
    """Hypotheses about rows of a regime, all of which the claim needs, or any.

    A row of the short schedule is named with ``@short`` in another regime.
    """

    regime: str
    hypotheses: tuple[Hypothesis, ...]
    any: bool = False
    given: tuple[Hypothesis, ...] = ()  # without these the others would hold trivially


@dataclass(frozen=True)
class Spirals:
    """ReLU-Square against ReLU on the spirals of a figure, by a metric of its rows."""

    figure: int
    metric: str


@dataclass(frozen=True)
class Regions:
    """The exact count of the pieces of decision regions, Figure 2."""

    squares: bool


@dataclass(frozen=True)
class Parameters:
    """The parameters that specs add to a model in per cent, as the paper rounds them; None: more than ``more_than``."""

    model: str
    specs: Mapping[str, float | None] = field(hash=False)
    more_than: float = math.inf


@dataclass(frozen=True)
class SpiralRegimes:
    """ReLU-Square against ReLU by the length and learning rate of training."""

    task: str
    metric: str


@dataclass(frozen=True)
class Overhead:
    """The time of one image relative to the plain network is below ``limit``.

    ``reverse``: it is above, and above that of ``heavier_than`` in plain operations.
    """

    backbone: str
    spec: str
    limit: float
    heavier_than: tuple[str, ...] = ()
    reverse: bool = False


@dataclass(frozen=True)
class LeastTime:
    """SP & SEx adds the least inference time of the methods of Table 6."""

    kernels: bool


@dataclass(frozen=True)
class ActivationCost:
    """softplus, tanh and sigmoid take longer than ReLU-Square."""

    form: str
    backward: bool


@dataclass(frozen=True)
class GemCost:
    """GeM with p = 2 takes longer than Square-Pooling, both in plain operations, on every feature map."""


@dataclass(frozen=True)
class SignShares:
    """Networks with Square-Softmin have classes on both sides of x = 0."""


@dataclass(frozen=True)
class Probe:
    """A linear probe on G = M² + S² is better than one on M."""


@dataclass(frozen=True)
class CheckedBy:
    """An identity, which a test of the library checks."""

    test: str


@dataclass(frozen=True)
class NotTested:
    """Nothing here speaks to the claim."""

    needs: str


Test: TypeAlias = (
    Accuracy
    | Spirals
    | SpiralRegimes
    | Regions
    | Parameters
    | Overhead
    | LeastTime
    | ActivationCost
    | GemCost
    | SignShares
    | Probe
    | CheckedBy
    | NotTested
)


@dataclass(frozen=True)
class Claim:
    """A claim: where the paper makes it, in our words, its number, what counts as evidence, and the tests."""

    key: str
    place: str
    statement: str
    evidence: str
    tests: tuple[Test, ...]
    paper: str = ""
    proxies: tuple[Accuracy, ...] = ()  # on other data than the claim is about
    headline: bool = False  # among those that the page begins with
