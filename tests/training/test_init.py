"""Runs whose modules start at the identity: β by steps, in the EMA, over processes, in stored files."""

import dataclasses
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.images import make_colored_folders
from helpers.runs import CONFIG, RECIPE
from torch import Tensor, nn

import deepsquare as ds
from deepsquare.checkpoint import read_header
from deepsquare.training import ImageNetRecipe, StoppedError, Trainer, TrainerConfig, fit
from deepsquare.training.recipe import describe_run
from deepsquare.training.run import train

ANNEALED = dataclasses.replace(RECIPE, epochs=4, init="anneal", warmup=0.0, dropout=None)
EMA = TrainerConfig(ema=0.9)


class Images:
    """Three batches of four random images."""

    def __len__(self) -> int:
        return 3

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
        generator = torch.Generator().manual_seed(number)
        yield from [(torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4) % 3) for _ in range(3)][start:]

    def evaluation(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(99)


def trainer(recipe: ImageNetRecipe, config: TrainerConfig = EMA) -> Trainer:
    torch.manual_seed(0)
    return Trainer(ds.create_model("vanilla_cnn", "pooling+softmin", init=recipe.init, num_classes=3), recipe, config)


def betas(model: nn.Module | None) -> list[float]:
    assert model is not None
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [value.item() for name, value in tensors if name.endswith(".beta")]


@pytest.mark.parametrize(
    ("epochs", "anneal_epochs", "values"),
    [
        (20, None, {0.5: 0.1, 2.5: 0.5, 5: 1, 5.01: 1, 20: 1}),
        (4, None, {0.5: 0.25, 1: 0.5, 2: 1, 4: 1}),  # half of a short run
        (4, 4.0, {1: 0.25, 4: 1}),
        (1, None, {0.25: 0.5, 0.5: 1, 1: 1}),
    ],
)
def test_beta_rises_linearly_to_one(epochs: int, anneal_epochs: float | None, values: dict[float, float]) -> None:
    recipe = dataclasses.replace(ANNEALED, epochs=epochs, anneal_epochs=anneal_epochs)
    assert {progress: recipe.beta_at(progress) for progress in values} == pytest.approx(values, rel=1e-12)
    assert recipe.beta_at(epochs) == 1
    assert dataclasses.replace(recipe, init="identity", anneal_epochs=None).beta_at(1) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "zero"}, "init is 'zero'; expected Literal"),
        ({"spec": "", "init": "identity"}, "init is identity; expected 'paper' without a spec"),
        ({"init": "anneal", "anneal_epochs": 9.0}, "anneal_epochs is 9.0; expected above 0, at most the 2 epochs"),
        ({"init": "identity", "anneal_epochs": 1.0}, "anneal_epochs is 1.0; expected None unless init is 'anneal'"),
    ],
)
def test_a_recipe_checks_its_init(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(RECIPE, **changes)


def test_every_step_has_its_beta_in_the_model_and_in_the_ema() -> None:
    data, whole, seen = Images(), trainer(ANNEALED), list[list[float]]()
    fit(
        whole, data, ANNEALED, data.evaluation, judge_end=False,
        on_step=lambda *_: seen.append([*betas(whole.model), *betas(whole.ema)]),
    )  # fmt: skip
    expected = [min(step / 6, 1.0) for step in range(1, 13)]  # two of four epochs of three steps
    assert seen == [pytest.approx([value] * 4) for value in expected]
    assert seen[-1] == [1.0] * 4


@pytest.mark.parametrize("init", ["identity", "anneal"])
def test_a_run_stopped_at_any_step_ends_with_the_same_bits(init: ds.surgery.Init, tmp_path: Path) -> None:
    data, recipe = Images(), dataclasses.replace(ANNEALED, init=init, epochs=2)
    whole = trainer(recipe)
    fit(whole, data, recipe, data.evaluation, judge_end=False)
    for stopped_at in range(1, 6):
        path, taken = tmp_path / f"{stopped_at}.pt", iter(range(1, 100))
        options: dict[str, Any] = {"checkpoint": path, "judge_end": False}
        with pytest.raises(StoppedError):
            fit(trainer(recipe), data, recipe, data.evaluation, stop=lambda: next(taken) == stopped_at, **options)  # noqa: B023
        again = trainer(recipe)
        fit(again, data, recipe, data.evaluation, **options)
        for ours, expected in ((again.model, whole.model), (again.ema, whole.ema)):
            assert ours is not None
            assert expected is not None
            assert all(map(torch.equal, ours.state_dict().values(), expected.state_dict().values()))
    assert betas(whole.model) == [1.0, 1.0] if init == "anneal" else all(betas(whole.model))
    other = dataclasses.replace(recipe, init="paper")
    with pytest.raises(ValueError, match=f"belongs to another run: its init is {init}, expected paper"):
        fit(trainer(other), data, other, data.evaluation, checkpoint=path)


def test_beta_is_learned_without_decay() -> None:
    recipe = dataclasses.replace(ANNEALED, init="identity", weight_decay=0.5)
    learned = trainer(recipe)
    named = {id(value): name for name, value in learned.model.named_parameters()}
    decays = {named[id(p)]: group["weight_decay"] for group in learned.optimizer.param_groups for p in group["params"]}
    assert {name: decay for name, decay in decays.items() if decay == 0} == {
        "pool.deepsquare_pooling.beta": 0, "fc.deepsquare_softmin.beta": 0,
    }  # fmt: skip
    no_1d = dataclasses.replace(recipe, decay_1d=False).optimizer(learned.model).param_groups
    assert {p.ndim for p in no_1d[0]["params"]} == {2, 4}
    assert [group["weight_decay"] for group in no_1d] == [0.5, 0.0]


def test_a_state_without_the_added_fields_is_resumed(tmp_path: Path) -> None:
    data, recipe, path = Images(), dataclasses.replace(ANNEALED, init="paper", epochs=2), tmp_path / "last.pt"
    taken = iter(range(1, 100))
    with pytest.raises(StoppedError):
        fit(trainer(recipe), data, recipe, data.evaluation, checkpoint=path, stop=lambda: next(taken) == 2)
    assert {"init", "anneal_epochs", "decay_1d"}.isdisjoint(torch.load(path, weights_only=True)["recipe"])
    assert describe_run(dataclasses.replace(recipe, decay_1d=False))["decay_1d"] is False
    state = torch.load(path, weights_only=True)
    state["recipe"]["start"] = state["recipe"].pop("pretrained")  # its name in earlier files
    torch.save({**state, "version": 3}, path)  # which had no checksum
    no_1d = dataclasses.replace(recipe, decay_1d=False)
    with pytest.raises(ValueError, match="its decay_1d is True, expected False"):
        fit(trainer(no_1d), data, no_1d, data.evaluation, checkpoint=path)
    assert fit(trainer(recipe), data, recipe, data.evaluation, checkpoint=path, judge_end=False).epochs == 2


def test_a_run_stores_its_init_and_earlier_runs_are_resumed(tmp_path: Path) -> None:
    data, output = make_colored_folders(tmp_path / "data"), tmp_path / "run"
    recipe = dataclasses.replace(ANNEALED, epochs=1, dropout=0.2)
    train("run", recipe, data, output, config=CONFIG, results=tmp_path)
    stored = json.loads((output / "run.json").read_text())
    assert (stored["init"], stored["anneal_epochs"], stored["decay_1d"]) == ("anneal", None, True)
    assert read_header(output / "model.safetensors").init == "anneal"
    assert betas(ds.load(output / "model.safetensors")) == [1.0]
    paper, options = dataclasses.replace(recipe, init="paper"), {"config": CONFIG, "results": tmp_path, "resume": True}
    with pytest.raises(ValueError, match="contains another run: init was anneal, is paper"):
        train("run", paper, data, output, **options)  # type: ignore[arg-type]
    train("run", paper, data, old := tmp_path / "old", config=CONFIG, results=tmp_path)
    stored = json.loads((old / "run.json").read_text())
    earlier = {name: value for name, value in stored.items() if name not in ("init", "anneal_epochs", "decay_1d")}
    earlier["start"] = earlier.pop("pretrained")
    (old / "run.json").write_text(json.dumps(earlier))
    assert train("run", paper, data, old, **options).epochs == 1  # type: ignore[arg-type]
