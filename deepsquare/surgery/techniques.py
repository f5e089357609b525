"""The techniques by name, each a kind of site and the module that fills it; and the grammar of a spec.

A spec joins terms by ``+``, each the name of a technique with options in parentheses. The string
``"pooling+excitation(alpha=0.001)"`` describes a row of a table, and a checkpoint needs no more to rebuild its model.
"""

import ast
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepsquare import baselines
from deepsquare import nn as dsnn
from deepsquare.surgery.site import Kind, Site

# The options that surgery itself reads: a module to act after, whether the last stage is filled too, and whether it
# gets stride 1.
SURGERY_OPTIONS = ("after", "last", "dense")


@dataclass(frozen=True)
class Technique:
    """What a term of a spec names."""

    title: str  # in the literature
    kind: Kind | None  # of the sites it fills, unless ``after`` names a module; None if ``after`` is required
    build: Callable[..., nn.Module]  # the module for a site, from the options without SURGERY_OPTIONS
    options: dict[str, Any] = field(default_factory=dict)  # with their default values
    stage_ends: bool = False  # it fills only the last site of each stage
    needs_nonzero_branch: bool = False  # a branch that starts at zero would get no gradient from it, and stay at zero


def _of_channels(module: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda site, **options: module(site.channels, **options)


def _keepdim(pooling: Callable[..., nn.Module], *args: int) -> Callable[..., nn.Module]:
    return lambda site, **options: pooling(*args, keepdim=True, **options)


def _se(site: Site, reduction: int) -> nn.Module:
    from torchvision.ops import SqueezeExcitation

    module: nn.Module = SqueezeExcitation(site.channels, max(1, site.channels // reduction))
    return module


def _ge_theta(site: Site, extent: int, reduction: int = 0) -> nn.Module:
    return baselines.GatherExcite(site.channels, site.spatial, extent=extent, learned=True, reduction=reduction)


def _gsop(site: Site, size: int) -> nn.Module:
    return baselines.GSoP(site.channels, size, stride=2 if site.stage == 1 else 1)


BASELINES: dict[str, Technique] = {
    "se": Technique("Squeeze-and-Excitation", "branch_end", _se, {"reduction": 16, "after": ""}),
    "ge_theta_minus": Technique(
        "Gather-Excite without parameters (GE-θ⁻)",
        "branch_end",
        _of_channels(baselines.GatherExcite),
        {"extent": 0, "after": ""},
    ),
    "ge_theta": Technique("Gather-Excite (GE-θ)", "branch_end", _ge_theta, {"extent": 0, "after": ""}),
    "ge_theta_plus": Technique(
        "Gather-Excite with a squeeze (GE-θ⁺)", "branch_end", _ge_theta, {"extent": 0, "reduction": 16, "after": ""}
    ),
    "gsop": Technique(
        "The block of GSoP-Net", "branch_end", _gsop, {"size": 128, "last": True, "dense": False}, stage_ends=True
    ),
    "mpn_cov": Technique("MPN-COV", "pooling", _of_channels(baselines.CovariancePooling), {"size": 256, "dense": True}),
    "isqrt_cov": Technique(
        "iSQRT-COV", "pooling", _of_channels(baselines.CovariancePooling), {"size": 256, "iterations": 5, "dense": True}
    ),
    "bilinear": Technique("Bilinear pooling", "pooling", _of_channels(baselines.BilinearPooling), {"size": 128}),
    "compact_bilinear": Technique(
        "Compact bilinear pooling", "pooling", _of_channels(baselines.CompactBilinearPooling), {"size": 8192}
    ),
    "fisher": Technique(
        "Fisher vector", "pooling", _of_channels(baselines.FisherVector), {"components": 16, "size": 64}
    ),
}
"""What the paper compares with."""

TECHNIQUES: dict[str, Technique] = {
    "pooling": Technique("Square-Pooling", "pooling", _keepdim(dsnn.SquarePooling)),
    "softmin": Technique("Square-Softmin", "logits", _of_channels(dsnn.SquareSoftmin), {"scale": "shared", "sign": -1}),
    "excitation": Technique(
        "Square-Excitation",
        "branch_end",
        lambda site, alpha: dsnn.SquareExcitation(alpha),
        {"alpha": 1.0},
        needs_nonzero_branch=True,
    ),
    "encoding": Technique("Square-Encoding", "last_spatial_conv", lambda site: dsnn.SquareEncoding()),
    "square": Technique("EleSquare after a named module", None, lambda site: dsnn.EleSquare(), {"after": ""}),
    "gem": Technique("GeM pooling", "pooling", _keepdim(dsnn.GeM), {"p": 3.0, "learnable": True}),
    "lp": Technique(
        "Lp-pooling with a Gaussian kernel", "pooling", _keepdim(dsnn.LpPooling), {"p": 2.0, "sigma": 0.25}
    ),
    **{
        f"moment{n}": Technique(f"Moment of order {n}", "pooling", _keepdim(dsnn.MomentPooling, n))
        for n in (3, 4, 5, 6)
    },
    **BASELINES,
}
ALIASES = {"gsop1": "gsop(dense=True)", "gsop2": "gsop(last=False)+isqrt_cov(iterations=3)"}
"""GSoP-Net1 and GSoP-Net2, and the specs they stand for."""
COUNTS = ("size", "reduction", "components", "iterations")  # options that are at least 1


@dataclass(frozen=True)
class Term:
    """One term of a spec, with the options that differ from their defaults."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def technique(self) -> Technique:
        """The technique that it names."""
        return TECHNIQUES[self.name]

    def option(self, name: str, absent: Any = None) -> Any:
        """The value of an option, or its default; ``absent`` where the technique has no such option."""
        return dict(self.options).get(name, self.technique.options.get(name, absent))

    @property
    def after(self) -> str | None:
        """The module that the term names instead of the sites of its kind."""
        after: str = self.option("after", "")
        return after if after or self.technique.kind is None else None

    def build(self, site: Site) -> nn.Module:
        """The module for ``site``; the error names the term if the options do not suit the module."""
        if self.name in BASELINES and len(site.spatial) != 2:
            shape = "×".join(map(str, site.shape))
            raise ValueError(f"the term {self} takes maps with height and width; {site.path} gives {shape}")
        try:
            for name, value in self.options:
                if name in COUNTS and value < 1:
                    raise ValueError(f"{name} is {value}; expected at least 1")
            options = {name: self.option(name) for name in self.technique.options if name not in SURGERY_OPTIONS}
            return self.technique.build(site, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the term {self} of the spec: {error}") from error

    def __str__(self) -> str:
        whole = {key: int(value) for key, value in self.options if isinstance(value, float) and value.is_integer()}
        options = ", ".join(f"{key}={whole.get(key, value)!r}" for key, value in self.options)  # 2, not 2.0
        return f"{self.name}({options})" if options else self.name


def parse_spec(spec: str) -> tuple[Term, ...]:
    """The terms of ``spec``, validated; none for an empty spec."""
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'pooling+excitation', got {spec!r}")
    if not spec.strip():
        return ()
    try:
        tree: ast.expr = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise _not_a_spec(spec, f"position {error.offset}: {error.msg}") from error
    terms = _parse_sum(tree, spec)
    _refuse_clashes(terms, spec)
    return terms


def format_spec(terms: Sequence[Term]) -> str:
    """The spec of ``terms``, in its one canonical spelling."""
    return "+".join(map(str, terms))


def _not_a_spec(spec: str, reason: str) -> ValueError:
    return ValueError(
        f"not a spec: {spec!r} ({reason}). A spec joins terms by '+', options in parentheses: "
        "'pooling+excitation(alpha=0.001)'"
    )


def _parse_sum(tree: ast.expr, spec: str) -> tuple[Term, ...]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _parse_sum(tree.left, spec) + _parse_sum(tree.right, spec)
    if isinstance(tree, ast.Name) and tree.id in ALIASES:
        return parse_spec(ALIASES[tree.id])
    return (_parse_term(tree, spec),)


def _parse_term(tree: ast.expr, spec: str) -> Term:
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    if not isinstance(call.func, ast.Name):
        raise _not_a_spec(spec, f"{ast.unparse(tree)} is not a term")
    name = call.func.id
    if name not in TECHNIQUES:
        if name in ALIASES:
            raise ValueError(f"{name} takes no options; write {ALIASES[name]}, which it stands for, with options")
        names = (*TECHNIQUES, *ALIASES)
        hint = "".join(f" (did you mean {near!r}?)" for near in difflib.get_close_matches(name.lower(), names, n=1))
        raise ValueError(f"unknown term {name!r} in the spec {spec!r}{hint}; the terms are: {', '.join(names)}")
    known = TECHNIQUES[name].options
    takes = f"{name} takes " + (", ".join(f"{k}={v!r}" for k, v in known.items()) or "no options")
    if call.args:
        raise _not_a_spec(spec, f"options are given by name; {takes}")
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(f"the term {name} of the spec {spec!r} has no option {keyword.arg}; {takes}")
        if keyword.arg in options:
            raise _not_a_spec(spec, f"{name} has {keyword.arg} twice")
        options[keyword.arg] = _value(keyword, known[keyword.arg], spec)
    return Term(name, tuple((key, options[key]) for key in known if key in options and options[key] != known[key]))


def _value(keyword: ast.keyword, default: Any, spec: str) -> Any:
    """The value of an option, which must have the type of its default; an int is accepted for a float."""
    written = ast.unparse(keyword)
    kind = type(default)
    try:
        value = ast.literal_eval(keyword.value)
    except (ValueError, TypeError) as error:
        raise _not_a_spec(spec, f"{written} is not a number, string or bool") from error
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise _not_a_spec(spec, f"{written}, expected a {kind.__name__} like {default!r}")
    return value


def _refuse_clashes(terms: Sequence[Term], spec: str) -> None:
    """One term per site: two poolings cannot both pool, and squaring twice at one site is a fourth power."""
    names: dict[Any, str] = {}
    for term in terms:
        site = term.technique.kind if term.after is None else ("after", term.after)
        if site in names:
            raise ValueError(
                f"the spec {spec!r} fills the same site twice, by {names[site]} and {term.name}; keep one of them"
            )
        names[site] = term.name
