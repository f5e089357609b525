"""The proxies: rows of the paper's tables on a few images."""

import dataclasses
from pathlib import Path

from helpers.images import make_colored_folders

from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.paper.imagenet.proxy import ImageFolderTraining, model_path, proxy_runs, recipe_of
from deepsquare.training.recipe import RECIPES, ImageNetRecipe


def short(run: TrainingRun) -> TrainingRun:
    assert isinstance(run.recipe, ImageNetRecipe)
    small = dataclasses.replace(run.recipe, epochs=1, batch_size=12, size=32, eval_size=32, eval_resize=36)
    return dataclasses.replace(run, recipe=small)


def test_a_proxy_changes_only_the_documented_fields_of_the_paper_s_recipe() -> None:
    recipe, paper = recipe_of("resnet18+pooling"), RECIPES["resnet18+pooling"]
    changed = {"size", "eval_size", "eval_resize", "epochs", "batch_size", "lr", "warmup"}
    fields = {field.name for field in dataclasses.fields(paper)}
    assert {name for name in fields if getattr(recipe, name) != getattr(paper, name)} == changed
    assert recipe.lr / recipe.batch_size == paper.lr / paper.batch_size


def test_a_network_is_trained_and_saved(tmp_path: Path) -> None:
    data = make_colored_folders(tmp_path / "data")
    (run,) = proxy_runs("colored", 1, ["shufflenet_v2_x0_5"])
    row = ImageFolderTraining(data)(short(run), tmp_path / "run.pt", lambda key, metrics: None)
    assert (row.row, row.recipe["spec"], row.recipe["schedule"]) == ("shufflenet_v2_x0_5", "", "96 px")
    assert 0 <= row.metrics["accuracy"] <= 1
    assert model_path(tmp_path, "shufflenet_v2_x0_5", 0).exists()
