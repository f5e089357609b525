"""``deepsquare reproduce``: the experiments of the paper."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import tyro

from deepsquare._files import ensure_writable
from deepsquare.cli.report import FIGURES, RESULTS, print_report
from deepsquare.data.cifar10 import DataUnavailableError, load_cifar10

Experiment = Literal[
    "fig2", "fig3", "fig4", "fig5", "fig6", "table2", "table3", "peers", "proxy", "int8", "parity", "recipe", "all"
]


def reproduce(
    experiment: tyro.conf.Positional[Experiment],
    *,
    schedule: Literal["quick", "short", "long"] = "quick",
    seeds: int | None = None,
    rows: tuple[str, ...] = (),
    data: Path | None = None,
    processes: int | None = None,
    ray: str | None = None,
    networks: int = 10_000,
    results: Path = Path("out/results"),
    figures: Path = Path("out/figures"),
    report: Path = Path("out/report"),
) -> None:
    """Run an experiment of the paper again: its figures, its rows and its claims. ``all`` ends with the report.

    A table is a grid of runs that goes on where it stopped, in one process per core or on a Ray cluster.

    Args:
        experiment: Which figure or table; peers are theirs in the vanilla CNN, proxy is rows of Tables 4 and 7 on
            the images in --data at a small size, int8 is the accuracy of their networks when
            quantised, parity is how exported networks differ from their models, recipe is the choice of the tables'
            recipe on held-out images.
        schedule: How long the networks of the tables train: 2, 10 or 60 epochs.
        seeds: How many seeds: 1 for the tables and 100 for the spirals (fig3 to fig6) if not given.
        rows: Only these rows of the tables, by their labels; of parity, these models; of int8, these networks.
        data: Folder with CIFAR-10, fetched and cached when not given; of proxy and int8, with train and val.
        processes: How many runs at a time; one per core when not given.
        ray: Address of a Ray cluster, or local to start one here.
        networks: How many random networks of each kind are checked for fig2.
        results: Folder for the rows.
        figures: Folder for the figures.
        report: Folder for the page of all.
    """
    from deepsquare.paper import spirals, tables
    from deepsquare.paper.cifar10 import experiment as cifar10
    from deepsquare.paper.fig2 import experiment as fig2
    from deepsquare.paper.imagenet import proxy

    grid: dict[str, Any] = {"results": results, "folder": data, "processes": processes, "ray": ray}
    grids = {
        "table2": (tables.TABLE_2,),
        "table3": (tables.TABLE_3,),
        "peers": (tables.BASELINES_TABLE,),
        "all": (tables.TABLE_2, tables.TABLE_3),
    }
    chosen = grids.get(experiment, ())
    if experiment == "all":  # what is wrong is said now, not after the figures
        cifar10.table_runs(chosen, schedule, 1 if seeds is None else seeds, rows)
        if data is not None:
            load_cifar10(data)
        for folder in (results, figures, report):
            ensure_writable(folder)
    if experiment in ("fig2", "all"):
        fig2.run(figures, results, networks=networks)
    if (experiment.startswith("fig") and experiment != "fig2") or experiment == "all":
        spirals.run(figures, results, **({} if seeds is None or experiment == "all" else {"seeds": seeds}))
    if experiment in ("proxy", "int8"):
        if data is None:
            raise ValueError("no images are named; give a folder with train and val of class folders: --data DIR")
        if experiment == "int8":
            from deepsquare.paper.deployment.int8 import run_int8

            run_int8(data, rows=rows, results=results)
        else:
            proxy.run_proxy(
                data, seeds=1 if seeds is None else seeds, rows=rows, results=results, processes=processes, ray=ray
            )
    if experiment == "parity":
        from deepsquare.paper.deployment.parity import run_parity

        run_parity(rows=rows, results=results)
    if experiment == "recipe":
        cifar10.choose_recipe(**grid)
    if chosen:
        try:
            cifar10.run_tables(chosen, schedule=schedule, seeds=1 if seeds is None else seeds, rows=rows, **grid)
        except DataUnavailableError as error:
            if experiment != "all":
                raise
            warnings.warn(f"Tables 2 and 3 are left out: {error}", stacklevel=1)
    if experiment == "all":
        print_report((results, RESULTS), (figures, FIGURES), report)
