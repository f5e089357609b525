"""The proxies: rows of the paper's tables on a few images, and continued training of a trained network."""

import dataclasses
from pathlib import Path

import pytest
from helpers.images import make_colored_folders

from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.paper.imagenet.proxy import ImageFolderTraining, continued, proxy_runs, recipe_of
from deepsquare.paper.tables import CONTINUED
from deepsquare.results import Row
from deepsquare.training.recipe import RECIPES, ImageNetRecipe


def short(run: TrainingRun) -> TrainingRun:
    assert isinstance(run.recipe, ImageNetRecipe)
    small = dataclasses.replace(run.recipe, epochs=1, batch_size=12, size=32, eval_size=32, eval_resize=36)
    return dataclasses.replace(run, recipe=small)


def trained(run: TrainingRun, data: Path, checkpoint: Path) -> Row:
    return ImageFolderTraining(data)(short(run), checkpoint, lambda key, metrics: None)


def test_a_proxy_changes_only_the_documented_fields_of_the_paper_s_recipe() -> None:
    recipe, paper = recipe_of("resnet18+pooling"), RECIPES["resnet18+pooling"]
    changed = {"size", "eval_size", "eval_resize", "epochs", "batch_size", "lr", "warmup"}
    fields = {field.name for field in dataclasses.fields(paper)}
    assert {name for name in fields if getattr(recipe, name) != getattr(paper, name)} == changed
    assert recipe.lr / recipe.batch_size == paper.lr / paper.batch_size


def test_a_trained_network_is_continued_with_and_without_a_module(tmp_path: Path) -> None:
    data = make_colored_folders(tmp_path / "data")
    begun, *runs = proxy_runs("colored", 1, ["shufflenet_v2_x0_5"])
    first, *_ = (run for run in runs if run.spec == "pooling")
    with pytest.raises(FileNotFoundError, match=r"shufflenet_v2_x0_5-seed0.safetensors is missing"):
        trained(first, data, tmp_path / "early.pt")
    row = trained(begun, data, tmp_path / "begun.pt")
    assert (row.row, row.recipe["spec"], row.recipe["schedule"]) == ("shufflenet_v2_x0_5", "", "96 px")
    assert "init_from" not in row.recipe
    for run in runs[:2]:
        row = trained(run, data, tmp_path / f"{run.row}.pt")
        assert (row.recipe["schedule"], row.recipe["init_from"]) == ("96 px", "shufflenet_v2_x0_5")
        assert 0 <= row.metrics["accuracy"] <= 1
    run = continued("colored", 0, CONTINUED.entries[1], init="identity")
    row = trained(run, data, tmp_path / "identity.pt")
    assert (row.row, row.recipe["schedule"]) == ("shufflenet_v2_x0_5+pooling@identity", "96 px, identity")
    assert (row.recipe["init"], row.recipe["init_from"]) == ("identity", "shufflenet_v2_x0_5")
    saved = {file.name for file in tmp_path.glob("*.safetensors")}
    assert saved == {
        f"shufflenet_v2_x0_5{name}-seed0.safetensors"
        for name in ("", "-continued", "+pooling-continued", "+pooling@identity-continued")
    }  # fmt: skip
