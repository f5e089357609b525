"""The commands that train and evaluate: ``deepsquare train | eval``."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from deepsquare.training import ImageNetRecipe, StoppedError, init_distributed
from deepsquare.training.image_folder import Loading
from deepsquare.training.named_recipes import RECIPES, named_recipe
from deepsquare.training.recipe import override
from deepsquare.training.run import MODEL, Settings, train

TERMINATED, INTERRUPTED = 143, 130  # the exit codes of a process that SIGTERM or Ctrl-C has ended


def training_command(arguments: Sequence[str]) -> Callable[..., None]:
    """``deepsquare train`` for these arguments: the recipe that they name, and a file changes, gives the defaults."""
    named = next((RECIPES[word] for word in arguments if word in RECIPES), ImageNetRecipe())
    start, in_file, flags = named, dict[str, Any](), _flags(arguments)
    if flags.get("file"):
        in_file = _read(Path(flags["file"]))
        try:
            start, _ = override(named, in_file)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{flags['file']}: {error}") from error
    if flags.get("epochs", "").isdecimal():
        start, _ = override(start, {"epochs": max(1, int(flags["epochs"]))})  # a longer warm-up is cut

    def command(
        name: tyro.conf.Positional[str] = "list",
        *,
        data: Path | None = None,
        output: Path | None = None,
        seed: int = 0,
        resume: bool = False,
        file: Path | None = None,
        device: str | None = None,
        results: Path = Path("out/results"),
        recipe: tyro.conf.OmitArgPrefixes[ImageNetRecipe] = start,
        settings: tyro.conf.OmitArgPrefixes[Settings] = Settings(),  # noqa: B008
    ) -> None:
        """Train a network by the recipe of a row of Tables 4, 5 or 7, every field of which can be changed.

        Alone or, started by torchrun, with many processes: a batch is shared by all. The folder of the run keeps its
        checkpoint, its log and at the end the model.

        Args:
            name: A recipe, such as resnet18+pooling; without one, all are listed.
            data: Folder with train and val, each of class folders or of WebDataset shards.
            output: Folder of the run; out/train/NAME when not given.
            seed: Of the first weights, the order and the crops.
            resume: Go on with the run in that folder, if there is one.
            file: Changes to the recipe as TOML or JSON; the command line has the last word.
            device: cpu or cuda; a GPU where there is one when not given.
            results: Folder for the row.
        """
        if name == "list":
            Console().print(_recipes())
            return
        if named_recipe(name) is not named:
            raise ValueError(f"the first name of a recipe is not {name}; give it first: deepsquare train {name} …")
        if data is None:
            raise ValueError("no data is named; give the folder that holds train and val: --data DIR")
        fields = [field.name for field in dataclasses.fields(recipe)]
        changed = {key: getattr(recipe, key) for key in fields if key in flags or key in in_file}
        changed |= {key.removeprefix("no_"): False for key in flags if key.startswith("no_") and key[3:] in fields}
        chosen, follows = override(named, changed)
        with init_distributed(device) as distributed:
            for note in follows if distributed.is_main_process else ():
                print(f"deepsquare: note: {note}", file=sys.stderr)
            place = output or Path("out/train") / name
            try:
                train(
                    name,
                    chosen,
                    data,
                    place,
                    seed=seed,
                    settings=settings,
                    distributed=distributed,
                    resume=resume,
                    results=results,
                )
            except (StoppedError, KeyboardInterrupt) as stopped:
                if distributed.is_main_process:
                    reason = str(stopped) or "stopped at once"
                    print(f"deepsquare: {reason}; the same command with --resume goes on", file=sys.stderr)
                sys.exit(TERMINATED if isinstance(stopped, StoppedError) else INTERRUPTED)
            if distributed.is_main_process:
                print(f"The model is {(place / MODEL).resolve()}")

    return command


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """The flags by field, each with what follows it first; of one that is given twice, the last."""
    found = {}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=True):
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            found[flag.replace("-", "_")] = value if equals else following
    return found


def _read(path: Path) -> dict[str, Any]:
    """Changes from a file."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected changes to a recipe there, as TOML or JSON")
    try:
        found = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is neither TOML nor, with the ending .json, JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected fields of a recipe with their values")
    here = {field.name for kind in (Settings, Loading) for field in dataclasses.fields(kind)} & set(found)
    if here:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(here))
        raise ValueError(f"{path}: {flags} is how a run is done, not part of a recipe; give it on the command line")
    return found


def _recipes() -> Table:
    from deepsquare.paper.imagenet.hours import MACHINES, hours
    from deepsquare.paper.tables import TABLES

    machines = " or ".join(f"{machine.devices} {machine.name}" for machine in MACHINES)
    title = f"deepsquare train NAME --data DIR: the paper's accuracies, and the least hours to expect on {machines}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("name", "table", "epochs", "top-1", "top-5", *(machine.name for machine in MACHINES)):
        table.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    rows = {entry.recipe: (paper.number, entry) for paper in reversed(TABLES) for entry in paper.entries}
    for name, recipe in RECIPES.items():
        number, entry = rows[name]
        accuracies = f"{entry.top1:.2f}", f"{entry.top5:.2f}"
        expected = (f"{hours(recipe, machine):.0f}" for machine in MACHINES)
        table.add_row(name, str(number), str(recipe.epochs), *accuracies, *expected)
    return table
