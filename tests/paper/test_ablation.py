"""The variants of the vanilla CNN in the study's ablations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.study_plans import ABLATION, write
from torch import Tensor, nn

from deepsquare.models import VanillaCNN, vanilla_cnn
from deepsquare.nn import EleSquare, SquareSoftmin
from deepsquare.paper.cifar10.ablation import (
    AblationRecipe,
    build_model,
    build_network,
    gradient_ratio,
    matched_factor,
)
from deepsquare.paper.cifar10.experiment import SCHEDULES
from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.paper.study.plan import PLAN, read_plan
from deepsquare.surgery import equip


def batch(size: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 32, 32, generator=generator), torch.arange(size) % 10


def network(spec: str = "", **fields: Any) -> VanillaCNN:
    torch.manual_seed(0)
    return build_network(spec, AblationRecipe(**fields))


def test_without_changes_it_is_the_network_and_the_recipe_of_table_2() -> None:
    torch.manual_seed(0)
    expected = equip(vanilla_cnn(), "pooling")
    images, _ = batch()
    assert torch.equal(network("pooling")(images), expected(images))
    shared = vars(SCHEDULES["short"])
    assert {name: vars(AblationRecipe())[name] for name in shared} == shared


def test_gap_times_two_doubles_the_mean() -> None:
    images, _ = batch()
    plain, doubled = network(), network(pool_factor=2.0)
    means: list[Tensor] = []
    for model in (plain, doubled):
        model.fc.register_forward_pre_hook(lambda module, args: means.append(args[0]))
        model(images)
    assert torch.equal(means[1], 2 * means[0])
    assert torch.equal(plain.fc.weight, doubled.fc.weight)


@pytest.mark.parametrize(("depth", "widths"), [(3, [32, 64, 128]), (5, [32, 32, 64, 64, 128])])
@pytest.mark.parametrize("activation", ["relu", "relu_square", "square"])
def test_depth_and_activation(depth: int, widths: list[int], activation: str) -> None:
    model = network(depth=depth, activation=activation)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [conv.out_channels for conv in convolutions] == widths
    assert model(batch(2)[0]).shape == (2, 10)
    assert len([m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]) == depth
    others = [m for m in model.modules() if isinstance(m, nn.ReLU)]
    assert len(others) == (depth if activation == "relu" else 0)
    if activation == "square":
        assert len([m for m in model.modules() if isinstance(m, EleSquare)]) == depth
    plain = network()
    (first, *_), (other, *_) = convolutions, [m for m in plain.modules() if isinstance(m, nn.Conv2d)]
    assert torch.equal(first.weight, other.weight)


def test_seven_layers_are_spread_over_the_stages() -> None:
    model = network(depth=7)
    strides = [(m.out_channels, m.stride[0]) for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert strides == [(32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (128, 2), (128, 1)]


def test_the_logits_of_square_softmin_do_not_depend_on_the_signs_of_a_class() -> None:
    model, images = network("softmin", fc_bias=2.0).eval(), batch()[0]
    assert bool((model.fc.bias == 2).all())
    expected = model(images)
    with torch.no_grad():
        model.fc.weight[::2] *= -1
        model.fc.bias[::2] *= -1
    torch.testing.assert_close(model(images), expected)


def test_a_matched_factor_makes_the_first_gradients_equal() -> None:
    images, labels = batch(128)
    for spec in ("pooling", "moment4", "moment6"):
        assert gradient_ratio(spec, 1.0, images, labels) > 1.5
        factor = matched_factor(spec, [(images, labels)])
        assert gradient_ratio(spec, factor, images, labels) == pytest.approx(1, abs=0.1)
    assert gradient_ratio("", 1.0, images, labels) == 1


def test_the_factors_of_the_plan_match_to_the_order_of_magnitude_on_noise() -> None:
    runs = {run.row: run for run in family("scale") if run.row.endswith("matched")}
    assert len(runs) == 5
    for run in runs.values():
        assert isinstance(run.recipe, AblationRecipe)
        assert 0.3 < gradient_ratio(run.spec, run.recipe.pool_factor, *batch(128)) < 3


def family(name: str) -> list[TrainingRun]:
    return next(family for family in read_plan(PLAN).family if family.name == name).runs()


def test_every_run_of_the_plan_can_be_built_and_pairs_with_original() -> None:
    names = ("scale", "DeepSquare6", "activations and depth", "Square-Softmin start")
    runs = [run for name in names for run in family(name)]
    for run in {run.row: run for run in runs}.values():
        assert build_model(run)(batch(2)[0]).shape == (2, 10)
    scale = family("scale")
    assert {run.recipe.lr for run in scale} == {0.025, 0.1, 0.4}
    pairs = {(run.schedule, run.seed) for run in scale if run.row == "Original"}
    assert {(run.schedule, run.seed) for run in scale} == pairs
    forms = {(run.row, run.schedule) for run in family("DeepSquare6")}
    assert len(forms) == 12
    assert all(any(isinstance(m, SquareSoftmin) for m in build_model(run).modules()) for run in family("DeepSquare6"))


def test_fields_by_row_and_more_schedules(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    (one,) = read_plan(write(path, ABLATION)).family
    found = [(run.seed, run.schedule, run.row, run.recipe.lr, vars(run.recipe)["pool_factor"]) for run in one.runs()]
    assert found[:4] == [
        (0, "lr × 1", "Original", 0.1, 1.0),
        (0, "lr × 1", "GAP × 2", 0.1, 2.0),
        (0, "lr × 4", "Original", 0.4, 1.0),
        (0, "lr × 4", "GAP × 2", 0.4, 2.0),
    ]
    for old, new, message in (
        ('"GAP × 2" = {', '"GAP" = {', "row_recipe has GAP; expected labels of rows"),
        ('"lr × 4" = {', '"lr × 1" = {', "more_schedules has 'lr × 1', which is the schedule"),
        ("pool_factor = 2.0", "pool_factor = 0.0", "pool_factor is 0.0; expected above 0"),
        ("pool_factor = 2.0", "depth = 2", "depth is 2; expected 3 to 30"),
        ("pool_factor = 2.0", 'activation = "tanh"', "activation is 'tanh'; expected "),
        (
            "hours = 1.0",
            'hours = 1.0\nmodel = "resnet18"',
            "it has kwargs or a model; an ablation on CIFAR-10 is one of",
        ),
    ):
        assert old in ABLATION
        with pytest.raises(ValueError, match=message):
            read_plan(write(path, ABLATION.replace(old, new)))
