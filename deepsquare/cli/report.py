"""``deepsquare report``: one page from the rows."""

from pathlib import Path

from deepsquare._terminal import show

RESULTS, FIGURES = Path("results"), Path("docs/figures")  # in a clone of the repository


def report_command(
    *, results: tuple[Path, ...] = (), figures: tuple[Path, ...] = (), output: Path = Path("out/report")
) -> None:
    """Write the page of all results: the paper's tables and figures with ours beside them.

    Args:
        results: Folders with rows; a run in several is read from the first. By default out/results and results.
        figures: Folders with figures; one in several is read from the first. By default out/figures and docs/figures.
        output: Folder for index.html and summary.md.
    """
    for folder in (*results, *figures):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder; expected one that holds rows or figures")
    print_report(results or (Path("out/results"), RESULTS), figures or (Path("out/figures"), FIGURES), output)


def print_report(results: tuple[Path, ...], figures: tuple[Path, ...], output: Path) -> None:
    """Write the page and print its path."""
    from deepsquare.paper import require_paper

    require_paper()
    from deepsquare.paper.report import render

    show(f"The report is {render(results, figures, output).resolve()}")
