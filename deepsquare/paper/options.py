"""The options that several experiments have, with their help on the command line."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg


@dataclass(frozen=True)
class OutputFolders:
    """Where to write.

    Attributes:
        results: Folder for the rows.
        figures: Folder for the figures.
        report: Folder for the report.
    """

    results: Path = Path("out/results")
    figures: Path = Path("out/figures")
    report: Path = Path("out/report")


OUT = OutputFolders()
Schedule = Annotated[
    Literal["quick", "short", "long", "longest"],
    arg(help="How long the networks of the tables train: 2, 10, 60 or 200 epochs."),
]
Seeds = Annotated[int, arg(help="How many seeds.")]
Rows = Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all)")]
TableRows = Annotated[Rows, arg(help="Only these rows of the tables, by their labels.")]
Cifar10Folder = Annotated[Path | None, arg(help="Folder with CIFAR-10; downloaded and cached when not given.")]
ImageFolders = Annotated[Path, arg(help="Folder with train and val, each with a folder of images per class.")]
RandomNetworks = Annotated[int, arg(help="How many random networks of each kind are checked for Figure 2.")]


def check_selection(seeds: int, rows: Sequence[str], names: Iterable[str]) -> None:
    """Fail if there is no seed, or a row that is not one of ``names``."""
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; expected at least 1")
    if unknown := set(rows) - set(names):
        raise ValueError(f"no row is called {', '.join(sorted(unknown))}; the rows are {', '.join(names)}")
