"""The experiments by name, each with its own options: ``deepsquare reproduce NAME``.

An experiment returns False if it ran nothing, so that the report would not change. The modules that need the extra
``paper`` are imported when an experiment runs.
"""

import warnings
from collections.abc import Callable

from deepsquare._files import ensure_writable
from deepsquare.data.cifar10 import DataUnavailableError, load_cifar10
from deepsquare.paper.cifar10.experiment import choose_recipe, table_experiment, table_runs
from deepsquare.paper.deployment.int8 import run_int8
from deepsquare.paper.deployment.parity import run_parity
from deepsquare.paper.grid.backend import LOCAL, Workers
from deepsquare.paper.imagenet.continued import run_continued
from deepsquare.paper.imagenet.pretrained import run_pretrained
from deepsquare.paper.imagenet.proxy import run_proxy
from deepsquare.paper.options import OUT, Cifar10Folder, OutputFolders, RandomNetworks, Schedule, Seeds, TableRows
from deepsquare.paper.simulation import run_rule
from deepsquare.paper.study.experiment import run_study
from deepsquare.paper.tables import BASELINES_TABLE, TABLE_2, TABLE_3


def fig2(*, networks: RandomNetworks = 10_000, output: OutputFolders = OUT) -> None:
    """Figure 2: decision regions of two hidden units, with an exact count of their components."""
    from deepsquare.paper.fig2.experiment import run

    run(output.figures, output.results, networks=networks)


def _spirals(description: str) -> Callable[..., None]:
    """The experiment of Figures 3 to 6 with its description on the command line."""

    def spirals(*, seeds: int = 100, output: OutputFolders = OUT) -> None:
        from deepsquare.paper.spirals.experiment import run

        run(output.figures, output.results, seeds=seeds)

    spirals.__doc__ = f"""{description}; one run makes Figures 3 to 6.

    Args:
        seeds: How many networks of each activation.
    """
    return spirals


def regimes(*, seeds: int = 100, output: OutputFolders = OUT) -> None:
    """Figures 4 and 6 by training regime: ReLU-Square against ReLU by number of steps and learning rate.

    Args:
        seeds: How many networks of each activation are judged in each regime.
    """
    from deepsquare.paper.spirals.regimes import run

    run(output.figures, output.results, seeds=seeds)


def everything(
    *,
    schedule: Schedule = "quick",
    seeds: Seeds = 1,
    rows: TableRows = (),
    data: Cifar10Folder = None,
    networks: RandomNetworks = 10_000,
    workers: Workers = LOCAL,
    output: OutputFolders = OUT,
) -> None:
    """Figures 2 to 6 and Tables 2 and 3."""
    tables = (TABLE_2, TABLE_3)
    table_runs(tables, schedule, seeds, rows)  # fail early, not after the figures
    if data is not None:
        load_cifar10(data)
    for folder in (output.results, output.figures, output.report):
        ensure_writable(folder)
    fig2(networks=networks, output=output)
    EXPERIMENTS["fig3"](output=output)
    train_tables = table_experiment("Tables 2 and 3", *tables)
    try:
        train_tables(schedule=schedule, seeds=seeds, rows=rows, data=data, workers=workers, output=output)
    except DataUnavailableError as error:
        warnings.warn(f"Tables 2 and 3 are skipped: {error}", stacklevel=1)


EXPERIMENTS: dict[str, Callable[..., bool | None]] = {
    "fig2": fig2,
    "fig3": _spirals("Figure 3: regression on the one-arm spiral with ReLU-Square and with ReLU"),
    "fig4": _spirals("Figure 4: test loss of the regression on the one-arm spiral"),
    "fig5": _spirals("Figure 5: decision regions of the three-arm spiral with ReLU-Square and with ReLU"),
    "fig6": _spirals("Figure 6: test loss and accuracy of the classification of the three-arm spiral"),
    "regimes": regimes,
    "table2": table_experiment("Table 2: squares at each position of the vanilla CNN, on CIFAR-10", TABLE_2),
    "table3": table_experiment("Table 3: Square-Pooling, GeM and higher moments in the vanilla CNN", TABLE_3),
    "baselines": table_experiment("Not in the paper: the baselines in the vanilla CNN", BASELINES_TABLE),
    "recipe": choose_recipe,
    "proxy": run_proxy,
    "continued": run_continued,
    "pretrained": run_pretrained,
    "study": run_study,
    "rule": run_rule,
    "int8": run_int8,
    "parity": run_parity,
    "all": everything,
}
