"""The grammar of a spec: terms joined by ``+``, each the name of a technique with options in parentheses.

The string ``"pooling+excitation(alpha=0.001)"`` describes a row of a table, and a checkpoint needs no more to rebuild
its model.
"""

import ast
import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepsquare.surgery.site import Site
from deepsquare.surgery.techniques import BASELINES, SURGERY_OPTIONS, TECHNIQUES, Technique

ALIASES = {"gsop1": "gsop(dense=True)", "gsop2": "gsop(last=False)+isqrt_cov(iterations=3)"}
"""GSoP-Net1 and GSoP-Net2, and the specs they stand for."""
COUNTS = {"size": 2**16, "reduction": 2**16, "components": 2**16, "iterations": 1000}
"""Options that are at least 1, and the largest value of each."""
MAX_EXPONENT = 100.0  # of the option p; the values of a map overflow long before
MAX_INT = 2**31  # of the absolute value of any integer
MAX_LENGTH = 10_000  # of a spec, in characters: specs also come from files
MAX_DEPTH = 200  # of its syntax tree, where each '+' is a level


@dataclass(frozen=True)
class Term:
    """One term of a spec, with the options that differ from their defaults."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def technique(self) -> Technique:
        return TECHNIQUES[self.name]

    def option(self, name: str, absent: Any = None) -> Any:
        """The value of an option, or its default; ``absent`` where the technique has no such option."""
        return dict(self.options).get(name, self.technique.options.get(name, absent))

    @property
    def after(self) -> str | None:
        """The module that the term names instead of the sites of its kind."""
        after: str = self.option("after", "")
        return after if after or self.technique.kind is None else None

    def refuse_other_maps(self, shape: Sequence[int], source: str) -> None:
        """Raise if ``source`` gives no map with height and width, and the term needs one."""
        if self.name in BASELINES and len(shape) != 3:
            others = ", ".join(name for name in TECHNIQUES if name not in BASELINES)
            raise ValueError(
                f"the term {self} takes maps with height and width; {source} gives {'×'.join(map(str, shape))}. These "
                f"terms take maps of any shape: {others}"
            )

    def build(self, site: Site) -> nn.Module:
        """The module for ``site``; the error names the term if the options do not suit the module."""
        self.refuse_other_maps(site.shape, site.path)
        try:
            for name, value in self.options:
                if name in COUNTS and not 1 <= value <= COUNTS[name]:
                    raise ValueError(f"{name} is {value}; expected 1 to {COUNTS[name]}")
                if name == "p" and value > MAX_EXPONENT:
                    raise ValueError(f"p is {value}; expected at most {MAX_EXPONENT:g}")
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
    if len(spec) > MAX_LENGTH:
        raise _not_a_spec(spec, f"{len(spec)} characters; expected at most {MAX_LENGTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser: 1if is a number that looks like a mistake
            tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise _not_a_spec(spec, f"position {error.offset}: {error.msg}") from error
    except UnicodeEncodeError as error:
        raise _not_a_spec(spec, str(error)) from error
    except (RecursionError, MemoryError) as error:  # by Python's parser, whose stack is limited
        raise _not_a_spec(spec, "too deeply nested") from error
    if _is_deep(tree):
        raise _not_a_spec(spec, "too deeply nested")
    terms = _parse_sum(tree, spec)
    _refuse_clashes(terms, spec)
    return terms


def format_spec(terms: Sequence[Term]) -> str:
    """The spec of ``terms``, in its one canonical spelling."""
    return "+".join(map(str, terms))


def _is_deep(tree: ast.AST) -> bool:
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return bool(level)


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _not_a_spec(spec: str, reason: str) -> ValueError:
    return ValueError(
        f"not a spec: {_shorten(spec)!r} ({_shorten(reason)}). A spec joins terms by '+', options in parentheses: "
        "'pooling+excitation(alpha=0.5)'"
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
        written = f"{_shorten(name)!r} in the spec {_shorten(spec)!r}"
        raise ValueError(f"unknown term {written}{hint}; the terms are: {', '.join(names)}")
    known = TECHNIQUES[name].options
    takes = f"{name} takes " + (", ".join(f"{k}={v!r}" for k, v in known.items()) or "no options")
    if call.args:
        raise _not_a_spec(spec, f"options are given by name; {takes}")
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(f"the term {name} of the spec {_shorten(spec)!r} has no option {keyword.arg}; {takes}")
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
    if type(value) is int and abs(value) > MAX_INT:
        raise _not_a_spec(spec, f"{keyword.arg} is beyond ±2**31")
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
                f"the spec {_shorten(spec)!r} fills the same site twice, by {names[site]} and {term.name}; keep one "
                "of them"
            )
        names[site] = term.name
