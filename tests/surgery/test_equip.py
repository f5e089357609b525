"""What an equipped model computes, against forward passes written by hand in plain torch operations.

The references work on the base model, whose modules they call one by one, in float64 and in training mode; outputs
and the gradients of all parameters must agree.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import reference
from helpers.models import (
    SHAPES,
    Forward,
    attached,
    cifar,
    copied_state,
    create,
    densenet,
    equip_quietly,
    excited,
    images,
    own_keys,
    resnet,
    same_state,
    shufflenet,
    signal_or_volume,
    square_pooled,
    tuned,
)
from torch import Tensor, nn
from torch.nn import functional as F

import deepsquare as ds
from deepsquare.surgery import equip_record


def compare(name: str, spec: str, by_hand: Forward) -> None:
    shape = SHAPES.get(name)
    base = create(name).double().train()
    equipped = tuned(ds.equip(create(name).double(), spec, input_shape=shape)).train()
    own = {key: p.detach().clone().requires_grad_() for key, p in equipped.named_parameters() if "deepsquare_" in key}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((3, *(shape or (3, 64, 64))), generator=generator, dtype=torch.float64)
    expected, actual = by_hand(base, x, spec, own), equipped(x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(actual, base(x), rtol=1e-3), "the technique did nothing"
    weights = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    leaves = {**dict(base.named_parameters()), **own}
    parameters = dict(equipped.named_parameters())
    assert leaves.keys() == parameters.keys()
    wanted = torch.autograd.grad((weights * expected).sum(), list(leaves.values()))
    got = torch.autograd.grad((weights * actual).sum(), [parameters[key] for key in leaves])
    for key, a, b in zip(leaves, got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8 * float(b.abs().max() + 1)), key


@pytest.mark.parametrize(
    ("name", "spec", "by_hand"),
    [
        ("resnet18", "pooling+excitation+encoding", resnet),
        ("resnet18", "softmin", resnet),
        ("resnet18", "encoding", resnet),
        ("resnet50", "excitation+encoding", resnet),
        ("shufflenet_v2_x0_5", "pooling+excitation", shufflenet),
        ("shufflenet_v2_x0_5", "encoding+softmin", shufflenet),
        ("densenet121", "pooling", densenet),
        ("cifar", "pooling+excitation", cifar),
        ("signal", "pooling+excitation+encoding", signal_or_volume),
        ("volume", "pooling+excitation+encoding", signal_or_volume),
    ],
)
def test_equipped_networks_compute_the_equations(name: str, spec: str, by_hand: Forward) -> None:
    compare(name, spec, by_hand)


KERNEL = torch.from_numpy(reference.gaussian_kernel((4, 4), 0.25))
Map = Callable[[Tensor], Tensor]
# spec: what happens after layer 1, 2, 3, in the pooling, after the pooling, after the FC
TABLE_2: dict[str, tuple[str, Map]] = {
    "square(after='layer1')": ("layer1", torch.square),
    "square(after='layer2')": ("layer2", torch.square),
    "square(after='layer3')": ("layer3", torch.square),
    "pooling": ("pool", square_pooled),
    "square(after='pool')": ("pooled", torch.square),
    "softmin(scale='none')": ("fc", lambda v: -(v**2)),
    "softmin(scale='none', sign=1)": ("fc", lambda v: v**2),
    "softmin": ("fc", lambda v: -(v**2)),  # s starts at 1
    "softmin(scale='channel', sign=1)": ("fc", lambda v: v**2),
    "gem": ("pool", lambda x: (x.clamp(min=1e-6) ** 3).mean((2, 3)) ** (1 / 3)),
    "gem(p=2, learnable=False)": ("pool", lambda x: (x.clamp(min=1e-6) ** 2).mean((2, 3)).sqrt()),
    "lp": ("pool", lambda x: (x**2 * KERNEL).sum((2, 3)).sqrt()),
    "moment3": ("pool", lambda x: (x**3).mean((2, 3))),
    "moment6": ("pool", lambda x: (x**6).mean((2, 3))),
}


@pytest.mark.parametrize("spec", TABLE_2)
def test_the_vanilla_cnn_with_each_technique(spec: str) -> None:
    place, function = TABLE_2[spec]

    def at(here: str, x: Tensor) -> Tensor:
        return function(x) if here == place else x

    base: Any = create("vanilla_cnn").double()
    x = images(3, 32).double()
    equipped = ds.equip(create("vanilla_cnn").double(), spec)
    y = at("layer3", base.layer3(at("layer2", base.layer2(at("layer1", base.layer1(x))))))
    pooled = function(y) if place == "pool" else y.mean((2, 3))
    expected = at("fc", base.fc(at("pooled", pooled)))
    torch.testing.assert_close(equipped(x), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(expected, base(x), rtol=1e-3)


def test_channels_last_sites() -> None:
    """timm's ConvNeXt ends a branch, and its MambaOut pools, with the channels in the last dimension."""
    x = images(2, 64).double()
    base, model = (create("timm/test_convnext").double().eval() for _ in range(2))
    tuned(ds.equip(model, "excitation"))
    ends = [name for name, _ in base.named_modules() if name.endswith("mlp.fc2")]
    assert len(ends) == 9
    for name in ends:
        alpha = model.get_parameter(f"{name}.deepsquare_excitation.alpha").detach()
        base.get_submodule(name).register_forward_hook(lambda _m, _i, y, a=alpha: excited(y, a, (1, 2)))
    with torch.no_grad():
        for gamma in (p for m in (base, model) for n, p in m.named_parameters() if n.endswith(".gamma")):
            gamma.fill_(1)  # a layer scale of 1e-6 would hide the branches
    torch.testing.assert_close(model(x), base(x), rtol=1e-9, atol=1e-9)
    base, model = (create("timm/test_mambaout").double().eval() for _ in range(2))
    base.get_submodule("head").register_forward_pre_hook(lambda _m, args: (args[0] ** 2).mean((1, 2), keepdim=True))
    torch.testing.assert_close(ds.equip(model, "pooling")(x), base(x), rtol=1e-9, atol=1e-9)


# Keys, parameters, and what the model remembers.

WORDS = ["pooling", "softmin", "excitation", "encoding", "pooling+excitation"]


@pytest.mark.parametrize("spec", WORDS)
@pytest.mark.parametrize("name", ["resnet50", "shufflenet_v2_x1_0"])
def test_base_weights_load_into_every_equipped_form(name: str, spec: str) -> None:
    base, equipped = create(name).state_dict(), ds.equip(create(name), spec)
    with torch.no_grad():
        for parameter in equipped.parameters():
            parameter.fill_(7)
    result = equipped.load_state_dict(base, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) == own_keys(equipped)
    assert len(own_keys(equipped)) == {"softmin": 1, "excitation": 16, "pooling+excitation": 16}.get(spec, 0)
    now = equipped.state_dict()
    assert [key for key in now if "deepsquare_" not in key] == list(base)
    assert all(torch.equal(now[key], value) for key, value in base.items())
    again = ds.equip(create(name), spec)
    again.load_state_dict(now)
    assert same_state(again, now)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("pooling+excitation", 16),
        ("softmin", 1),
        ("softmin(scale='channel')", 1000),
        ("softmin(scale='none')", 0),
        ("pooling", 0),
        ("encoding", 0),
        ("gem", 1),
        ("gem(learnable=False)+softmin", 1),
    ],
)
def test_parameters_added_to_resnet50(spec: str, count: int) -> None:
    with torch.device("meta"):
        model = create("resnet50")
    before = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in ds.equip(model, spec).parameters()) - before == count


def test_equipping_again() -> None:
    model = tuned(ds.equip(create("resnet18"), "pooling+excitation(alpha=0.5)", dropout=0.1)).eval()
    state, count, output = copied_state(model), attached(model), model(images())
    assert ds.equip(model, " pooling + excitation(alpha=.5)", dropout=0.1) is model
    assert same_state(model, state)
    assert attached(model) == count == 10
    assert torch.equal(model(images()), output)
    present = equip_record(model)
    assert present is not None
    assert (present.spec, present.dropout) == ("pooling+excitation(alpha=0.5)", 0.1)
    for spec, dropout in (("softmin", 0.1), ("pooling+excitation(alpha=0.5)", None), ("", None)):
        with pytest.raises(
            ValueError, match=r"ResNet is already equipped with 'pooling\+excitation\(alpha=0.5\)'"
        ) as error:
            ds.equip(model, spec, dropout=dropout)
        assert repr(spec) in str(error.value)
    assert same_state(model, state)
    assert attached(model) == count


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        (
            "squeezenet1_1",
            "softmin+pooling",
            r"SqueezeNet has no pooling site for the term 'pooling': .*after the classifier. Its sites: 0 pool",
        ),
        ("googlenet", "pooling+excitation", "GoogLeNet has no branch_end site for the term 'excitation'"),
        ("vanilla_cnn", "softmin+encoding", "VanillaCNN has no last_spatial_conv site for the term 'encoding'"),
        ("resnet18", "pooling+pool", "unknown term 'pool'"),
        ("resnet18", "pooling+excitation(alpha=0)", "alpha is 0"),
        ("resnet18", "pooling+square(after='nowhere')", "no module 'nowhere'"),
    ],
)
def test_a_failing_equip_changes_nothing(name: str, spec: str, message: str) -> None:
    model = create(name).eval()
    state, x = copied_state(model), images()
    output = model(x)
    with pytest.raises(ValueError, match=message):
        ds.equip(model, spec, dropout=0.2)
    assert same_state(model, state)
    assert attached(model) == 0
    assert equip_record(model) is None
    assert torch.equal(model(x), output)


UNEQUIPPED: Sequence[tuple[str, dict[str, Any], str, float | None]] = [
    ("resnet18", {}, "pooling+excitation+encoding+softmin", 0.2),
    ("resnet18", {"zero_init_residual": True}, "excitation", None),
    ("shufflenet_v2_x0_5", {}, "pooling+excitation+encoding+softmin", 0.3),
    ("mobilenet_v2", {}, "gem+excitation", 0.5),
    ("squeezenet1_1", {}, "softmin(scale='channel')", 0.1),
    ("densenet121", {}, "pooling+excitation", None),
    ("cifar", {}, "pooling+encoding", None),
    ("vanilla_cnn", {}, "square(after='layer1')+square(after='layer3.conv')+lp", None),
    ("timm/resnet18", {}, "pooling+excitation", 0.2),
    ("timm/test_convnext", {}, "pooling+excitation+encoding", 0.2),
    ("timm/test_byobnet", {}, "moment3+excitation+softmin", None),
    ("resnet18", {}, "", 0.4),
]


@pytest.mark.parametrize(("name", "arguments", "spec", "dropout"), UNEQUIPPED)
def test_unequip_gives_the_base_model_back(
    name: str, arguments: dict[str, Any], spec: str, dropout: float | None
) -> None:
    shape = SHAPES.get(name)
    model, x = create(name, **arguments), images(size=32)
    state, modules = copied_state(model), {n: type(m) for n, m in model.named_modules()}
    ratios = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    output = model.eval()(x)
    equip_quietly(model, spec, dropout=dropout, input_shape=shape)
    assert equip_record(model) is not None
    assert ds.unequip(model) is model
    assert same_state(model, state)
    assert {n: type(m) for n, m in model.named_modules()} == modules
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == ratios
    assert attached(model) == 0
    assert equip_record(model) is None
    assert torch.equal(model(x), output)
    assert ds.unequip(model) is model  # a plain model stays as it is
    assert same_state(model, state)
    tuned(equip_quietly(model, "softmin", input_shape=shape))  # and takes another spec now
    assert not torch.allclose(model(x), output, rtol=1e-3, atol=0)


def test_unequip_keeps_what_was_trained() -> None:
    model = ds.equip(
        ds.recalibrate_batchnorm(create("cifar"), [images(size=32)]).eval(),
        "pooling+excitation",
        input_shape=(3, 32, 32),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    trained = copied_state(model)
    assert same_state(ds.unequip(model), {k: v for k, v in trained.items() if "deepsquare_" not in k})


# The dropout keyword.


def test_dropout_replaces_the_models_own() -> None:
    model: Any = ds.equip(create("mobilenet_v2", dropout=0.2), "pooling", dropout=0.6)
    assert model.classifier[0].p == 0.6
    assert sum(isinstance(m, nn.Dropout) for m in model.modules()) == 1
    assert ds.unequip(model).classifier[0].p == 0.2


@pytest.mark.parametrize("spec", ["", "softmin"])
def test_dropout_is_inserted_before_the_classifier(spec: str) -> None:
    base: Any = create("vanilla_cnn")
    model = ds.equip(create("vanilla_cnn"), spec, dropout=0.5).eval()
    x = images(2, 32)

    def expected(training: bool) -> Tensor:
        pooled = base.pool(base.layer3(base.layer2(base.layer1(x)))).flatten(1)
        logits: Tensor = base.fc(F.dropout(pooled, 0.5, training))
        return -logits.square() if spec else logits

    base.eval()
    assert torch.equal(model(x), expected(False))
    model.get_submodule("fc").train()
    torch.manual_seed(0)
    wanted = expected(True)
    torch.manual_seed(0)
    assert torch.equal(model(x), wanted)
    assert not torch.equal(wanted, expected(False))


@pytest.mark.parametrize("ratio", [-0.1, 1, 1.5, math.nan])
def test_no_ratio(ratio: float) -> None:
    model = create("vanilla_cnn")
    with pytest.raises(ValueError, match=r"is not a ratio; expected a number in \[0, 1\)"):
        ds.equip(model, "pooling", dropout=ratio)
    assert attached(model) == 0
