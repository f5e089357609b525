"""``deepsquare report``: one page from the rows."""

from __future__ import annotations

from pathlib import Path

RESULTS, FIGURES = Path("results"), Path("docs/figures")  # of a clone of the repository


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
    print_report(results or (Path("out/results"), RESULTS), figures or (Path("out/figures"), FIGURES), output)


def print_report(results: tuple[Path, ...], figures: tuple[Path, ...], output: Path) -> None:
    from deepsquare.paper.report import render

    page = render(results, figures, output)
    print(f"The report is {page.resolve()}")
