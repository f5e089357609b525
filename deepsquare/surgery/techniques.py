"""The words of a spec: each names a technique, which is a kind of site and the module that fills it.

A spec joins words by ``+``; a word may carry options: ``"pooling+excitation(alpha=0.001)"``. A row of a table is thus
one string, and a checkpoint needs no more than that string to rebuild its model.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

import deepsquare._torchvision  # noqa: F401  (before torchvision)
from deepsquare.baselines import (
    BilinearPooling,
    CompactBilinearPooling,
    CovariancePooling,
    FisherVector,
    GatherExcite,
    GSoP,
)
from deepsquare.nn import (
    EleSquare,
    GeM,
    LpPooling,
    MomentPooling,
    SquareEncoding,
    SquareExcitation,
    SquarePooling,
    SquareSoftmin,
)
from deepsquare.surgery.site import Kind, Site


@dataclass(frozen=True)
class Technique:
    """What a word stands for.

    Attributes:
        title: the name in the literature.
        kind: the sites it fills, unless the option ``after`` names a module; ``None`` if it has to.
        build: makes the module for a site; its keyword arguments are the word's options.
        stage_ends: it fills only the last site of each stage.
        dies_at_zero: the module multiplies its input by what it measures of it, so that a branch that starts at zero
            gets no gradient and stays at zero.
    """

    title: str
    kind: Kind | None
    build: Callable[..., nn.Module]
    stage_ends: bool = False
    needs_nonzero_branch: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options with their default values."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _pooling(site: Site) -> nn.Module:
    return SquarePooling(keepdim=True)


def _softmin(
    site: Site, *, scale: Literal["shared", "channel", "none"] = "shared", sign: Literal[-1, 1] = -1
) -> nn.Module:
    return SquareSoftmin(site.channels, scale=scale, sign=sign)


def _excitation(site: Site, *, alpha: float = 1.0) -> nn.Module:
    return SquareExcitation(alpha)


def _encoding(site: Site) -> nn.Module:
    return SquareEncoding()


def _square(site: Site, *, after: str = "") -> nn.Module:
    return EleSquare()


def _gem(site: Site, *, p: float = 3.0, learnable: bool = True) -> nn.Module:
    return GeM(p, learnable=learnable, keepdim=True)


def _lp(site: Site, *, p: float = 2.0, sigma: float = 0.25) -> nn.Module:
    return LpPooling(p, sigma=sigma, keepdim=True)


def _moment(order: int, site: Site) -> nn.Module:
    return MomentPooling(order, keepdim=True)


def _se(site: Site, *, reduction: int = 16, after: str = "") -> nn.Module:
    from torchvision.ops import SqueezeExcitation

    module: nn.Module = SqueezeExcitation(site.channels, max(1, site.channels // _positive("reduction", reduction)))
    return module


def _ge_theta_minus(site: Site, *, extent: int = 0, after: str = "") -> nn.Module:
    return GatherExcite(site.channels, extent=extent)


def _ge_theta(site: Site, *, extent: int = 0, after: str = "") -> nn.Module:
    return GatherExcite(site.channels, site.spatial, extent=extent, learned=True)


def _ge_theta_plus(site: Site, *, extent: int = 0, reduction: int = 16, after: str = "") -> nn.Module:
    reduction = _positive("reduction", reduction)
    return GatherExcite(site.channels, site.spatial, extent=extent, learned=True, reduction=reduction)


def _gsop(site: Site, *, size: int = 128, last: bool = True, dense: bool = False) -> nn.Module:
    return GSoP(site.channels, _positive("size", size), stride=2 if site.stage == 1 else 1)


def _mpn_cov(site: Site, *, size: int = 256, dense: bool = True) -> nn.Module:
    return CovariancePooling(site.channels, _positive("size", size))


def _isqrt_cov(site: Site, *, size: int = 256, iterations: int = 5, dense: bool = True) -> nn.Module:
    return CovariancePooling(site.channels, _positive("size", size), _positive("iterations", iterations))


def _bilinear(site: Site, *, size: int = 128) -> nn.Module:
    return BilinearPooling(site.channels, _positive("size", size))


def _compact_bilinear(site: Site, *, size: int = 8192) -> nn.Module:
    return CompactBilinearPooling(site.channels, _positive("size", size))


def _fisher(site: Site, *, components: int = 16, size: int = 64) -> nn.Module:
    return FisherVector(site.channels, _positive("components", components), _positive("size", size))


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")
    return value


BASELINES: dict[str, Technique] = {
    "se": Technique("Squeeze-and-Excitation", "branch_end", _se),
    "ge_theta_minus": Technique("Gather-Excite without parameters (GE-θ⁻)", "branch_end", _ge_theta_minus),
    "ge_theta": Technique("Gather-Excite (GE-θ)", "branch_end", _ge_theta),
    "ge_theta_plus": Technique("Gather-Excite with a squeeze (GE-θ⁺)", "branch_end", _ge_theta_plus),
    "gsop": Technique("The block of GSoP-Net", "branch_end", _gsop, stage_ends=True),
    "mpn_cov": Technique("MPN-COV", "pooling", _mpn_cov),
    "isqrt_cov": Technique("iSQRT-COV", "pooling", _isqrt_cov),
    "bilinear": Technique("Bilinear pooling", "pooling", _bilinear),
    "compact_bilinear": Technique("Compact bilinear pooling", "pooling", _compact_bilinear),
    "fisher": Technique("Fisher vector", "pooling", _fisher),
}
"""The words for what the paper compares with."""

TECHNIQUES: dict[str, Technique] = {
    "pooling": Technique("Square-Pooling", "pooling", _pooling),
    "softmin": Technique("Square-Softmin", "logits", _softmin),
    "excitation": Technique("Square-Excitation", "branch_end", _excitation, needs_nonzero_branch=True),
    "encoding": Technique("Square-Encoding", "last_spatial_conv", _encoding),
    "square": Technique("EleSquare after a named module", None, _square),
    "gem": Technique("GeM pooling", "pooling", _gem),
    "lp": Technique("Lp-pooling with a Gaussian kernel", "pooling", _lp),
    **{
        f"moment{order}": Technique(f"Moment of order {order}", "pooling", partial(_moment, order))
        for order in (3, 4, 5, 6)
    },
    **BASELINES,
}
ALIASES = {"gsop1": "gsop(dense=True)", "gsop2": "gsop(last=False)+isqrt_cov(iterations=3)"}
"""Names of GSoP-Net1 and GSoP-Net2, and the words that they stand for."""


@dataclass(frozen=True)
class Term:
    """One word of a spec, with the options that were given."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def technique(self) -> Technique:
        """What it stands for."""
        return TECHNIQUES[self.name]

    def option(self, name: str, absent: Any = None) -> Any:
        """The value of an option, given or not; ``absent`` where the technique has no such option."""
        return dict(self.options).get(name, self.technique.options.get(name, absent))

    @property
    def after(self) -> str | None:
        """The module that the word names instead of the sites of its kind."""
        after: str = self.option("after", "")
        return after if after or self.technique.kind is None else None

    @property
    def dense(self) -> bool:
        """Whether the network's last stage goes at stride 1."""
        return bool(self.option("dense", False))

    def choose(self, sites: Sequence[Site]) -> list[Site]:
        """Those sites of its kind that the word fills."""
        if not self.technique.stage_ends:
            return list(sites)
        ends = list({site.stage: site for site in sites}.values())
        return ends if self.option("last") else ends[:-1]

    def build(self, site: Site) -> nn.Module:
        """The module for ``site``; says which word it was if the options do not suit the module."""
        if self.name in BASELINES and len(site.spatial) != 2:
            shape = "×".join(map(str, site.shape))
            raise ValueError(f"the word {self} takes maps with height and width; {site.path} gives {shape}")
        try:
            return self.technique.build(site, **dict(self.options))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the word {self} of the spec: {error}") from error

    def __str__(self) -> str:
        options = ", ".join(f"{key}={_written(value)}" for key, value in self.options)
        return f"{self.name}({options})" if options else self.name


def _written(value: Any) -> str:
    """As a person writes it: 2, not 2.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def parse_spec(spec: str) -> tuple[Term, ...]:
    """The words of ``spec``, checked; no words for an empty one."""
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'pooling+excitation', got {spec!r}")
    if not spec.strip():
        return ()
    try:
        tree: ast.expr = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise _not_a_spec(spec, f"position {error.offset}: {error.msg}") from error
    terms = [term for part in _summands(tree) for term in _parse_words(part, spec)]
    _refuse_clashes(terms, spec)
    return tuple(terms)


def format_spec(terms: tuple[Term, ...]) -> str:
    """The spec of ``terms``, in its one canonical spelling."""
    return "+".join(map(str, terms))


def _summands(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _summands(tree.left) + _summands(tree.right)
    return [tree]


def _not_a_spec(spec: str, reason: str) -> ValueError:
    return ValueError(
        f"not a spec: {spec!r} ({reason}). A spec joins words by '+', options in parentheses: "
        "'pooling+excitation(alpha=0.001)'"
    )


def _parse_words(tree: ast.expr, spec: str) -> tuple[Term, ...]:
    if isinstance(tree, ast.Name) and tree.id in ALIASES:
        return parse_spec(ALIASES[tree.id])
    return (_parse_word(tree, spec),)


def _parse_word(tree: ast.expr, spec: str) -> Term:
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    if not isinstance(call.func, ast.Name):
        raise _not_a_spec(spec, f"{ast.unparse(tree)} is not a word")
    name = call.func.id
    if name not in TECHNIQUES:
        if name in ALIASES:
            raise ValueError(f"{name} takes no options; write {ALIASES[name]}, for which it stands, with others")
        terms = ", ".join((*TECHNIQUES, *ALIASES))
        raise ValueError(f"unknown word {name!r} in the spec {spec!r}; the words are: {terms}")
    known = TECHNIQUES[name].options
    takes = f"{name} takes " + (", ".join(f"{k}={v!r}" for k, v in known.items()) or "no options")
    if call.args:
        raise _not_a_spec(spec, f"options are given by name; {takes}")
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(f"the word {name} of the spec {spec!r} has no option {keyword.arg}; {takes}")
        if keyword.arg in options:
            raise _not_a_spec(spec, f"{name} has {keyword.arg} twice")
        options[keyword.arg] = _value(keyword, known[keyword.arg], spec)
    return Term(name, tuple((key, options[key]) for key in known if key in options and options[key] != known[key]))


def _value(keyword: ast.keyword, default: Any, spec: str) -> Any:
    """The value of an option, which must be of the kind of its default; a whole number will do for a decimal one."""
    written = ast.unparse(keyword)
    kind = type(default)
    try:
        value = ast.literal_eval(keyword.value)
    except (ValueError, TypeError) as error:
        raise _not_a_spec(spec, f"{written} is not a number, string or truth value") from error
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise _not_a_spec(spec, f"{written}, expected a {kind.__name__} like {default!r}")
    return value


def _refuse_clashes(terms: list[Term], spec: str) -> None:
    """One word a site: two poolings cannot both pool, and squaring twice at one place is a fourth power."""
    places: dict[Any, str] = {}
    for term in terms:
        place = term.technique.kind if term.after is None else ("after", term.after)
        if place in places:
            raise ValueError(
                f"the spec {spec!r} fills the same site twice, by {places[place]} and {term.name}; keep one of them"
            )
        places[place] = term.name
