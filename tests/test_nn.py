"""The modules: parameters, checkpoints, number formats, memory, and the same values compiled and exported."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare import nn as dsnn

MAPS: dict[str, Callable[[], nn.Module]] = {
    "ele_square": dsnn.EleSquare,
    "relu_square": dsnn.ReLUSquare,
    "encoding": dsnn.SquareEncoding,
    "pooling": dsnn.SquarePooling,
    "pooling_keepdim": lambda: dsnn.SquarePooling(keepdim=True),
    "moment": lambda: dsnn.MomentPooling(4, keepdim=True),
    "gem": dsnn.GeM,
    "gem_frozen": lambda: dsnn.GeM(2.0, learnable=False, keepdim=True),
    "lp": lambda: dsnn.LpPooling(3.0),
    "proportion": lambda: dsnn.ScaleProportion(0.5),
    "excitation": dsnn.SquareExcitation,
}
LOGITS: dict[str, Callable[[], nn.Module]] = {
    "softmin": dsnn.SquareSoftmin,
    "softmin_channel": lambda: dsnn.SquareSoftmin(4, scale="channel"),
    "softmin_none": lambda: dsnn.SquareSoftmin(scale="none", sign=1),
}
ALL = MAPS | LOGITS
POOLINGS = ["pooling", "pooling_keepdim", "moment", "gem", "gem_frozen", "lp"]


def example(name: str, batch: int = 3) -> Tensor:
    shape = (batch, 4) if name in LOGITS else (batch, 4, 5, 6)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return x.abs() if name == "proportion" else x  # a mean square is not negative


def module(name: str) -> nn.Module:
    """With parameters that are not at their start, so that a lost one is noticed."""
    made = ALL[name]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)
    return made


def test_modules_call_their_functions() -> None:
    x, v = example("pooling"), example("softmin")
    alpha, p = torch.tensor(1.5), torch.tensor(4.5)
    kernel = DF.gaussian_kernel((5, 6), 0.25)
    expected = {
        "ele_square": DF.square(x),
        "relu_square": DF.relu_square(x),
        "encoding": DF.square(x),
        "pooling": DF.square_pooling(x),
        "pooling_keepdim": DF.square_pooling(x, keepdim=True),
        "moment": DF.moment_pooling(x, 4, keepdim=True),
        "gem": DF.gem_pooling(x, p),
        "gem_frozen": DF.gem_pooling(x, 2.0, keepdim=True),
        "lp": DF.lp_pooling(x, 3.0, kernel),
        "proportion": DF.scale_proportion(x.abs(), alpha / 2),
        "excitation": DF.square_excitation(x, alpha),
        "softmin": DF.square_softmin(v, torch.tensor(2.25)),
        "softmin_channel": DF.square_softmin(v, torch.full((4,), 2.25)),
        "softmin_none": -DF.square_softmin(v),
    }
    assert expected.keys() == ALL.keys()
    for name, value in expected.items():
        assert torch.equal(module(name)(example(name)), value), name


def test_parameters_are_those_of_the_paper() -> None:
    counts = {name: sum(p.numel() for p in made().parameters()) for name, made in ALL.items()}
    learned = {"gem": 1, "proportion": 1, "excitation": 1, "softmin": 1, "softmin_channel": 4}
    assert counts == {name: learned.get(name, 0) for name in ALL}
    assert [*dsnn.GeM(2.0, learnable=False).state_dict()] == []
    assert [*dsnn.SquareExcitation().state_dict()] == ["alpha"]
    assert [*dsnn.SquareSoftmin().state_dict()] == ["root_scale"]
    assert dsnn.SquareExcitation(dtype=torch.float64).alpha.dtype == torch.float64
    assert dsnn.SquareSoftmin(3, scale="channel", device="meta").root_scale is not None
    excitation = dsnn.SquareExcitation(0.5, device="meta").to_empty(device="cpu")
    excitation.reset_parameters()
    assert excitation.alpha == 0.5


@pytest.mark.parametrize("sides", [(7,), (4, 5), (2, 3, 4)], ids=str)
def test_one_to_three_spatial_dimensions(sides: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, *sides, generator=torch.Generator().manual_seed(0))
    flat = x.flatten(2)
    for name in ("pooling", "gem", "excitation"):
        torch.testing.assert_close(module(name)(x).reshape(2, 3, -1), module(name)(flat).reshape(2, 3, -1))
    assert dsnn.LpPooling(keepdim=True)(x).shape == (2, 3, *[1] * len(sides))


@pytest.mark.parametrize("name", ALL)
def test_copies_are_equal(name: str) -> None:
    original, x = module(name), example(name)
    loaded = ALL[name]()
    buffer = io.BytesIO()
    torch.save(original.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (loaded, copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert torch.equal(other(x), original(x))
        assert repr(other) == repr(original)


@pytest.mark.parametrize("name", ALL)
def test_compiled_and_exported_forms_are_equal(name: str) -> None:
    eager, x = module(name), example(name).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (3, 5):
        results = []
        for form in (eager, compiled):
            x = example(name, batch).requires_grad_()
            y = form(x)
            inputs = [x, *eager.parameters()]
            results.append((y, torch.autograd.grad(y.square().sum(), inputs)))
        torch.testing.assert_close(results[1], results[0])
    dynamic: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    if name in MAPS:
        dynamic |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(eager, (x.detach(),), dynamic_shapes=(dynamic,)).module()
    for other in (example(name, 2), example(name, 2)[:, :, 1:, 1:] if name in MAPS else example(name, 7)):
        torch.testing.assert_close(exported(other), eager(other))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, when first used
@pytest.mark.slow
def test_inductor_makes_the_same_values() -> None:
    net = nn.Sequential(nn.BatchNorm2d(4), dsnn.SquareExcitation(), dsnn.SquarePooling(), dsnn.SquareSoftmin())
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        results = []
        for form in (net, compiled):
            x = example("pooling").to(dtype).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = form(x)
            results.append((y, torch.autograd.grad(y.sum(), [x, *net.parameters()])))
        assert results[0][0].dtype == torch.float32
        torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_number_formats(name: str, compiled: bool) -> None:
    """Poolings and logits are float32 under autocast and half in a half model; maps keep their type."""
    torch.compiler.reset()
    wide = name in POOLINGS or name in LOGITS
    for dtype in (torch.float16, torch.bfloat16):
        x = example(name).to(dtype)
        for under_autocast in (True, False):
            made = module(name) if under_autocast else module(name).to(dtype)
            form = torch.compile(made, fullgraph=True, backend="eager") if compiled else made
            with torch.autocast("cpu", dtype=dtype, enabled=under_autocast):
                y = form(x)
            assert y.dtype == (torch.float32 if wide and under_autocast else dtype)
            if wide and under_autocast:
                torch.testing.assert_close(y, module(name)(x.float()), rtol=1e-5, atol=1e-6)


def test_a_square_beyond_float16_survives_autocast_only() -> None:
    x = torch.full((1, 2, 3, 3), 300.0, dtype=torch.float16)
    pool = dsnn.SquarePooling()
    assert pool(x).isinf().all()
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(pool(x), torch.full((1, 2), 90000.0))
        assert torch.equal(dsnn.SquareSoftmin()(x[:, :, 0, 0]), torch.full((1, 2), -90000.0))


def allocations(function: Callable[[], Tensor], size: int) -> int:
    """How many operations allocate ``size`` bytes or more: ATen's own temporaries are seen too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return sum(event.self_cpu_memory_usage >= size for event in profile.events() or [])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_temporary_of_the_size_of_the_map(dtype: torch.dtype, autocast: bool, layout: torch.memory_format) -> None:
    x = torch.randn(12, 32, 90, 90).to(dtype).contiguous(memory_format=layout).requires_grad_()  # > _BLOCK
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert allocations(lambda: dsnn.SquarePooling()(x), x.numel() * x.element_size()) == 0
        results = (
            1 if dtype.itemsize >= 4 or kernels.backend_for(x) is not None else 2
        )  # without a kernel: the float32 product, then its rounding
        assert allocations(lambda: dsnn.SquareExcitation()(x), x.numel() * x.element_size()) == results
    assert allocations(lambda: x.square().mean((2, 3)), x.numel() * x.element_size()) >= 1  # the measure sees it


def test_start_of_excitation() -> None:
    x = nn.BatchNorm2d(8)(torch.randn(64, 8, 9, 9, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(dsnn.ScaleProportion()(torch.ones(())), torch.tensor(0.5))
    s = (dsnn.SquareExcitation()(x) / x).mean()
    assert abs(s - 0.5) < 0.01
    torch.testing.assert_close(dsnn.SquareExcitation(1e-3)(x), x, rtol=2e-6, atol=0)


def test_a_turned_root_scale_is_saved_nonnegative_and_left_alone() -> None:
    for scale in ("shared", "channel"):
        made = dsnn.SquareSoftmin(3, scale=scale)
        root = made.root_scale
        assert root is not None
        assert made.state_dict()["root_scale"].data_ptr() == root.data_ptr()  # no copy without need
        with torch.no_grad():
            root.sub_(3)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        saved, version = made.state_dict(), root._version
        assert bool((saved["root_scale"] == 2).all())
        assert (root._version, bool((root == -2).all())) == (version, True)
        other = dsnn.SquareSoftmin(3, scale=scale)
        other.load_state_dict(saved)
        assert torch.equal(other(x), made(x))
        assert made.scale is not None
        assert bool((made.scale == 4).all())


def test_merged_scale_is_left_out() -> None:
    made, x = module("softmin"), example("softmin")
    assert isinstance(made, dsnn.SquareSoftmin)
    expected = made(x)
    made.merge_scale()
    torch.testing.assert_close(made(1.5 * x), expected)
    assert [*made.parameters(), *made.state_dict()] == []
    assert repr(made) == repr(dsnn.SquareSoftmin(scale="none"))


BROKEN: list[tuple[Callable[[], nn.Module], str, Any, str]] = [
    (dsnn.SquareSoftmin, "root_scale", -0.5, "holds 0.root_scale = -0.5, expected nonnegative"),
    (dsnn.SquareSoftmin, "root_scale", math.nan, "holds 0.root_scale = nan, expected finite.*earlier"),
    (LOGITS["softmin_channel"], "root_scale", [1.0, math.inf, 1.0, 1.0], r"\[1.0, inf, 1.0, 1.0\]"),
    (LOGITS["softmin_channel"], "root_scale", [1.0, 1.0, -1.0, 1.0], "expected nonnegative"),
    (dsnn.SquareExcitation, "alpha", math.inf, "holds 0.alpha = inf, expected finite"),
    (dsnn.ScaleProportion, "alpha", math.nan, "holds 0.alpha = nan, expected finite"),
]


@pytest.mark.parametrize(("make", "key", "value", "message"), BROKEN)
def test_broken_checkpoints_are_refused(make: Callable[[], nn.Module], key: str, value: Any, message: str) -> None:
    model = nn.Sequential(make())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        model.load_state_dict({f"0.{key}": torch.tensor(value)})
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_negative_alpha_loads() -> None:
    made = dsnn.SquareExcitation()  # only α² counts, and training may turn its sign
    made.load_state_dict({"alpha": torch.tensor([-2.0])})
    x = example("excitation")
    assert torch.equal(made(x), DF.square_excitation(x, torch.tensor(2.0)))


MISTAKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "alpha_0": (lambda: dsnn.SquareExcitation(0.0), "alpha is 0.0, expected a positive.*never learn"),
    "alpha_negative": (lambda: dsnn.ScaleProportion(-1.0), "alpha is -1.0"),
    "alpha_nan": (lambda: dsnn.SquareExcitation(math.nan), "alpha is nan"),
    "channel": (lambda: dsnn.SquareSoftmin(scale="channel"), "num_classes is None, expected the number"),
    "scale": (lambda: dsnn.SquareSoftmin(scale="each"), "scale is 'each', expected 'shared'"),  # type: ignore[arg-type]
    "sign": (lambda: dsnn.SquareSoftmin(sign=0), "sign is 0, expected -1"),  # type: ignore[arg-type]
    "gem": (lambda: dsnn.GeM(-1.0), "p is -1.0, expected a positive"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(name: str) -> None:
    make, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        make()
