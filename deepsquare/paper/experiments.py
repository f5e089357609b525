"""The experiments by name, each with its own options: ``deepsquare reproduce NAME``.

The modules that need the extra ``paper`` are imported when an experiment runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepsquare._files import ensure_writable
from deepsquare.paper.grid.backend import Workers
from deepsquare.paper.tables import BASELINES_TABLE, TABLE_2, TABLE_3, PaperTable

ScheduleName = Literal["quick", "short", "long"]


@dataclass(frozen=True)
class OutputFolders:
    """Where an experiment writes.

    Attributes:
        results: Folder for the rows.
        figures: Folder for the figures.
        report: Folder for the report.
    """

    results: Path = Path("out/results")
    figures: Path = Path("out/figures")
    report: Path = Path("out/report")


LOCAL, OUT = Workers(), OutputFolders()


def fig2(*, networks: int = 10_000, output: OutputFolders = OUT) -> None:
    """Figure 2: decision regions of two hidden units, with an exact count of their components.

    Args:
        networks: How many random networks of each kind are checked.
        output: Where to write.
    """
    from deepsquare.paper.fig2.experiment import run

    run(output.figures, output.results, networks=networks)


def spirals(*, seeds: int = 100, output: OutputFolders = OUT) -> None:
    """Figures 3 to 6: ReLU-Square against ReLU on spirals; one run makes all four.

    Args:
        seeds: How many networks of each activation.
        output: Where to write.
    """
    from deepsquare.paper.spirals.experiment import run

    run(output.figures, output.results, seeds=seeds)


def _table(*tables: PaperTable) -> Callable[..., None]:
    """The experiment that trains the rows of ``tables``."""

    def train_table(
        *,
        schedule: ScheduleName = "quick",
        seeds: int = 1,
        rows: tuple[str, ...] = (),
        data: Path | None = None,
        workers: Workers = LOCAL,
        output: OutputFolders = OUT,
    ) -> None:
        """Train the vanilla CNN on CIFAR-10; an interrupted grid of runs is resumed by the same command.

        Args:
            schedule: How long the networks train: 2, 10 or 60 epochs.
            seeds: How many seeds.
            rows: Only these rows of the table, by their labels.
            data: Folder with CIFAR-10; downloaded and cached when not given.
            workers: Where to train.
            output: Where to write.
        """
        from deepsquare.paper.cifar10.experiment import run_tables

        run_tables(
            tables, schedule=schedule, seeds=seeds, rows=rows, results=output.results, folder=data, workers=workers
        )

    names = " and ".join(f"Table {table.number}" if table.number else table.title for table in tables)
    doc = train_table.__doc__ or ""
    train_table.__doc__ = f"{names}: {doc[:1].lower()}{doc[1:]}"
    return train_table


def recipe(*, data: Path | None = None, workers: Workers = LOCAL, output: OutputFolders = OUT) -> None:
    """Choose the recipe of Tables 2 and 3 by the accuracy on held-out training images.

    Args:
        data: Folder with CIFAR-10; downloaded and cached when not given.
        workers: Where to train.
        output: Where to write.
    """
    from deepsquare.paper.cifar10.experiment import choose_recipe

    choose_recipe(results=output.results, folder=data, workers=workers)


def proxy(
    *, data: Path, seeds: int = 1, rows: tuple[str, ...] = (), workers: Workers = LOCAL, output: OutputFolders = OUT
) -> None:
    """Train rows of Tables 4 and 7 on a small data set at a small image size.

    Args:
        data: Folder with train and val, each with a folder of images per class.
        seeds: How many seeds.
        rows: Only these rows, by the names of their recipes.
        workers: Where to train.
        output: Where to write.
    """
    from deepsquare.paper.imagenet.proxy import run_proxy

    run_proxy(data, seeds=seeds, rows=rows, results=output.results, workers=workers)


def int8(*, data: Path, rows: tuple[str, ...] = (), output: OutputFolders = OUT) -> None:
    """Quantize the networks that proxy trained, and measure their accuracy in every runtime.

    Args:
        data: Folder with train and val, each with a folder of images per class.
        rows: Only these networks, by the names of their rows.
        output: Where to write.
    """
    from deepsquare.paper.deployment.int8 import run_int8

    run_int8(data, rows=rows, results=output.results)


def parity(*, rows: tuple[str, ...] = (), output: OutputFolders = OUT) -> None:
    """Compare exported networks with their models: every technique in every runtime.

    Args:
        rows: Only these models.
        output: Where to write.
    """
    from deepsquare.paper.deployment.parity import run_parity

    run_parity(rows=rows, results=output.results)


def everything(
    *,
    schedule: ScheduleName = "quick",
    seeds: int = 1,
    rows: tuple[str, ...] = (),
    data: Path | None = None,
    networks: int = 10_000,
    workers: Workers = LOCAL,
    output: OutputFolders = OUT,
) -> None:
    """Figures 2 to 6 and Tables 2 and 3.

    Args:
        schedule: How long the networks of the tables train: 2, 10 or 60 epochs.
        seeds: How many seeds of the tables.
        rows: Only these rows of the tables, by their labels.
        data: Folder with CIFAR-10; downloaded and cached when not given.
        networks: How many random networks of each kind are checked for Figure 2.
        workers: Where to train.
        output: Where to write.
    """
    from deepsquare.data.cifar10 import DataUnavailableError, load_cifar10
    from deepsquare.paper.cifar10.experiment import table_runs

    table_runs((TABLE_2, TABLE_3), schedule, seeds, rows)  # fail early, not after the figures
    if data is not None:
        load_cifar10(data)
    for folder in (output.results, output.figures, output.report):
        ensure_writable(folder)
    fig2(networks=networks, output=output)
    spirals(output=output)
    try:
        _table(TABLE_2, TABLE_3)(schedule=schedule, seeds=seeds, rows=rows, data=data, workers=workers, output=output)
    except DataUnavailableError as error:
        warnings.warn(f"Tables 2 and 3 are skipped: {error}", stacklevel=1)


EXPERIMENTS: dict[str, Callable[..., None]] = {
    "fig2": fig2,
    **dict.fromkeys(("fig3", "fig4", "fig5", "fig6"), spirals),
    "table2": _table(TABLE_2),
    "table3": _table(TABLE_3),
    "baselines": _table(BASELINES_TABLE),
    "recipe": recipe,
    "proxy": proxy,
    "int8": int8,
    "parity": parity,
    "all": everything,
}
