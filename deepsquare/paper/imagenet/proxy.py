"""Rows of Tables 4 and 7 on a small data set at a small size: proxies, for a machine that cannot train on ImageNet.

They show that a network trains by the paper's recipe with a technique in it and, with seeds enough, which way its
accuracy on that data goes. They do not show the paper's numbers: those are of a thousand classes, 1.28 million
images of 224 × 224 and hundreds of epochs, where a network is short of capacity; here it is short of data.

The recipe is the paper's but for the size, the epochs, the batch, with which the rate goes, and the warm-up. Nothing
was chosen by a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepsquare.checkpoint import load_weights, save
from deepsquare.paper.grid.runner import Report, TrainingRun, run_grid, train_to_row
from deepsquare.paper.tables import CONTINUED, Entry
from deepsquare.results import Row, Store
from deepsquare.training import ImageNetRecipe
from deepsquare.training.image_folder import Loading
from deepsquare.training.named_recipes import DROPOUT, RECIPES
from deepsquare.training.recipe import override
from deepsquare.training.run import Settings, setup_training

SIZES = {"resnet18": 64, "shufflenet_v2_x1_0": 96, "shufflenet_v2_x0_5": 96}  # ResNet50 would take days
EPOCHS = {"resnet18": 20, "shufflenet_v2_x1_0": 30, "shufflenet_v2_x0_5": 40}
BATCH_SIZE, WARMUP = 64, 1.0
CONTINUED_EPOCHS, CONTINUED_LR = 10, 0.1  # of the rate before


def recipe_of(name: str) -> ImageNetRecipe:
    """The proxy's form of a recipe of the paper."""
    recipe = RECIPES[name]
    size = SIZES[recipe.model]
    changed = {"size": size, "eval_size": size, "eval_resize": round(size * recipe.eval_resize / recipe.eval_size)}
    small, _ = override(recipe, {**changed, "epochs": EPOCHS[recipe.model], "batch_size": BATCH_SIZE, "warmup": WARMUP})
    return small


def proxy_runs(experiment: str, seeds: int, rows: Sequence[str] = ()) -> list[TrainingRun]:
    """The runs seed after seed: from the start, and of one network after its base has been trained."""
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; expected at least 1")
    names = [name for name, named in RECIPES.items() if named.model in SIZES and not name.endswith("@200")]
    if unknown := set(rows) - set(names):
        raise ValueError(f"no row is called {', '.join(sorted(unknown))}; the rows are {', '.join(names)}")
    runs = []
    for seed in range(seeds):
        for name in rows or names:
            recipe = recipe_of(name)
            runs.append(TrainingRun(experiment, name, seed, recipe.model, recipe.spec, f"{recipe.size} px", recipe))
        runs += [_continued(experiment, seed, entry) for entry in CONTINUED.entries if not rows or entry.model in rows]
    return runs


def _continued(experiment: str, seed: int, entry: Entry) -> TrainingRun:
    base = recipe_of(entry.model)
    recipe = dataclasses.replace(
        base, spec=entry.spec, epochs=CONTINUED_EPOCHS, warmup=0.0, lr=CONTINUED_LR * base.lr,
        dropout=DROPOUT if entry.spec else None,
    )  # fmt: skip
    name = "+".join(filter(None, (entry.model, entry.spec)))
    return TrainingRun(experiment, name, seed, entry.model, entry.spec, f"{base.size} px, continued", recipe)


@dataclass(frozen=True)
class ImageFolderTraining:
    """A run on a folder of images; the trained model is kept, to be continued or deployed."""

    data: Path

    def __call__(self, run: TrainingRun, checkpoint: Path, report: Report) -> Row:
        """Train one model and make its row."""
        recipe, settings = run.recipe, Settings(loading=Loading("fast"))
        assert isinstance(recipe, ImageNetRecipe)
        parts = setup_training(recipe, self.data, run.seed, settings)
        continued = run.schedule.endswith("continued")
        base, own = (
            checkpoint.parent / f"{name}-seed{run.seed}.safetensors"
            for name in (run.model, f"{run.row}-continued" if continued else run.row)
        )
        if continued:
            if not base.exists():
                raise FileNotFoundError(
                    f"{base} is missing, which the run of {run.model} from the start leaves behind; where its row came "
                    "from another machine, train it here: give a new folder as --results"
                )
            load_weights(parts.trainer.model, base)  # the squares' own start values stay
        torch.manual_seed(run.seed)
        row = train_to_row(run, parts.trainer, parts.batches, parts.evaluation, checkpoint, report)
        save(parts.trainer.model, own, parts.preprocessing)
        return row


def run_proxy(
    data: Path,
    *,
    seeds: int = 1,
    rows: Sequence[str] = (),
    results: Path = Path("out/results"),
    processes: int | None = None,
    ray: str | None = None,
) -> None:
    """Train every row of Tables 4 and 7 that is small enough under each seed and add the rows to ``imagenet.jsonl``."""
    runs = proxy_runs(data.resolve().name, seeds, rows)
    first = runs[0].recipe
    assert isinstance(first, ImageNetRecipe)
    setup_training(first, data, 0, Settings(loading=Loading("fast")))  # a clear word before any process starts
    store = Store(results / "imagenet.jsonl")
    for started in (True, False):  # first what the others continue
        part = [run for run in runs if run.schedule.endswith("continued") != started]
        run_grid(part, ImageFolderTraining(data), store, processes=processes, ray=ray)
