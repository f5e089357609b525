"""Section 3.2: the spirals, batched training against single networks, and the run that draws Figures 3–6."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.nn.utils import parameters_to_vector

from deepsquare._threads import one_thread
from deepsquare.paper.spirals import ablation, data, draw, experiment, measures
from deepsquare.paper.spirals.networks import (
    ACTIVATIONS,
    ONE_ARM,
    THREE_ARMS,
    Networks,
    Setting,
    Task,
    TwoLayers,
    train,
)
from deepsquare.paper.spirals.tuning import Tuned, grid, lengths, retrain, tune
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import judge_sign
from deepsquare.results import Store

DEFAULT = Setting("adam", 0.01, "pytorch", "standardised")


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
        yield
    assert torch.get_num_threads() == threads


def test_one_arm_against_a_loop() -> None:
    times, points = data.one_arm(7, "train", 5, turns=2, noise=0.1)
    assert times.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    rng = np.random.default_rng([7, 0])
    for t, point in zip(times, points, strict=True):
        angle = 4 * math.pi * t
        expected = (t * math.cos(angle) + 0.1 * rng.normal(), t * math.sin(angle) + 0.1 * rng.normal())
        assert tuple(point) == pytest.approx(expected, abs=1e-12)
    known = np.array([[0, 0], [0, -0.5], [-1, 0]])
    np.testing.assert_allclose(data.trajectory(np.array([0, 0.5, 1.0]), 1.5), known, atol=1e-12)


def test_three_arms_are_rotated_copies() -> None:
    points, arms = data.three_arms(3, "test", 50, noise=0)
    assert arms.tolist() == [0] * 50 + [1] * 50 + [2] * 50
    radii = (np.arange(150) % 50 + 0.5) / 50
    turned = np.exp(-1j * (2 * math.pi / 3 * arms + 4 * radii)) * (points[:, 0] + 1j * points[:, 1])
    np.testing.assert_allclose(turned, radii, atol=1e-12)  # back on the positive half axis
    noisy, _ = data.three_arms(3, "test", 20_000)
    first = (noisy[:, 0] + 1j * noisy[:, 1])[:20_000]
    assert np.std(np.angle(first * np.exp(-4j * np.abs(first)))) == pytest.approx(data.ANGLE_NOISE, rel=0.02)


def test_a_sample_depends_on_its_seed_and_split() -> None:
    for make in (data.one_arm, data.three_arms):
        for found, again in zip(make(1, "train", 9), make(1, "train", 9), strict=True):
            np.testing.assert_array_equal(found, again)
        draws = [make(1, "train", 9), make(2, "train", 9), make(1, "validation", 9), make(1, "test", 9)]
        assert len({part.tobytes() for found in draws for part in found}) == 5  # one part is even times, or arms


def train_one(task: Task, activation: str, setting: Setting, seed: int, steps: int) -> tuple[torch.Tensor, float]:
    """One network trained by ``torch.optim`` in float64: its parameters and its loss on test data."""
    network = TwoLayers(task.inputs, task.outputs, activation).double()
    network.initialize(setting.initialization, seed)
    layers = nn.Sequential(network.first, network.second)
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(layers.parameters(), setting.lr)
        if setting.optimizer == "adam"
        else torch.optim.SGD(layers.parameters(), setting.lr, momentum=0.9)
    )

    def loss(split: data.Split) -> torch.Tensor:
        inputs, targets = (part.mT.double() for part in task.draw(seed, split))
        outputs = layers[1](ACTIVATIONS[activation](layers[0](setting.scaled(inputs))))
        return F.mse_loss(outputs, targets) if task is ONE_ARM else F.cross_entropy(outputs, targets.argmax(1))

    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss("train"))
        optimizer.step()
    return parameters_to_vector(layers.parameters()).detach(), loss("test").item()


@pytest.mark.parametrize("task", [ONE_ARM, THREE_ARMS], ids=lambda task: task.name)
@pytest.mark.parametrize("activation", ["relu", "relu_square", "tanh"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_batched_training_equals_training_one_network(task: Task, activation: str, optimizer: Any) -> None:
    settings = [Setting(optimizer, 0.02, "glorot"), Setting(optimizer, 0.005, "pytorch", "standardised")]
    networks = Networks(task, activation, settings, [4, 9, 23])
    parameters = train(networks, 25, [25], torch.float64)[25]
    losses = networks.table(networks.losses(parameters, *networks.batch("test", torch.float64)))
    for row, setting in enumerate(settings):
        expected, loss = train_one(task, activation, setting, 9, 25)
        torch.testing.assert_close(parameters[3 * row + 1], expected, rtol=1e-9, atol=1e-11)
        assert losses[row, 1].item() == pytest.approx(loss, rel=1e-9)


def test_initializations() -> None:
    network = TwoLayers(2, 3, "relu")
    network.initialize("pytorch", 5)
    first = network.first.weight.clone()
    assert 0.9 / math.sqrt(2) < first.abs().max() <= 1 / math.sqrt(2)
    assert network.second.bias.abs().max() <= 1 / math.sqrt(32)
    network.initialize("glorot", 5)
    assert network.first.bias.count_nonzero() == 0
    torch.testing.assert_close(network.first.weight, first * math.sqrt(2 * 6 / 34))  # the same draw, another bound


def test_lr_decay() -> None:
    settings = [Setting("adam", 0.5, "pytorch"), Setting("adam", 0.5, "pytorch", decay=True)]
    networks = Networks(ONE_ARM, "relu", settings, [0, 1])
    for progress, lr in ((0, 0.5), (0.5, 0.5), (0.75, 0.25), (0.99, 0.01)):
        assert networks.lrs(progress).flatten().tolist() == pytest.approx([0.5, 0.5, lr, lr])


def test_tuning_uses_validation_data_and_handles_divergence() -> None:
    steps = 40
    found = tune(ONE_ARM, "relu_square", range(3), steps)
    assert found.steps == lengths(steps) == (10, 20, 40)
    assert found.test.shape == (3, len(grid(ONE_ARM))) == (3, 24)
    setting, chosen = found.best
    assert found.validation.min() == found.validation[found.steps.index(chosen), found.settings.index(setting)]
    networks = Networks(ONE_ARM, "relu_square", [setting], range(3))
    parameters = train(networks, chosen, [chosen])[chosen]
    expected = networks.losses(parameters, *networks.batch("validation")).median()
    assert found.validation.min() == pytest.approx(expected.item(), rel=1e-4)

    wild = Tuned((Setting("sgd", 1e6, "pytorch"),), (2, 3, 30), *np.zeros((3, 3, 1)))
    diverged = retrain(ONE_ARM, "relu_square", wild, range(2), 30)
    assert np.isinf(diverged.curves["test_loss"][-1]).all()
    assert not np.isnan(diverged.curves["test_loss"]).any()


def test_infinite_losses() -> None:
    inf = math.inf
    ratio = draw.log_ratio(np.array([1.0, inf, 1.0, inf]), np.array([4.0, 1.0, inf, inf]))
    np.testing.assert_array_equal(ratio, [-2, inf, -inf, np.nan])
    np.testing.assert_array_equal(measures.settled(np.array([1.0, inf, 3.0])), [1, 3, 3])
    assert measures.difference(np.array([1.0, inf]), np.array([5.0, 2.0]), -1)["mean"] == -0.5  # −4 and 5 − 2
    with pytest.raises(ValueError, match="every network of the chosen setting diverged"):
        measures.settled(np.array([inf, inf]))


def test_intervals_against_scipy() -> None:
    rng = np.random.default_rng(0)
    ours, base = rng.normal(1, 1, 30), rng.normal(0, 1, 30)
    low, high = stats.ttest_rel(ours, base).confidence_interval(0.95)
    found = measures.difference(ours, base, 1)
    assert (found["low"], found["high"]) == pytest.approx((low, high), rel=1e-4)
    assert found["share_better"] == np.mean(ours > base)


def test_smoothness_of_known_curves() -> None:
    true = data.trajectory(measures.TIMES)
    assert measures.roughness(true) == 1
    assert measures.roughness(2 * true) == pytest.approx(4)
    corner = np.array([[0, 0], [1, 0], [1.5, 0.5], [1.5, 1.5]])  # a right angle that two steps share
    assert measures.largest_turn(corner) == pytest.approx(90)
    assert measures.largest_turn(-corner) == pytest.approx(90)  # past ±180°
    ticks = np.linspace(-1.2, 1.2, 241)
    x1, x2 = np.meshgrid(ticks, ticks)
    nothing = np.full_like(x1, -9)
    assert measures.boundary_turn(ticks, np.stack([x1 - 0.3, 0 * x1, nothing])) == pytest.approx(0, abs=1e-4)
    right_angle = np.stack([x1 - np.abs(x2), 0 * x1, nothing])
    assert measures.boundary_turn(ticks, right_angle) == pytest.approx(90, abs=1)
    circle = np.stack([np.hypot(x1, x2) - 0.5, 0 * x1, nothing])
    assert measures.boundary_turn(ticks, circle) == pytest.approx(math.degrees(2 * measures.SPACING / 0.5), rel=0.2)


def test_units() -> None:
    networks = Networks(ONE_ARM, "relu", [DEFAULT], [0])
    network = TwoLayers(1, 2, "relu")
    nn.init.zeros_(network.first.weight)
    nn.init.ones_(
        network.first.bias
    )  # always on, but for three: with kinks at ½ and ¼, and with one at 1½, off in [0, 1]
    with torch.no_grad():
        network.first.weight[:3, 0] = torch.tensor([2.0, -1.0, 2.0])
        network.first.bias[:3] = torch.tensor([-1.0, 0.25, -3.0])
    parameters = parameters_to_vector(network.parameters())[None].detach()
    found = measures.units(networks, parameters, torch.tensor([[[0.0, 0.4, 1.0]]]))
    assert {name: counts.tolist() for name, counts in found.items()} == {"with_kink": [2], "dead": [1]}


def test_jacobian_against_finite_differences() -> None:
    networks = Networks(ONE_ARM, "relu_square", [DEFAULT], [0, 1])
    parameters = networks.initial(torch.float64)
    inputs = torch.rand(2, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = ablation.jacobians(networks, parameters, inputs)
    assert jacobian.shape == (2, 6 * 2, 32 + 32 + 64 + 2)
    generator = torch.Generator().manual_seed(1)
    step = 1e-6 * torch.randn(2, 130, dtype=torch.float64, generator=generator)
    moved = networks.outputs(parameters + step, inputs) - networks.outputs(parameters, inputs)
    torch.testing.assert_close((jacobian @ step[..., None])[..., 0], moved.mT.flatten(1), rtol=1e-4, atol=1e-10)


def test_second_order_steps_never_raise_the_loss() -> None:
    networks = Networks(ONE_ARM, "relu_square", [DEFAULT], [0, 1])
    batch = networks.batch("train", torch.float64)
    losses = [networks.losses(ablation.levenberg_marquardt(networks, n), *batch) for n in (0, 5, 20)]
    assert (losses[1] < losses[0]).all()
    assert (losses[2] < 0.1 * losses[0]).all()


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "spirals.jsonl").write_text("rows of an older run\n")  # replaced entirely
    rows = experiment.run(tmp_path / "figures", tmp_path / "rows", seed=1, seeds=3, shorten=100)
    names = ["fig3.png", "fig4.png", "fig5.png", "fig6.png", "spirals_settings.png"]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == sorted([*names, "spirals.jsonl"])
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "figures").iterdir())
    stored = Store(tmp_path / "rows" / "spirals.jsonl").rows()
    assert [row.row for row in stored] == [row.row for row in rows]
    tasks = {f"{task}/{name}" for task in ("one-arm", "three-arm") for name in ACTIVATIONS}
    assert {row.row for row in stored} >= tasks | {"settings/one-arm", "ablation/data"}
    assert {(row.experiment, row.seed) for row in stored} == {("spirals", 1)}
    assert all(row.versions and row.hardware and row.date for row in stored)
    printed = capsys.readouterr().out
    assert "ReLU-Square" in printed

    one = next(row for row in stored if row.row == "one-arm/relu_square")
    relu = next(row.metrics for row in stored if row.row == "one-arm/relu")
    losses = one.metrics["test_loss"]
    assert len(losses) == one.recipe["seeds"] == 3
    assert one.metrics["means"]["test_loss"]["mean"] == pytest.approx(np.mean(losses), rel=1e-3)
    against = one.metrics["against_relu"]
    assert against["test_loss"]["mean"] == pytest.approx(np.mean(losses) - np.mean(relu["test_loss"]), abs=1e-4)
    smoother = judge_sign(-1, Interval.read(against["sharpest_turn"], 3)).value
    assert f"one-arm: smoothness {smoother}" in printed
    assert 0 <= one.metrics["units"]["dead"] <= 32 - one.metrics["units"]["with_kink"]
    curve = one.metrics["curve"]
    assert np.shape(curve["test_loss"]) == (5, len(curve["steps"]))
    middle = curve["test_loss"][2][curve["steps"].index(one.recipe["steps"])]
    assert middle == sorted(losses)[1]  # the curve passes through the values reported


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 1}, "seeds is 1; expected at least 2"),
        ({"seed": -1}, "seed is -1"),
        ({"shorten": 0}, "shorten is 0; expected 1 for the whole training"),
        ({"shorten": 1000}, "shorten is 1000"),
    ],
)
def test_bad_input_of_the_run(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiment.run(tmp_path, tmp_path, **options)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write into"):
        experiment.run(tmp_path / "file", tmp_path)


def test_bad_input_of_the_data() -> None:
    for arguments, message in (
        ((0, "dev", 5), "split is 'dev'; expected one of train, validation, test"),
        ((-1, "train", 5), "seed is -1"),
        ((0, "train", 0), "points is 0; expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            data.one_arm(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noise is nan"):
        data.three_arms(0, "train", 5, noise=math.nan)
