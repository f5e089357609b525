"""The command line: ``deepsquare info | train | eval | export | predict | reproduce | report | bench``."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from deepsquare._files import ensure_writable
from deepsquare.cost import Cost, cost, short
from deepsquare.data.cifar10 import DataUnavailableError, load_cifar10
from deepsquare.models import create_model
from deepsquare.surgery import KINDS, Sites, equip, sites

app = tyro.extras.SubcommandApp()


@app.command
def info(
    model: tyro.conf.Positional[str],
    spec: tyro.conf.Positional[str] = "",
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    all_sites: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Show the sites of a model and what it costs, with what a spec adds.

    Args:
        model: A name of torchvision or timm, or vanilla_cnn.
        spec: Words joined by +, such as pooling+excitation.
        input_shape: Shape of one input, channels first; guessed when not given.
        num_classes: Number of classes, if not the model's own.
        all_sites: List every site with its module instead of a count.
        as_json: Print JSON instead of tables.
    """
    kwargs: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    base = create_model(model, **kwargs)
    shape = sites(base, input_shape).input_shape
    base_cost = cost(base, shape)
    equipped = equip(base, spec, input_shape=shape)
    equipped_cost = cost(equipped, shape)
    found = sites(equipped, shape)
    if as_json:
        print(json.dumps(_as_json(model, spec, shape, found, base_cost, equipped_cost), indent=2))
        return
    console = Console()
    console.print(_site_table(found, equipped, all_sites))
    console.print(_cost_table(model, spec, shape, base_cost, equipped_cost))


def _as_json(model: str, spec: str, shape: tuple[int, ...], found: Sites, base: Cost, equipped: Cost) -> dict[str, Any]:
    return {
        "model": model,
        "spec": spec,
        "input_shape": shape,
        "base": asdict(base),
        "equipped": asdict(equipped),
        "added": equipped.added_to(base),
        "sites": [asdict(site) for site in found],
        "missing": found.missing,
    }


def _site_table(found: Sites, model: nn.Module, every: bool) -> Table:
    table = Table(title=f"Sites of {type(model).__name__}", title_justify="left")
    for column in ("site", "count", "where", "filled by"):
        table.add_column(column, justify="right" if column == "count" else "left", overflow="fold")
    for kind in KINDS:
        places = found.of(kind)
        if not places:
            table.add_row(kind, "0", f"[dim]{found.missing[kind]}[/dim]", "")
        elif every:
            for place in places:
                shape = "×".join(map(str, place.shape))
                table.add_row(kind, "1", f"{place.position} of {place.path} ({shape})", place.term)
        else:
            ends = dict.fromkeys((places[0].path, places[-1].path))
            table.add_row(kind, str(len(places)), f"{places[0].position} of {' … '.join(ends)}", places[0].term)
    for place in found.of("named"):
        table.add_row("named", "1", f"{place.position} of {place.path}", place.term)
    return table


def _cost_table(name: str, spec: str, shape: tuple[int, ...], base: Cost, equipped: Cost) -> Table:
    title = f"{name}{' with ' + spec if spec else ''}: cost of one image of {'×'.join(map(str, shape))}"
    table = Table(title=title, title_justify="left")
    for column in ["", "base", *(["equipped", "added", "of base"] if spec else [])]:
        table.add_column(column, justify="left" if column == "" else "right")
    added = equipped.added_to(base)
    # An elementwise product is compared with the multiply-accumulates, of which it is about one.
    for label, key, whole in (
        ("parameters", "parameters", base.parameters),
        ("MACs of conv and FC", "macs", base.macs),
        ("elementwise products", "elementwise_muls", base.macs),
        ("bytes for backward", "activation_bytes", base.activation_bytes),
    ):
        before, after = getattr(base, key), getattr(equipped, key)
        more = [short(after), f"{added[key]:+,}", f"{added[key] / whole:+.3%}"] if spec else []
        table.add_row(label, short(before), *more)
    return table


Experiment = Literal[
    "fig2", "fig3", "fig4", "fig5", "fig6", "table2", "table3", "peers", "proxy", "int8", "parity", "recipe", "all"
]


@app.command
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
        _report((results, RESULTS), (figures, FIGURES), report)


RESULTS, FIGURES = Path("results"), Path("docs/figures")  # of a clone of the repository


@app.command(name="report")
def write_report(
    *,
    results: tuple[Path, ...] = (),
    figures: tuple[Path, ...] = (),
    output: Path = Path("out/report"),
) -> None:
    """Make the page of all results: the paper's tables and figures with ours beside them.

    Args:
        results: Folders with rows; of runs in several the first counts. Usually out/results and results.
        figures: Folders with figures; the first that has one wins. Usually out/figures and docs/figures.
        output: Folder for index.html and summary.md.
    """
    for folder in (*results, *figures):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder; name one that holds rows or figures")
    _report(results or (Path("out/results"), RESULTS), figures or (Path("out/figures"), FIGURES), output)


def _report(results: tuple[Path, ...], figures: tuple[Path, ...], output: Path) -> None:
    from deepsquare.paper.report import render

    page = render(results, figures, output)
    print(f"The report is {page.resolve()}")


@app.command
def bench(
    subject: tyro.conf.Positional[Literal["train", "models", "ops", "data", "deploy"]],
    *,
    rounds: int | None = None,
    steps: int | None = None,
    backbones: tuple[str, ...] = (),
    specs: tuple[str, ...] = (),
    functions: tuple[str, ...] = (),
    data: Path | None = None,
    results: Path = Path("out/results"),
) -> None:
    """Measure side by side, in turns within one run.

    Args:
        subject: train is our loop on CIFAR-10 against bare steps, and against torchvision with a DataLoader; models is
            every technique and peer against its plain network; ops is every function against the limit of the memory,
            the formula, the compiler and timm's attentions; data is every way to read images against torchvision's;
            deploy is every technique in onnxruntime and ExecuTorch, float32 and int8, against its plain network.
        rounds: Turns of each contestant: 5 for train, 9 for models and data, 15 for ops and 300 for deploy if not
            given.
        steps: Of train, the training steps of a turn; one epoch when not given.
        backbones: Of models, the networks, the paper's four when not given; of deploy, shufflenet_v2_x1_0 and resnet18.
        specs: Of models and deploy, what is put into them; all techniques and peers when not given, of deploy all
            techniques and se.
        functions: Of ops, the functions; all when not given.
        data: Of train, the folder with CIFAR-10; fetched and cached when not given. Of data, the folder that holds
            train, with a folder of images for each class.
        results: Folder for the rows.
    """
    from deepsquare.paper.bench import data as images
    from deepsquare.paper.bench import models, ops, train

    if subject == "train":
        train.run(rounds=5 if rounds is None else rounds, steps=steps, folder=data, results=results)
    elif subject == "models":
        turns = 9 if rounds is None else rounds
        models.run(backbones or models.BACKBONES, specs or models.SPECS, rounds=turns, results=results)
    elif subject == "deploy":
        from deepsquare.paper.bench import deployment as deploy

        turns = 300 if rounds is None else rounds
        deploy.run(backbones or deploy.BACKBONES, specs or deploy.SPECS, rounds=turns, results=results)
    elif subject == "data":
        if data is None:
            raise ValueError("bench data needs images; give --data DIR, which holds train with a folder for each class")
        images.run(data, rounds=9 if rounds is None else rounds, results=results)
    else:
        ops.run(functions or tuple(ops.FUNCTIONS), rounds=15 if rounds is None else rounds, results=results)


def _note(message: Warning | str, *_: object, **__: object) -> None:
    print(f"deepsquare: note: {message}", file=sys.stderr)


def _add_commands() -> None:
    """The commands of other files, when they are asked for: the others need not wait for their imports."""
    helping = sys.argv[1:2] in ([], ["--help"], ["-h"])
    if helping or sys.argv[1] in ("export", "predict"):
        from deepsquare.cli.export import export_command, predict_command

        app.command(name="export")(export_command)
        app.command(name="predict")(predict_command)
    if helping or sys.argv[1] in ("train", "eval"):
        from deepsquare.cli.train import evaluation_command, training_command

        app.command(name="train")(training_command(sys.argv[1:]))
        app.command(name="eval")(evaluation_command)


def main() -> None:
    """Entry point; a caller's mistake ends in one clear line, not in a traceback."""
    warnings.showwarning = _note
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of ASCII shows ? where it has no sign
    if sys.argv[1:] == ["--version"]:
        print(f"deepsquare {metadata.version('deepsquare')}")
        return
    try:
        _add_commands()
        app.cli(prog="deepsquare", description="DeepSquare modules for CNNs.")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: deepsquare info … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, TypeError, OSError, MemoryError) as error:
        print(f"deepsquare: error: {error or 'there is not enough memory; ask for less'}", file=sys.stderr)
        sys.exit(2)
