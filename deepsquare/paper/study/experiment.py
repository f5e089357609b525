"""Runs the study: what is missing of its plan, in the planned order, resumable at any moment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import rich
from rich.markup import escape
from torch import nn
from tyro.conf import arg

from deepsquare._files import ensure_writable
from deepsquare.data import cifar10, tiny_imagenet
from deepsquare.data.in_memory import InMemoryBatches, LabeledImages, eval_batches
from deepsquare.models import create_model
from deepsquare.paper.cifar10 import ablation
from deepsquare.paper.cifar10.experiment import Cifar10Data
from deepsquare.paper.grid import runner
from deepsquare.paper.grid.backend import LOCAL, Workers
from deepsquare.paper.grid.runner import InMemoryTraining, Task, TrainingRun, run_tasks
from deepsquare.paper.options import OUT, OutputFolders
from deepsquare.paper.study.plan import PLAN, Family, TinyImageNetRecipe, check_store, read_plan
from deepsquare.paper.study.status import FamilyStatus, core_hours, status_table
from deepsquare.results import Row, Store
from deepsquare.surgery import equip
from deepsquare.training import Evaluation


@dataclass(frozen=True)
class TinyImageNetData:
    """The data of a run on Tiny ImageNet."""

    folder: Path

    def __call__(self, run: TrainingRun) -> tuple[InMemoryBatches, Evaluation]:
        recipe = run.recipe
        assert isinstance(recipe, TinyImageNetRecipe)
        train, test = _splits(self.folder, recipe.size, recipe.held_out)
        preprocessing = tiny_imagenet.preprocessing(recipe.size)
        batches = InMemoryBatches(
            train,
            recipe.batch_size,
            pad=recipe.pad,
            flip=recipe.flip,
            seed=run.seed,
            preprocessing=preprocessing,
        )
        return batches, partial(eval_batches, test, preprocessing=preprocessing)


@cache
def _splits(folder: Path, size: int, held_out: int) -> tuple[LabeledImages, LabeledImages]:
    data = tiny_imagenet.load_tiny_imagenet(folder, size)
    return data.train.split(held_out) if held_out else (data.train, data.val)


def build_model(run: TrainingRun) -> nn.Module:
    """The run's model with 200 classes; unless the recipe keeps it, without the max-pooling of the stem."""
    recipe = run.recipe
    assert isinstance(recipe, TinyImageNetRecipe)
    model = create_model(run.model, num_classes=tiny_imagenet.CLASSES, **run.kwargs)
    if not recipe.stem_pool:
        if not isinstance(getattr(model, "maxpool", None), nn.MaxPool2d):
            raise ValueError(f"{run.model} has no max-pooling in its stem; set stem_pool = true in its recipe")
        model.maxpool = nn.Identity()
    # A ratio of 0 would still draw random numbers.
    return equip(model, run.spec, dropout=recipe.dropout or None, input_shape=(3, recipe.size, recipe.size))


BUILDERS: Mapping[str, Callable[[TrainingRun], nn.Module]] = {
    "cifar10": runner.build_model,
    "cifar10_ablation": ablation.build_model,
    "tiny_imagenet": build_model,
}


def store_path(experiment: str, results: Path) -> Path:
    """The store of an experiment's rows."""
    return results / f"{experiment}.jsonl"


def run_study(
    *,
    data: Annotated[Path | None, arg(help="Folder with Tiny ImageNet, which most families need.")] = None,
    cifar10_data: Annotated[Path | None, arg(help="Folder with CIFAR-10; downloaded when not given.")] = None,
    plan: Annotated[Path, arg(help="The plan, as TOML.")] = PLAN,
    families: Annotated[
        tuple[str, ...],
        arg(help="Only these families of the plan, as --status lists them.", help_behavior_hint="(default: all)"),
    ] = (),
    status: bool = False,
    workers: Workers = LOCAL,
    output: OutputFolders = OUT,
) -> bool:
    """Run what is missing of the study, in the planned order; the same command resumes it.

    Args:
        status: Show the families, what is done and the core-hours that are left, and run nothing.
    """
    progress = study_status(plan, output.results, families)
    if status:
        rich.print(status_table(progress))
        if not output.results.is_dir():
            rich.print(f"{escape(str(output.results))} has no rows yet; give the folder of the rows as --results")
        return False
    runs = [run for family in progress if family.fits for run in family.missing]
    if not runs:
        rich.print("nothing is missing of the families that fit into the budget; see --status")
        return False
    workers.check()
    for folder in (output.results, output.report):
        ensure_writable(folder)
    on_tiny = [run for run in runs if run.experiment == "tiny_imagenet"]
    if on_tiny and data is None:
        needing = [family.family.name for family in progress if set(family.missing) & set(on_tiny)]
        names = ", ".join(f"'{name}'" for name in needing)
        raise ValueError(
            f"{len(on_tiny)} of the {len(runs)} runs need Tiny ImageNet; give its folder as --data, or select other "
            f"families than {names} with --families"
        )
    for run in {(run.model, run.spec, str(run.kwargs), run.recipe): run for run in runs}.values():
        _check_model(run)
    for size in {run.recipe.size for run in on_tiny if isinstance(run.recipe, TinyImageNetRecipe)}:
        assert data is not None
        tiny_imagenet.load_tiny_imagenet(data, size)  # decode once, and fail early
    if len(on_tiny) < len(runs):
        cifar10.load_cifar10(cifar10_data)
    hours = {run.key: family.hours for family in progress for run in family.missing}
    planned = [run for family in progress if family.fits for run in family.runs]
    run_tasks([_task(run, data, cifar10_data, output.results) for run in planned], workers, hours)
    return True


def _check_model(run: TrainingRun) -> None:
    """Fail early if a model cannot be built, for example without timm."""
    try:
        BUILDERS[run.experiment](run)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the plan's row {run.row!r} ({run.schedule}) has no usable model: {error}") from error


def _task(run: TrainingRun, data: Path | None, cifar10_data: Path | None, results: Path) -> Task:
    path = store_path(run.experiment, results)
    if run.experiment != "tiny_imagenet":
        return Task(run, InMemoryTraining(Cifar10Data(cifar10_data), BUILDERS[run.experiment]), path)
    folder = Path() if data is None else data.expanduser().resolve()  # without data, all these runs have their rows
    return Task(run, InMemoryTraining(TinyImageNetData(folder), BUILDERS[run.experiment]), path)


def study_status(plan: Path, results: Path, names: Sequence[str] = ()) -> list[FamilyStatus]:
    """The families of a plan, or those with these names, with their rows in ``results``."""
    if results.exists() and not results.is_dir():
        raise ValueError(f"--results {results} is a file; expected the folder of the rows")
    parsed = read_plan(plan)
    if unknown := set(names) - {family.name for family in parsed.family}:
        known = ", ".join(f"'{family.name}'" for family in parsed.family)
        raise ValueError(f"{plan} has no family {', '.join(sorted(unknown))}; its families are {known}")
    fitting = parsed.fitting(names)
    rows: dict[str, Row] = {}
    for experiment in dict.fromkeys(family.experiment for family in parsed.family):
        runs = [run for _, planned, _ in fitting for run in planned if run.experiment == experiment]
        stored = check_store(Store(store_path(experiment, results)), runs)
        rows |= {row.key: row for row in stored if row.experiment == experiment}

    kinds: dict[tuple[str, str, str], list[float]] = {}  # core-hours of the runs that are done
    for family, runs, _ in fitting:
        kinds.setdefault(_kind(family), []).extend(core_hours(rows[run.key]) for run in runs if run.key in rows)

    def status(family: Family, runs: list[TrainingRun], fits: bool) -> FamilyStatus:
        done = {run.key: rows[run.key] for run in runs if run.key in rows}
        own = {run.key for run in runs}
        shared = tuple(run for run in family.runs() if run.key not in own and run.key not in rows)
        hours = fmean(kinds[_kind(family)] or [family.hours])
        return FamilyStatus(family, tuple(runs), done, fits, shared, hours)

    return [status(*planned) for planned in fitting]


def _kind(family: Family) -> tuple[str, str, str]:
    """Families whose runs take about as long."""
    return family.experiment, family.schedule, family.model
