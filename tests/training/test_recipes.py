"""The recipes for ImageNet, value by value as the paper has them (Section 5), and the time they are said to take."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from torch import nn

from deepsquare.cost import cost_of
from deepsquare.paper.imagenet.hours import seconds_at_best
from deepsquare.results import Store
from deepsquare.training import ImageNetRecipe
from deepsquare.training.named_recipes import RECIPES
from deepsquare.training.recipe import override

RESULTS = Path(__file__).parents[2] / "results"


def test_the_recipes_are_those_of_the_paper() -> None:
    assert len(RECIPES) == 9 + 5 + 7
    for name, recipe in RECIPES.items():
        mobile = recipe.model.startswith("shufflenet")
        assert (recipe.momentum, recipe.nesterov) == (0.9, True)
        assert (recipe.batch_size, recipe.lr, recipe.warmup) == (1024, 0.4, 5)
        assert recipe.weight_decay == (4e-5 if mobile else 1e-4)
        assert recipe.epochs == (400 if mobile else 200 if name.endswith("@200") else 120)
        assert recipe.dropout == (0.2 if recipe.spec else None)
        assert (recipe.size, recipe.eval_resize, recipe.eval_size) == (224, 256, 224)
        assert (recipe.crop_area, recipe.crop_ratio, recipe.flip) == ((0.08, 1.0), (3 / 4, 4 / 3), True)
        assert "softmin(" not in recipe.spec  # the default: one scale that all classes share
        assert recipe.lr_at(0) == 0
        assert recipe.lr_at(2.5) == pytest.approx(0.2)
        assert recipe.lr_at(5) == pytest.approx(0.4)
        assert recipe.lr_at((5 + recipe.epochs) / 2) == pytest.approx(0.2)
        assert recipe.lr_at(recipe.epochs) == pytest.approx(0)
    assert sum(name.endswith("@200") for name in RECIPES) == 1
    assert set(RECIPES) > {"resnet18", "resnet50+pooling+excitation", "shufflenet_v2_x0_5+pooling"}


def test_the_estimate_of_time_beside_the_training_steps_that_were_measured() -> None:
    """On this kind of machine: two cores of AVX2, 80 G multiply-accumulates and 28 GB a second."""
    kind, goes = "training step, batch 8", dict[str, list[float]]()
    for row in Store(RESULTS / "bench.jsonl").rows():
        if row.row.startswith("models/"):
            for measured in row.metrics.values():
                goes.setdefault(row.row.removeprefix("models/"), []).extend(
                    measured.get("seconds", {}).get(kind, {}).get("base", ())
                )
    beside = {name: median(found) / seconds_at_best(cost_of(name, ""), 80e9, 28e9) for name, found in goes.items()}
    relative = {name: ratio / beside["resnet50"] for name, ratio in beside.items()}
    assert relative["resnet18"] == pytest.approx(0.85, abs=0.1)  # as docs/training.md says
    assert relative["shufflenet_v2_x1_0"] == pytest.approx(1.5, abs=0.2)
    assert relative["shufflenet_v2_x0_5"] == pytest.approx(2.1, abs=0.3)


def test_the_optimiser_is_sgd_with_the_recipe_s_values() -> None:
    (group,) = RECIPES["shufflenet_v2_x1_0"].optimizer(nn.Linear(2, 2)).param_groups
    assert {key: group[key] for key in ("momentum", "nesterov", "weight_decay", "dampening")} == {
        "momentum": 0.9, "nesterov": True, "weight_decay": 4e-5, "dampening": 0,
    }  # fmt: skip


def test_the_rate_follows_the_batch_and_says_so() -> None:
    recipe, notes = override(ImageNetRecipe(), {"batch_size": 256})
    assert recipe.lr == pytest.approx(0.1)
    assert "0.4 for 1024 is 0.1 for 256" in notes[0]
    recipe, notes = override(ImageNetRecipe(), {"batch_size": 256, "lr": 0.4, "epochs": 2})
    assert (recipe.lr, recipe.warmup) == (0.4, 2.0)
    assert "warm-up of 5 epochs is cut to the 2" in notes[0]
    with pytest.raises(ValueError, match="a recipe has no field epoch; its fields are batch"):
        override(ImageNetRecipe(), {"epoch": 2})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("crop_area", (0.5, 0.1), "expected 0 < least"),
        ("eval_resize", 200, "eval_resize is 200; expected at least eval_size, 224"),
        ("precision", "float8", "precision is 'float8'; expected one of float32, bfloat16, float16"),
        ("ema", 1.5, "ema is 1.5; expected 0 < ema < 1"),
        ("dropout", 1.0, "dropout is 1.0"),
        ("size", True, "size is True; expected a whole number"),
    ],
)
def test_a_recipe_says_what_is_wrong(field: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ImageNetRecipe(**{field: value})
