"""What is done of the study, what it took, and what is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.table import Table

from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.paper.study.plan import Family
from deepsquare.results import Row


@dataclass(frozen=True)
class FamilyStatus:
    """A family with its runs, the rows of those that are done, by key, and whether it fits into the budget."""

    family: Family
    runs: tuple[TrainingRun, ...]
    done: Mapping[str, Row]
    fits: bool

    @cached_property
    def missing(self) -> tuple[TrainingRun, ...]:
        return tuple(run for run in self.runs if run.key not in self.done)

    @property
    def spent(self) -> float:
        """The core-hours of the runs that are done."""
        return sum(map(core_hours, self.done.values()))

    @property
    def left(self) -> float:
        """The core-hours of the missing runs: at the mean of those that are done, else as planned."""
        per_run = self.spent / len(self.done) if self.done else self.family.hours
        return per_run * len(self.missing) if self.fits else 0.0

    @property
    def look(self) -> str:
        """The next look: the number of seeds at which the family may be judged."""
        complete = next((seed for seed in range(self.family.seeds) if any(r.seed == seed for r in self.missing)), None)
        if not self.fits:
            return "dropped: over the budget"
        if complete is None:
            return "complete"
        look = next(look for look in self.family.looks if look > complete)
        return f"at {look} seed{'s' if look > 1 else ''}"


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
    pace = f"; {rate:.1f} core-hours a day came in, so about {left / rate:.0f} days are left" if rate else ""
    table = Table(
        title=f"The study: {done} of {runs} runs done",
        caption=f"{spent:.1f} core-hours spent, {left:.1f} left{pace}",
    )
    for heading in ("family", "runs", "core-hours", "left", "planned per run", "next look"):
        is_text = heading in ("family", "next look")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for status in families:
        counts = f"{len(status.done)} of {len(status.runs)}"
        hours = (f"{status.spent:.1f}", f"{status.left:.1f}", f"{status.family.hours:.1f}")
        table.add_row(status.family.name, counts, *hours, status.look)
    return table
