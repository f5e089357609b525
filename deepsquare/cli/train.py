"""``deepsquare train``: train a network by the paper's recipe."""

import inspect
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from deepsquare._terminal import show
from deepsquare.training import ImageNetRecipe, LoaderConfig, Recipe, StoppedError, TrainerConfig, init_distributed
from deepsquare.training.configure import configure
from deepsquare.training.recipe import RECIPES
from deepsquare.training.run import MODEL, train

SIGTERM_CODE, SIGINT_CODE = 143, 130  # exit codes of a process ended by the signal


def _overrides() -> Any:
    """A TypedDict of all fields of a recipe and the config: tyro leaves out keys without a flag on the command line."""
    hints = {name: f"(default: {getattr(TrainerConfig, name)})" for name in get_type_hints(TrainerConfig)}
    for name in get_type_hints(ImageNetRecipe):
        ((value, count),) = Counter(getattr(recipe, name) for recipe in RECIPES.values()).most_common(1)
        hints[name] = f"(in most recipes: {value})" if 2 * count > len(RECIPES) else "(by default that of the recipe)"
    types = get_type_hints(ImageNetRecipe) | get_type_hints(TrainerConfig)
    del types["loading"]  # a parameter of its own
    keys = {name: Annotated[kind, tyro.conf.arg(help_behavior_hint=hints[name])] for name, kind in types.items()}
    overrides = cast(Any, TypedDict)("Overrides", keys, total=False)
    docs = (inspect.getdoc(kind) or "" for kind in (Recipe, ImageNetRecipe, TrainerConfig))
    attributes = "\n".join(doc.partition("Attributes:\n")[2] for doc in docs)
    overrides.__doc__ = f"Changes to the recipe and the config.\n\nAttributes:\n{attributes}"
    return overrides


if TYPE_CHECKING:
    Overrides = dict[str, Any]
else:
    Overrides = _overrides()


def train_command(
    name: tyro.conf.Positional[str] = "",
    *,
    data: Path | None = None,
    output: Path | None = None,
    seed: int = 0,
    resume: bool = False,
    file: Path | None = None,
    device: str | None = None,
    results: Path = Path("out/results"),
    overrides: tyro.conf.OmitArgPrefixes[Overrides] = {},  # noqa: B006  # tyro passes a new one
    loading: tyro.conf.OmitArgPrefixes[LoaderConfig] = LoaderConfig(),  # noqa: B008
) -> None:
    """Train a network by the paper's recipe, of which every field can be changed.

    It runs in one process or, started by torchrun, in many that share each batch. The folder of the run keeps its
    checkpoint, its log and finally the model.

    Args:
        name: MODEL or MODEL+SPEC, such as resnet18+pooling, with any model of torchvision or timm; without it, the
            recipes of Tables 4, 5 and 7 are listed.
        data: Folder with train and val, each of class folders or of WebDataset shards.
        output: Folder of the run; out/train/NAME by default.
        seed: Seed of the initial weights, the order of the images and the crops.
        resume: Continue the run in that folder, if there is one.
        file: Changes to the recipe as TOML or JSON; flags on the command line override it.
        device: cpu or cuda; by default a GPU if there is one.
        results: Folder for the row of the result.
        overrides: Fields of the recipe, and how the run is computed.
    """
    if not name:
        _print_recipes()
        return
    recipe, config, notes = configure(name, overrides, file, loading)
    if data is None:
        raise ValueError("--data is missing; give the folder that holds train and val")
    output = output or Path("out/train") / name
    with init_distributed(device) as distributed:
        for note in notes if distributed.is_main_process else ():
            show(f"deepsquare: note: {note}", file=sys.stderr)
        options: dict[str, Any] = {"seed": seed, "config": config, "resume": resume, "results": results}
        try:
            train(name, recipe, data, output, distributed=distributed, **options)
        except (StoppedError, KeyboardInterrupt) as stopped:
            if distributed.is_main_process:
                message = str(stopped) or "stopped at once"
                show(f"deepsquare: {message}; the same command with --resume continues", file=sys.stderr)
            sys.exit(SIGTERM_CODE if isinstance(stopped, StoppedError) else SIGINT_CODE)
        if distributed.is_main_process:
            show(f"The model is {(output / MODEL).resolve()}")


def _print_recipes() -> None:
    from deepsquare.paper.imagenet.hours import MACHINES, hours
    from deepsquare.paper.tables import TABLES

    machines = " or ".join(f"{machine.devices} {machine.name}" for machine in MACHINES)
    title = f"deepsquare train NAME --data DIR: the paper's accuracies, and the estimated minimum hours on {machines}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("name", "table", "epochs", "top-1", "top-5", *(machine.name for machine in MACHINES)):
        table.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    entries = {entry.recipe: (paper.number, entry) for paper in reversed(TABLES) for entry in paper.entries}
    for name, recipe in RECIPES.items():
        number, entry = entries[name]
        accuracies = f"{entry.top1:.2f}", f"{entry.top5:.2f}"
        expected = (f"{hours(recipe, machine):.0f}" for machine in MACHINES)
        table.add_row(name, str(number), str(recipe.epochs), *accuracies, *expected)
    Console().print(table)
