"""The words of a spec: each names a technique, which is a kind of site and the module that fills it.

A spec joins words by ``+``; a word may carry options: ``"pooling+excitation(alpha=0.001)"``. A row of a table is thus
one string, and a checkpoint needs no more than that string to rebuild its model.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

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
        kind: the sites it fills; ``None`` for the module named by the option ``after``.
        build: makes the module for a site; its keyword arguments are the word's options.
        dies_at_zero: the module multiplies its input by what it measures of it, so that a branch that starts at zero
            gets no gradient and stays at zero.
    """

    title: str
    kind: Kind | None
    build: Callable[..., nn.Module]
    dies_at_zero: bool = False

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


TECHNIQUES: dict[str, Technique] = {
    "pooling": Technique("Square-Pooling", "pooling", _pooling),
    "softmin": Technique("Square-Softmin", "logits", _softmin),
    "excitation": Technique("Square-Excitation", "branch_end", _excitation, dies_at_zero=True),
    "encoding": Technique("Square-Encoding", "last_spatial_conv", _encoding),
    "square": Technique("EleSquare after a named module", None, _square),
    "gem": Technique("GeM pooling", "pooling", _gem),
    "lp": Technique("Lp-pooling with a Gaussian kernel", "pooling", _lp),
    **{
        f"moment{order}": Technique(f"Moment of order {order}", "pooling", partial(_moment, order))
        for order in (3, 4, 5, 6)
    },
}


@dataclass(frozen=True)
class Word:
    """One word of a spec, with the options that were given."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def technique(self) -> Technique:
        """What it stands for."""
        return TECHNIQUES[self.name]

    def build(self, site: Site) -> nn.Module:
        """The module for ``site``; says which word it was if the options do not suit the module."""
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


def parse_spec(spec: str) -> tuple[Word, ...]:
    """The words of ``spec``, checked; no words for an empty one."""
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'pooling+excitation', got {spec!r}")
    if not spec.strip():
        return ()
    try:
        tree: ast.expr = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise _not_a_spec(spec, f"position {error.offset}: {error.msg}") from error
    words = [_parse_word(part, spec) for part in _summands(tree)]
    _refuse_clashes(words, spec)
    return tuple(words)


def format_spec(words: tuple[Word, ...]) -> str:
    """The spec of ``words``, in its one canonical spelling."""
    return "+".join(map(str, words))


def _summands(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _summands(tree.left) + _summands(tree.right)
    return [tree]


def _not_a_spec(spec: str, reason: str) -> ValueError:
    return ValueError(
        f"not a spec: {spec!r} ({reason}). A spec joins words by '+', options in parentheses: "
        "'pooling+excitation(alpha=0.001)'"
    )


def _parse_word(tree: ast.expr, spec: str) -> Word:
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    if not isinstance(call.func, ast.Name):
        raise _not_a_spec(spec, f"{ast.unparse(tree)} is not a word")
    name = call.func.id
    if name not in TECHNIQUES:
        raise ValueError(f"unknown word {name!r} in the spec {spec!r}; the words are: {', '.join(TECHNIQUES)}")
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
    return Word(name, tuple((key, options[key]) for key in known if key in options and options[key] != known[key]))


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


def _refuse_clashes(words: list[Word], spec: str) -> None:
    """One word a site: two poolings cannot both pool, and squaring twice at one place is a fourth power."""
    places: dict[Any, str] = {}
    for word in words:
        place = word.technique.kind or word.options
        if place in places:
            raise ValueError(
                f"the spec {spec!r} fills the same site twice, by {places[place]} and {word.name}; keep one of them"
            )
        places[place] = word.name
