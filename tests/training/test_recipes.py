"""The recipes for ImageNet against the paper (Section 5), and the estimate of their time."""

import dataclasses
import re
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from torch import nn

from deepsquare.cost import cost_of
from deepsquare.paper.imagenet.hours import MACHINES, hours, seconds_at_best
from deepsquare.results import Store
from deepsquare.training import CifarRecipe, ImageNetRecipe, TrainerConfig
from deepsquare.training.configure import configure, override
from deepsquare.training.recipe import ADDED_FIELDS, RECIPES, describe_run

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


def test_the_estimate_of_time_ratios_the_training_steps_that_were_measured() -> None:
    """On one machine, two cores of AVX2: 80 G multiply-accumulates and 28 GB a second."""
    kind, seconds = "training step, batch 8", dict[str, list[float]]()
    for row in Store(RESULTS / "bench.jsonl").rows():
        if row.row.startswith("models/") and row.hardware == "AMD EPYC, 2 CPUs":
            for measured in row.metrics.values():
                seconds.setdefault(row.row.removeprefix("models/"), []).extend(
                    measured.get("seconds", {}).get(kind, {}).get("base", ())
                )
    ratios = {name: median(times) / seconds_at_best(cost_of(name, ""), 80e9, 28e9) for name, times in seconds.items()}
    relative = {name: ratio / ratios["resnet50"] for name, ratio in ratios.items()}
    assert relative["resnet18"] == pytest.approx(0.85, abs=0.1)  # as docs/training.md says
    assert relative["shufflenet_v2_x1_0"] == pytest.approx(1.5, abs=0.2)
    assert relative["shufflenet_v2_x0_5"] == pytest.approx(2.1, abs=0.3)


def test_the_optimizer_is_sgd_with_the_values_of_the_recipe() -> None:
    (group,) = RECIPES["shufflenet_v2_x1_0"].optimizer(nn.Linear(2, 2)).param_groups
    assert {key: group[key] for key in ("momentum", "nesterov", "weight_decay", "dampening")} == {
        "momentum": 0.9, "nesterov": True, "weight_decay": 4e-5, "dampening": 0,
    }  # fmt: skip


def test_the_lr_follows_the_batch_size_with_a_note() -> None:
    recipe, notes = override(ImageNetRecipe(), {"batch_size": 256})
    assert recipe.lr == pytest.approx(0.1)
    assert "0.4 for 1024 is 0.1 for 256" in notes[0]
    recipe, notes = override(ImageNetRecipe(), {"batch_size": 256, "lr": 0.4, "epochs": 2})
    assert (recipe.lr, recipe.warmup) == (0.4, 2.0)
    assert "warm-up of 5 epochs is shortened to the 2" in notes[0]
    with pytest.raises(ValueError, match="a recipe has no field epoch; its fields are anneal_epochs, batch_size, "):
        override(ImageNetRecipe(), {"epoch": 2})


def test_images_are_evaluated_at_the_size_of_training_unless_it_is_set() -> None:
    def sizes(**changes: int) -> tuple[int, int, int]:
        recipe, _ = override(ImageNetRecipe(), changes)
        return recipe.size, recipe.eval_size, recipe.eval_resize

    assert sizes() == sizes(size=224) == (224, 224, 256)
    assert sizes(size=160) == (160, 160, 183)  # 160 · 256 / 224 = 182.9
    assert sizes(size=160, eval_size=224) == (160, 224, 256)
    assert sizes(size=64, eval_resize=64) == (64, 64, 64)
    assert sizes(eval_size=288) == (224, 288, 329)


def test_any_model_and_spec_has_the_recipe_of_the_resnets() -> None:
    for name, model, spec in (
        ("mobilenet_v3_small", "mobilenet_v3_small", ""),
        ("timm/resnet10t+softmin(scale='channel')+pooling", "timm/resnet10t", "softmin(scale='channel')+pooling"),
        ("torchvision/densenet121+gem", "torchvision/densenet121", "gem"),
    ):
        recipe, _, notes = configure(name, {})
        assert (recipe.model, recipe.spec, notes) == (model, spec, [])
        like = RECIPES["resnet50+pooling" if spec else "resnet50"]
        assert dataclasses.replace(recipe, model=like.model, spec=like.spec) == like
    recipe, *_ = configure("shufflenet_v2_x1_0+excitation", {"epochs": 9})
    assert recipe == dataclasses.replace(RECIPES["shufflenet_v2_x1_0+pooling"], spec="excitation", epochs=9)
    for name, message in (
        ("resnet18+poling", "unknown term 'poling'"),
        ("resnet18+", "not a spec"),
        ("timm/resnet9", "no model named 'timm/resnet9'; the nearest names are"),
        ("vgg16", "write 'torchvision/vgg16' or 'timm/vgg16'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            configure(name, {})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("crop_area", (0.5, 0.1), "expected 0 < low"),
        ("eval_resize", 200, "eval_resize is 200; expected at least eval_size, 224"),
        ("dropout", 1.0, "dropout is 1.0"),
        ("size", True, "size is True; expected int"),
    ],
)
def test_a_recipe_checks_its_values(field: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ImageNetRecipe(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("precision", "float8", "precision is 'float8'; expected Literal"),
        ("ema", 1.5, "ema is 1.5; expected 0 < ema < 1"),
        ("ema", "0.9", "ema is '0.9'; expected float | None"),
        ("micro_batch_size", 0, "micro_batch_size is 0; expected at least 1"),
        ("checkpoint_minutes", -1.0, "checkpoint_minutes is -1.0; expected 0 or more"),
    ],
)
def test_a_config_checks_its_values(field: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        TrainerConfig(**{field: value})


def test_a_row_describes_the_recipe_and_what_of_the_config_decides_the_result() -> None:
    described = describe_run(ImageNetRecipe(), TrainerConfig(precision="bfloat16", ema=0.5, compile=True))
    assert (described["precision"], described["ema"], described["sync_bn"]) == ("bfloat16", 0.5, False)
    assert "compile" not in described
    assert describe_run(CifarRecipe(epochs=1)).keys() == {field.name for field in fields(CifarRecipe)} - {*ADDED_FIELDS}
    (stored,) = {frozenset(row.recipe) - {"init_from"} for row in Store(RESULTS / "imagenet.jsonl").rows()}
    assert stored == {*describe_run(ImageNetRecipe()), "schedule"}, "new runs have the keys of committed rows"


def test_hours_of_resnet50_follow_from_its_measured_throughput() -> None:
    for machine in MACHINES:
        images = 120 * (1_281_167 + 50_000 / 3)  # evaluation has a forward pass only, a third of a step
        assert hours(RECIPES["resnet50"], machine) == pytest.approx(images / machine.resnet50 / 3600)
    assert hours(RECIPES["resnet18"], MACHINES[0]) < hours(RECIPES["resnet50"], MACHINES[0])
