"""What is done of the study, what it took, and what is left."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.markup import escape
from rich.table import Table

from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.paper.study.plan import Family
from deepsquare.results import Row


@dataclass(frozen=True)
class FamilyStatus:
    """A family with its runs, the rows of those that are done, by key, and whether it fits into the budget.

    ``shared`` are runs of the family that belong to an earlier one and are missing; ``hours`` are core-hours per run,
    as measured for runs of this kind or else as planned.
    """

    family: Family
    runs: tuple[TrainingRun, ...]
    done: Mapping[str, Row]
    fits: bool
    shared: tuple[TrainingRun, ...]
    hours: float

    @cached_property
    def missing(self) -> tuple[TrainingRun, ...]:
        return tuple(run for run in self.runs if run.key not in self.done)

    @property
    def spent(self) -> float:
        """The core-hours of the runs that are done."""
        return sum(map(core_hours, self.done.values()))

    @property
    def left(self) -> float:
        """The core-hours of the missing runs."""
        return self.hours * len(self.missing) if self.fits else 0.0

    @property
    def look(self) -> str:
        """The next look: the number of seeds at which the family may be judged."""
        missing = {run.seed for run in (*self.missing, *self.shared)}
        if not self.fits:
            return "dropped: over the budget"
        if not missing:
            return "complete"
        look = next(look for look in self.family.looks if look > min(missing))
        return f"{look} seed{'s' if look > 1 else ''}"


def core_hours(row: Row) -> float:
    """The CPU time of a run; the elapsed time for a row that stores none."""
    return float(row.metrics.get("cpu_seconds") or row.seconds) / 3600


def hours_per_day(rows: Sequence[Row]) -> float | None:
    """The mean core-hours of the days on which rows came in; None without rows."""
    days = {row.date[:10] for row in rows}
    return sum(map(core_hours, rows)) / len(days) if days else None


def status_table(families: Sequence[FamilyStatus]) -> Table:
    """Runs, core-hours and the next look of each family."""
    left, spent = (sum(getattr(family, name) for family in families) for name in ("left", "spent"))
    planned = [family for family in families if family.fits]
    done, runs = sum(len(family.done) for family in planned), sum(len(family.runs) for family in planned)
    rate = hours_per_day([row for family in families for row in family.done.values()])
    pace = f"; {rate:.1f} core-hours a day came in: about {math.ceil(left / rate)} days more" if rate and left else ""
    table = Table(
        title=f"The study: {done} of {runs} runs done",
        caption=f"{spent:.1f} core-hours spent, {left:.1f} left{pace}",
    )
    for heading in ("family", "runs", "core-hours", "left", "hours per run", "to be judged at"):
        is_text = heading in ("family", "to be judged at")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for status in families:
        counts = f"{len(status.done)} of {len(status.runs)}"
        hours = (f"{status.spent:.1f}", f"{status.left:.1f}", f"{status.family.hours:.2g}")
        table.add_row(escape(status.family.name), counts, *hours, status.look)
    return table
