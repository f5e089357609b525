"""Rows of Tables 4 and 7 on a small data set at a small image size: proxies, for a machine that cannot train ImageNet.

They show that a network with a technique trains by the paper's recipe and, with enough seeds, the sign of the change
in accuracy on that data. They do not show the paper's numbers: those are for 1,000 classes, 1.28 million images of
224 × 224 and hundreds of epochs, where capacity is the limit; here it is the amount of data.

The recipe is the paper's except for image size, epochs, batch size (with the learning rate) and warm-up. Nothing was
chosen by a result.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deepsquare.checkpoint import RunInfo, load_weights, save
from deepsquare.paper.grid.backend import LOCAL, OnProgress, Workers
from deepsquare.paper.grid.runner import TrainingRun, run_grid, train_to_row
from deepsquare.paper.options import OUT, ImageFolders, OutputFolders, Rows, Seeds, check_selection
from deepsquare.results import Row, Store
from deepsquare.training import ImageNetRecipe
from deepsquare.training.configure import override
from deepsquare.training.recipe import RECIPES
from deepsquare.training.run import setup_training

SIZES = {"resnet18": 64, "shufflenet_v2_x1_0": 96, "shufflenet_v2_x0_5": 96}  # ResNet50 would take days
EPOCHS = {"resnet18": 20, "shufflenet_v2_x1_0": 30, "shufflenet_v2_x0_5": 40}
BATCH_SIZE, WARMUP = 64, 1.0


def recipe_of(name: str) -> ImageNetRecipe:
    """A recipe of the paper, reduced for the proxy."""
    recipe = RECIPES[name]
    changed = {"size": SIZES[recipe.model], "epochs": EPOCHS[recipe.model], "batch_size": BATCH_SIZE, "warmup": WARMUP}
    small, _ = override(recipe, changed)
    return small


def proxy_runs(experiment: str, seeds: int, rows: Sequence[str] = ()) -> list[TrainingRun]:
    """The runs ordered by seed."""
    names = [name for name, named in RECIPES.items() if named.model in SIZES and not name.endswith("@200")]
    check_selection(seeds, rows, names)
    runs = []
    for seed in range(seeds):
        for name in rows or names:
            recipe = recipe_of(name)
            runs.append(TrainingRun(experiment, name, seed, recipe.model, recipe.spec, f"{recipe.size} px", recipe))
    return runs


@dataclass(frozen=True)
class ImageFolderTraining:
    """Trains on a folder of images and saves the model, to be continued or deployed."""

    data: Path
    base: Path | None = None  # the weights to continue

    def __call__(self, run: TrainingRun, checkpoint: Path, on_progress: OnProgress) -> Row:
        recipe = run.recipe
        assert isinstance(recipe, ImageNetRecipe)
        setup = setup_training(recipe, self.data, run.seed)
        if self.base is not None:
            load_weights(setup.trainer.model, self.base)  # new parameters keep their initial values
        torch.manual_seed(run.seed)
        row = train_to_row(run, setup.trainer, setup.batches, setup.evaluation, checkpoint, on_progress)
        info = RunInfo(run.row, run.seed, run.init_from)
        if run.seed == 0 or self.base is None:  # of the continued networks one each
            path = model_path(checkpoint.parent, **asdict(info))
            save(setup.trainer.model, path, setup.trainer.preprocessing, run=info)
        return row


def model_path(folder: Path, row: str, seed: int, init_from: str | None = None) -> Path:
    """The file of a trained model."""
    return folder / f"{row}{'' if init_from is None else '-continued'}-seed{seed}.safetensors"


def run_proxy(
    *,
    data: ImageFolders,
    seeds: Seeds = 1,
    rows: Rows = (),
    workers: Workers = LOCAL,
    output: OutputFolders = OUT,
) -> None:
    """Train rows of Tables 4 and 7 on a small data set at a small image size.

    Args:
        rows: Only these rows, by the names of their recipes.
    """
    runs = proxy_runs(data.resolve().name, seeds, rows)
    first = runs[0].recipe
    assert isinstance(first, ImageNetRecipe)
    setup_training(first, data)  # fail early
    store = Store(output.results / "imagenet.jsonl")
    run_grid(runs, ImageFolderTraining(data), store, workers)
