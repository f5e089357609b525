"""Tables 1 to 3: squares in a vanilla CNN on CIFAR-10.

NOTE not in paper: the optimizer, learning rate, augmentation and number of epochs. All rows use one recipe. It was
chosen by the accuracy of the *Original* row on 5,000 training images held out from training
(``deepsquare reproduce recipe``). Its schedules differ in the number of epochs only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from deepsquare.data import cifar10
from deepsquare.data.in_memory import InMemoryBatches, LabeledImages, eval_batches
from deepsquare.paper.grid.backend import LOCAL, Workers
from deepsquare.paper.grid.runner import InMemoryTraining, TrainingRun, run_grid
from deepsquare.paper.options import OUT, Cifar10Folder, OutputFolders, Schedule, Seeds, TableRows, check_selection
from deepsquare.paper.tables import PaperTable, stored_labels
from deepsquare.results import Store
from deepsquare.training import CifarRecipe, Evaluation

RECIPE = CifarRecipe(epochs=10, weight_decay=1e-4, pad=2)
SCHEDULES: Mapping[str, CifarRecipe] = {
    "quick": replace(RECIPE, epochs=2),
    "short": RECIPE,
    "long": replace(RECIPE, epochs=60),
    "longest": replace(RECIPE, epochs=200),
}
CANDIDATES: Mapping[str, CifarRecipe] = {
    f"decay {decay:g}, pad {pad}": replace(RECIPE, weight_decay=decay, pad=pad)
    for decay in (5e-4, 1e-4)
    for pad in (4, 2)
}
HELD_OUT = 5_000


@dataclass(frozen=True)
class Cifar10Data:
    """The data of a run: the training and the test set, or the training set split into two parts."""

    folder: Path | None = None
    held_out: int = 0

    def __call__(self, run: TrainingRun) -> tuple[InMemoryBatches, Evaluation]:
        train, test = _splits(self.folder, self.held_out)
        recipe = run.recipe
        assert isinstance(recipe, CifarRecipe)
        batches = InMemoryBatches(train, recipe.batch_size, pad=recipe.pad, flip=recipe.flip, seed=run.seed)
        return batches, partial(eval_batches, test)


@cache
def _splits(folder: Path | None, held_out: int) -> tuple[LabeledImages, LabeledImages]:
    data = cifar10.load_cifar10(folder)
    return data.train.split(held_out) if held_out else (data.train, data.test)


def table_runs(tables: Sequence[PaperTable], schedule: str, seeds: int, rows: Sequence[str] = ()) -> list[TrainingRun]:
    """The runs of the tables, or of the rows with these labels, ordered by seed.

    Each network runs once; one in several tables has its label of the first.
    """
    specs = {entry.label: entry.spec for table in tables for entry in table.entries}
    check_selection(seeds, rows, specs)
    wanted = {specs[label] for label in rows or specs}
    return [
        TrainingRun("cifar10", label, seed, "vanilla_cnn", spec, schedule, SCHEDULES[schedule])
        for seed in range(seeds)
        for spec, label in stored_labels().items()
        if spec in wanted
    ]


def table_experiment(description: str, *tables: PaperTable) -> Callable[..., None]:
    """The experiment that trains every network of the tables with each seed and appends to ``cifar10.jsonl``."""

    def train_tables(
        *,
        schedule: Schedule = "quick",
        seeds: Seeds = 1,
        rows: TableRows = (),
        data: Cifar10Folder = None,
        workers: Workers = LOCAL,
        output: OutputFolders = OUT,
    ) -> None:
        runs = table_runs(tables, schedule, seeds, rows)
        cifar10.load_cifar10(data)  # download once, and fail early
        run_grid(runs, InMemoryTraining(Cifar10Data(data)), Store(output.results / "cifar10.jsonl"), workers)

    train_tables.__doc__ = f"{description}; the same command resumes an interrupted grid of runs."
    return train_tables


def choose_recipe(*, data: Cifar10Folder = None, workers: Workers = LOCAL, output: OutputFolders = OUT) -> None:
    """Choose the recipe of Tables 2 and 3 by the accuracy on held-out training images."""
    cifar10.load_cifar10(data)
    runs = [
        TrainingRun("cifar10-recipe", name, 0, "vanilla_cnn", "", "candidate", recipe)
        for name, recipe in CANDIDATES.items()
    ]
    store = Store(output.results / "cifar10_recipe.jsonl")
    run_grid(runs, InMemoryTraining(Cifar10Data(data, HELD_OUT)), store, workers)
