"""The cells of the tables that the console shows."""

from rich.console import Console
from rich.table import Table


def cells(table: Table) -> dict[str, list[str]]:
    """The cells of each row of a table, by its first cell."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    rows = [line.strip("│").split("│") for line in capture.get().splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
