"""Specs: the terms, their options, one canonical spelling, and clear errors."""

import re

import pytest
import torch
from helpers.models import attached, copied_state, create, images, own_keys, same_state

import deepsquare as ds
from deepsquare import nn as dsnn
from deepsquare.surgery import KINDS, TECHNIQUES, equip_record, format_spec, parse_spec


def canonical(spec: str) -> str:
    return format_spec(parse_spec(spec))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", ""),
        ("  ", ""),
        ("pooling", "pooling"),
        ("pooling()", "pooling"),
        (" pooling +excitation ", "pooling+excitation"),
        ("(pooling)+excitation", "pooling+excitation"),
        ("excitation+pooling", "excitation+pooling"),
        ("excitation(alpha=1.0)", "excitation"),
        ("excitation(alpha=1)", "excitation"),
        ("excitation( alpha = 1e-3 )", "excitation(alpha=0.001)"),
        ("pooling+excitation(alpha=0.001)", "pooling+excitation(alpha=0.001)"),
        ("gem(learnable=False, p=2)", "gem(p=2, learnable=False)"),
        ("gem(learnable=True, p=3)", "gem"),
        ("lp(sigma=0.5)+softmin(sign=1,)", "lp(sigma=0.5)+softmin(sign=1)"),
        ('softmin(scale="channel")', "softmin(scale='channel')"),
        ("softmin(scale='shared', sign=-1)", "softmin"),
        ("square(after='a.0')+square(after='b')", "square(after='a.0')+square(after='b')"),
        ("moment3", "moment3"),
    ],
)
def test_one_canonical_spelling(written: str, meant: str) -> None:
    assert canonical(written) == meant
    assert canonical(meant) == meant


def test_the_words() -> None:
    poolings = {"pooling", "gem", "lp", "moment3", "moment4", "moment5", "moment6"}
    expected = {
        "pooling": poolings,
        "logits": {"softmin"},
        "branch_end": {"excitation"},
        "last_spatial_conv": {"encoding"},
        None: {"square"},
    }
    for kind, terms in expected.items():
        assert {term for term, technique in TECHNIQUES.items() if technique.kind == kind} >= terms, kind
    assert {technique.kind for technique in TECHNIQUES.values()} <= {*KINDS, None}
    assert all(canonical(term) == term for term in TECHNIQUES)


def test_the_options_with_their_defaults() -> None:
    assert {term: technique.options for term, technique in TECHNIQUES.items() if technique.options} == {
        "softmin": {"scale": "shared", "sign": -1},
        "excitation": {"alpha": 1.0},
        "square": {"after": ""},
        "gem": {"p": 3.0, "learnable": True},
        "lp": {"p": 2.0, "sigma": 0.25},
        "se": {"reduction": 16, "after": ""},
        "ge_theta_minus": {"extent": 0, "after": ""},
        "ge_theta": {"extent": 0, "after": ""},
        "ge_theta_plus": {"extent": 0, "reduction": 16, "after": ""},
        "gsop": {"size": 128, "last": True, "dense": False},
        "mpn_cov": {"size": 256, "dense": True},
        "isqrt_cov": {"size": 256, "iterations": 5, "dense": True},
        "bilinear": {"size": 128},
        "compact_bilinear": {"size": 8192},
        "fisher": {"components": 16, "size": 64},
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("poolin", r"unknown term 'poolin' .*did you mean 'pooling'\?.*the terms are: pooling, softmin, excitation"),
        ("Excite", r"unknown term 'Excite' .*did you mean 'excitation'\?"),
        ("pooling+SP", "unknown term 'SP' in the spec 'pooling.SP'"),
        ("Pooling", "unknown term 'Pooling'"),
        ("excitation(beta=1)", "excitation .*has no option beta; excitation takes alpha=1.0"),
        ("pooling(p=2)", "has no option p; pooling takes no options"),
        ("moment3(order=4)", "has no option order; moment3 takes no options"),
        ("excitation(**{'alpha': 2})", "has no option None"),
        ("excitation(0.1)", "options are given by name; excitation takes alpha=1.0"),
        ("excitation(alpha=1, alpha=2)", "alpha"),
        ("pooling+", "not a spec: .*A spec joins terms by '\\+'"),
        ("+pooling", "not a spec"),
        ("pooling++excitation", "not a spec"),
        ("pooling excitation", "not a spec"),
        ("pooling,excitation", "not a spec"),
        ("pooling-excitation", "not a spec"),
        ("pooling*2", "not a spec"),
        ("pooling(", "not a spec"),
        ("'pooling'", "not a spec"),
        ("pooling\0", "not a spec"),
        ("7", "not a spec"),
    ],
)
def test_mistakes_are_explained(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_spec(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "__import__('os').system('false')",
        "__import__('os')",
        "pooling.__class__",
        "pooling[0]",
        "(lambda: 1)()",
        "[pooling for _ in 'ab']",
        "excitation(alpha=__import__('os'))",
        "excitation(alpha=alpha)",
        "excitation(alpha=(1).__class__)",
        "excitation(alpha=10**9**9)",
        "excitation(alpha=f'{1}')",
        "square(after='fc'.upper())",
        "pooling if 1 else pooling",
        "(x := pooling)",
    ],
)
def test_a_spec_is_never_run(spec: str) -> None:
    with pytest.raises(ValueError, match=r"not a spec|unknown term"):
        parse_spec(spec)


@pytest.mark.parametrize("spec", [None, 3, b"pooling", ["pooling"], ("pooling",)])
def test_a_spec_is_a_string(spec: object) -> None:
    with pytest.raises(
        TypeError, match=r"a spec is a string such as 'pooling\+excitation', got " + re.escape(repr(spec))
    ):
        parse_spec(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [
        ("pooling+pooling", "pooling", "pooling"),
        ("pooling+excitation+gem(p=2)", "pooling", "gem"),
        ("moment3+moment4", "moment3", "moment4"),
        ("softmin+softmin(sign=1)", "softmin", "softmin"),
        ("excitation(alpha=2)+encoding+excitation", "excitation", "excitation"),
        ("square(after='fc')+square(after='fc')", "square", "square"),
    ],
)
def test_two_words_at_one_site_are_refused(spec: str, first: str, second: str) -> None:
    with pytest.raises(ValueError, match=f"fills the same site twice, by {first} and {second}"):
        parse_spec(spec)


def test_two_names_of_one_module_are_refused() -> None:
    """The output of a Sequential is the output of its last module: one site, which takes one square."""
    with pytest.raises(ValueError, match=r"both fill layer1\.1"):
        ds.equip(create("resnet18"), "square(after='layer1')+square(after='layer1.1')")


# What only the model and the modules can tell.


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "excitation(alpha=0)",
            r"the term excitation\(alpha=0\) of the spec: alpha is 0.0, expected a positive",
        ),
        ("excitation(alpha=-1)", "alpha is -1.0, expected a positive finite"),
        ("excitation(alpha=1e999)", "alpha is inf"),
        ("excitation(alpha='big')", "alpha='big', expected a float like 1.0"),
        ("excitation(alpha=None)", "alpha=None, expected a float like 1.0"),
        ("gem(learnable='no')", "learnable='no', expected a bool like True"),
        ("softmin(sign=True)", "sign=True, expected a int like -1"),
        ("excitation(alpha=[1])", "excitation"),
        ("excitation(alpha={[]: 1})", "excitation"),
        ("softmin(scale='all')", "scale is 'all', expected 'shared', 'channel' or 'none'"),
        ("softmin(scale=2)", "scale=2, expected a str like 'shared'"),
        ("softmin(sign=0)", "sign is 0, expected -1"),
        ("gem(p=0)", "p is 0.0, expected a positive"),
        ("gem(p='2')", "p='2', expected a float"),
        ("lp(p=0.5)", "p is 0.5 .* at least 1"),
        ("lp(p='2')", "p='2', expected a float"),
        ("lp(sigma=0)", "sigma 0.0, expected .* a positive sigma"),
        ("square", r"missing in the term 'square'; name one as in square\(after='…'\).* ResNet are: conv1, bn1, act1"),
        ("square(after='layer9')", "ResNet has no module 'layer9'.* conv1, bn1"),
        ("square(after='layer1.0.conv9')", "no module 'layer1.0.conv9'"),
        ("square(after=3)", "after=3, expected a str"),
        ("square(after=['fc'])", "fc"),
        ("square(after='fc.weight')", "no module 'fc.weight'"),
    ],
)
def test_equip_refuses_what_the_module_cannot_take(spec: str, message: str) -> None:
    model = create("timm/test_resnet", zero_init_last=False)
    before, x = copied_state(model), images(size=32)
    output = model.eval()(x)
    with pytest.raises(ValueError, match=message):
        ds.equip(model, spec)
    assert same_state(model, before)
    assert attached(model) == 0
    assert equip_record(model) is None
    assert torch.equal(model(x), output)


@pytest.mark.parametrize(
    ("spec", "path", "expected"),
    [
        ("excitation(alpha=0.25)", "layer1.0.bn2.deepsquare_excitation", "SquareExcitation(alpha=0.25)"),
        ("gem(p=2.5)", "global_pool.pool.deepsquare_gem", "GeM(p=2.5, learnable=True, eps=1e-06, keepdim=True)"),
        (
            "gem(p=2, learnable=False)",
            "global_pool.pool.deepsquare_gem",
            "GeM(p=2.0, learnable=False, eps=1e-06, keepdim=True)",
        ),
        ("lp(p=4, sigma=0.5)", "global_pool.pool.deepsquare_lp", "LpPooling(p=4.0, sigma=0.5, keepdim=True)"),
        ("moment5", "global_pool.pool.deepsquare_moment5", "MomentPooling(5, keepdim=True)"),
        ("softmin(scale='channel')", "fc.deepsquare_softmin", "SquareSoftmin(1000, scale='channel', sign=-1)"),
        ("softmin(scale='none', sign=1)", "fc.deepsquare_softmin", "SquareSoftmin(1000, scale='none', sign=1)"),
    ],
)
def test_options_reach_the_module(spec: str, path: str, expected: str) -> None:
    model = ds.equip(create("timm/test_resnet", zero_init_last=False), spec)
    assert str(model.get_submodule(path)) == expected
    learned = {"excitation": 4, "gem(p=2.5)": 1, "softmin(scale='channel')": 1}
    assert len(own_keys(model)) == next((n for start, n in learned.items() if spec.startswith(start)), 0)


def test_a_square_after_a_container_stands_after_its_last_module() -> None:
    model = ds.equip(create("resnet18"), "square(after='layer2')")
    assert isinstance(model.get_submodule("layer2.1.deepsquare_square"), dsnn.EleSquare)
    assert len(model.get_submodule("layer2")) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("+".join(["pooling"] * 20_000), "159999 characters; expected at most 10000"),
        ("+".join(["pooling"] * 1_200), "too deeply nested"),
        ("excitation(alpha=" + "-" * 9_000 + "1)", "too deeply nested"),
        ("excitation(alpha=" + "[" * 4_000 + "]" * 4_000 + ")", "too many nested parentheses"),
        ("pooling" + ".a" * 4_000, "too deeply nested"),
        ("gem(p=" + "9" * 4_000 + ")", "p is beyond ±2**31"),
        ("softmin(sign=-" + "9" * 20 + ")", "sign is beyond ±2**31"),
        ("isqrt_cov(iterations=" + "9" * 9_000 + ")", "Exceeds the limit"),
        ("a" * 9_000, "unknown term 'aaaa"),
        ("pooling\ud800", "surrogates not allowed"),
    ],
    ids=lambda text: text[:30],
)
def test_a_spec_from_a_hostile_file_gets_one_short_line(spec: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        parse_spec(spec)
    assert len(str(caught.value)) < 800
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("isqrt_cov(iterations=100000000)", "iterations is 100000000; expected 1 to 1000"),
        ("mpn_cov(size=100000)", "size is 100000; expected 1 to 65536"),
        ("fisher(components=100000)", "components is 100000; expected 1 to 65536"),
        ("gem(p=1e308)", r"p is 1e\+308; expected at most 100"),
        ("lp(p=101)", "p is 101.0; expected at most 100"),
    ],
)
def test_numbers_that_no_module_can_have(spec: str, reason: str) -> None:
    model = create("vanilla_cnn")
    before = copied_state(model)
    with pytest.raises(ValueError, match=reason):
        ds.equip(model, spec)
    assert same_state(model, before)
