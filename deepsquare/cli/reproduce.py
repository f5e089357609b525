"""Run an experiment of the paper, then update the report."""

import functools
from collections.abc import Callable
from typing import Any

import tyro

from deepsquare.cli.report import FIGURES, RESULTS, print_report


def commands() -> dict[str, Callable[..., None]]:
    """The experiments by name, each ending with the report on its results and the committed ones."""
    from deepsquare.paper.experiments import EXPERIMENTS

    return {name: _with_report(experiment) for name, experiment in EXPERIMENTS.items()}


def _with_report(experiment: Callable[..., bool | None]) -> Callable[..., None]:
    from deepsquare.paper import require_paper
    from deepsquare.paper.options import OutputFolders

    @functools.wraps(experiment)  # tyro reads its options and its docstring
    def command(*, output: OutputFolders, **options: Any) -> None:
        require_paper()
        if experiment(output=output, **options) is not False:
            print_report((output.results, RESULTS), (output.figures, FIGURES), output.report)

    return tyro.conf.configure(tyro.conf.OmitArgPrefixes)(command)
