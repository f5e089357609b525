"""The plan of the study, read from a file and checked before anything runs."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from deepsquare.data.tiny_imagenet import IMAGES
from deepsquare.paper.cifar10.ablation import AblationRecipe
from deepsquare.paper.cifar10.experiment import SCHEDULES, table_runs
from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.paper.tables import BASELINES_TABLE, TABLE_2, TABLE_3
from deepsquare.results import Row, Store
from deepsquare.surgery.spec import parse_spec
from deepsquare.training.recipe import Check, CifarRecipe, convert_recipe_fields

PLAN = Path(__file__).with_name("plan.toml")
PLAN_LIMIT = 2**20  # bytes
ALPHA = 0.05  # the error probability of all looks at a family
MAX_SEEDS = 1000
VANILLA = "vanilla_cnn"


@dataclass(frozen=True)
class TinyImageNetRecipe(CifarRecipe):
    """The recipe of the runs on Tiny ImageNet.

    Attributes:
        size: Side of the images: 64 or 32.
        dropout: Dropout ratio before the last FC.
        stem_pool: Keep the max-pooling of the stem.
        held_out: Train without this many training images, and evaluate on them instead of the validation images.
    """

    epochs: int = 15
    lr: float = 0.05
    weight_decay: float = 4e-5
    pad: int = 4
    size: int = 64
    dropout: float = 0.0
    stem_pool: bool = False
    held_out: int = 0

    def _checks(self) -> Iterable[Check]:
        yield from super()._checks()
        yield "size", self.size in (32, 64), "32 or 64"
        yield "dropout", 0 <= self.dropout < 1, "0 ≤ dropout < 1"
        yield "pad", self.pad < self.size, "less than the size"
        images = IMAGES["train"]
        yield "held_out", 0 <= self.held_out < images, f"at least 0, and fewer than the {images:,} training images"
        left = images - self.held_out
        yield "batch_size", self.batch_size <= left, f"at most the {left:,} images of an epoch"


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows that are trained by one recipe and compared with each other."""

    name: str
    experiment: Literal["cifar10", "cifar10_ablation", "tiny_imagenet"]
    schedule: str  # stored in the rows
    rows: dict[str, str] | list[str]  # labels with specs; on CIFAR-10 labels of the tables
    seeds: int
    looks: tuple[int, ...]
    alpha: tuple[float, ...]
    hours: float  # core-hours per run
    model: str = VANILLA
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)  # of create_model
    recipe: dict[str, Any] = msgspec.field(default_factory=dict)
    row_recipe: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)  # fields that differ, by row
    more_schedules: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)  # the same rows, with other fields

    def check(self) -> None:
        """Fail if values do not fit together."""
        if not self.rows:
            raise ValueError("rows is empty; expected at least one")
        if not all((self.name, self.schedule, *self.rows, *self.more_schedules)):
            raise ValueError("a name is empty; the family, its schedule and its rows need one")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ValueError(f"seeds is {self.seeds}; expected at least 1 and at most {MAX_SEEDS}")
        if not 0 < self.hours < math.inf:
            raise ValueError(f"hours is {self.hours}; expected the core-hours of one run, more than 0")
        if list(self.looks) != sorted(set(self.looks)) or self.looks[-1:] != (self.seeds,) or self.looks[0] < 1:
            raise ValueError(
                f"looks is {list(self.looks)}; expected increasing numbers that end with {self.seeds} seeds"
            )
        if (
            len(self.alpha) != len(self.looks)
            or not all(0 <= alpha <= 1 for alpha in self.alpha)
            or sum(self.alpha) > ALPHA + 1e-9
        ):
            raise ValueError(f"alpha is {list(self.alpha)}; expected one value per look, {ALPHA} in all at most")
        for run in self.runs():
            parse_spec(run.spec)

    def runs(self) -> list[TrainingRun]:
        """The runs, ordered by seed."""
        if self.experiment == "cifar10":
            if self.schedule not in SCHEDULES:
                raise ValueError(f"schedule is {self.schedule!r}; expected one of {', '.join(SCHEDULES)}")
            if self.recipe or self.row_recipe or self.more_schedules or self.kwargs or self.model != VANILLA:
                raise ValueError(
                    f"it has a recipe, kwargs or a model; on CIFAR-10 the schedule names the recipe of {VANILLA}"
                )
            if isinstance(self.rows, dict):
                raise ValueError("rows has specs; on CIFAR-10 expected a list of labels of Tables 2 and 3")
            return table_runs((TABLE_2, TABLE_3, BASELINES_TABLE), self.schedule, self.seeds, self.rows)
        if isinstance(self.rows, list):
            raise ValueError("rows is a list; expected labels with their specs")
        if unknown := self.row_recipe.keys() - self.rows.keys():
            raise ValueError(f"row_recipe has {', '.join(sorted(unknown))}; expected labels of rows")
        for row, changes in self.row_recipe.items():
            for schedule, others in self.more_schedules.items():
                if both := changes.keys() & others.keys():
                    fields = ", ".join(sorted(both))
                    raise ValueError(f"row_recipe of {row!r} and more_schedules {schedule!r} both set {fields}")
        if self.schedule in self.more_schedules:
            raise ValueError(f"more_schedules has {self.schedule!r}, which is the schedule")
        if self.experiment == "cifar10_ablation" and (self.kwargs or self.model != VANILLA):
            raise ValueError(f"it has kwargs or a model; an ablation on CIFAR-10 is one of {VANILLA}")
        return [
            TrainingRun(self.experiment, label, seed, self.model, spec, schedule, recipe, kwargs=self.kwargs)
            for seed in range(self.seeds)
            for schedule, changes in {self.schedule: {}, **self.more_schedules}.items()
            for label, spec in self.rows.items()
            for recipe in [self._recipe({**changes, **self.row_recipe.get(label, {})})]
        ]

    def _recipe(self, changes: Mapping[str, Any]) -> TinyImageNetRecipe | AblationRecipe:
        kind = AblationRecipe if self.experiment == "cifar10_ablation" else TinyImageNetRecipe
        return kind(**convert_recipe_fields(kind, {**self.recipe, **changes}))


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The families in the order in which they run, and the core-hours that they may take."""

    budget: float
    family: tuple[Family, ...]

    def fitting(self, names: Sequence[str] = ()) -> list[tuple[Family, list[TrainingRun], bool]]:
        """Each family, or each with one of these names, and whether it fits into the budget.

        A run that several of them share belongs to the first.
        """
        hours, planned, seen = 0.0, set[str](), set[str]()
        fits: dict[str, bool] = {}
        for family in self.family:
            new = {run.key for run in family.runs()} - planned
            planned |= new
            hours += family.hours * len(new)
            fits[family.name] = hours <= self.budget and all(fits.values())
        families = []
        for family in self.family:
            if not names or family.name in names:
                runs = [run for run in family.runs() if run.key not in seen]
                seen |= {run.key for run in runs}
                families.append((family, runs, fits[family.name]))
        return families


def read_plan(path: Path = PLAN) -> Plan:
    """Read a plan; ValueError names the file and the line of what is wrong."""
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"the plan {path} {reason}; expected a TOML file with a budget and families")
    if path.stat().st_size > PLAN_LIMIT:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; expected a plan of at most {PLAN_LIMIT:,}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error}); expected a plan as TOML") from error
    try:
        plan = msgspec.convert(tomllib.loads(text), Plan)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}{_explain(text, str(error))}") from error
    if not 0 < plan.budget < math.inf or not plan.family:
        raise ValueError(
            f"{path}: budget is {plan.budget} for {len(plan.family)} families; expected more than 0 of both"
        )
    names: set[str] = set()
    planned: dict[tuple[str, str, int, str], TrainingRun] = {}
    for number, family in enumerate(plan.family):
        try:
            if family.name in names:
                raise ValueError("another family has this name")
            names.add(family.name)
            family.check()
            for run in family.runs():
                if (other := planned.setdefault(_label(run), run)).key != run.key:
                    difference = _differences(run, other.to_recipe())
                    raise ValueError(f"an earlier family has {run.name} too, but {difference}; rename row or schedule")
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}{_line(text, number)}: family {family.name!r}: {error}") from error
    return plan


def _label(run: TrainingRun) -> tuple[str, str, int, str]:
    """What tells a run apart from the others in a store."""
    return run.experiment, run.row, run.seed, run.schedule


def _line(text: str, family: int | None) -> str:
    """Where the family with this number starts."""
    starts = [number for number, line in enumerate(text.splitlines(), 1) if line.strip() == "[[family]]"]
    return "" if family is None or family >= len(starts) else f", line {starts[family]}"


def _explain(text: str, error: str) -> str:
    """A message of msgspec with the line, the family's name and the field."""
    reason, _, place = error.partition(" - at `$")
    found = re.match(r"\.family\[(\d+)\]\.?(.*?)`$", place)
    if found is None:
        hint = "; write [[family]], not [family]" if place == ".family`" else ""
        return f": {place.strip('.`')}: {reason}{hint}" if place else f": {reason}"
    number, field = int(found[1]), found[2]
    family = tomllib.loads(text)["family"][number]
    given = family.get(field) if isinstance(family, dict) else None
    value = f" is {given!r}" if given is not None else ""
    name = f" family {family['name']!r}:" if isinstance(family, dict) and "name" in family else ""
    allowed = " (cifar10, cifar10_ablation or tiny_imagenet)" if field == "experiment" else ""
    return f"{_line(text, number)}:{name} {f'{field}{value}: ' if field else ''}{reason}{allowed}"


def check_store(store: Store, runs: Iterable[TrainingRun]) -> list[Row]:
    """The rows of a store; ValueError if a run has a row there that another plan trained by another recipe."""
    planned = {_label(run): run for run in runs}
    rows = store.rows_by_line()
    for line, row in rows.items():
        run = planned.get((row.experiment, row.row, row.seed, str(row.recipe.get("schedule"))))
        if run is None:
            continue
        if run.key != row.key:
            raise ValueError(
                f"{store.path}, line {line}: {run.name} was trained by another plan ({_differences(run, row.recipe)}). "
                "Choose another --results, or move that row away"
            )
        seconds = row.metrics.get("cpu_seconds") or row.seconds
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf or "accuracy" not in row.metrics:
            raise ValueError(
                f"{store.path}, line {line}: {run.name} has seconds {seconds!r} and "
                f"{'an' if 'accuracy' in row.metrics else 'no'} accuracy; expected a time and an accuracy. "
                "Remove that line to repeat the run"
            )
    return list(rows.values())


def _differences(run: TrainingRun, stored: Mapping[str, Any]) -> str:
    expected: Mapping[str, Any] = run.to_recipe()
    names = sorted(
        name for name in expected.keys() | stored.keys() if repr(expected.get(name)) != repr(stored.get(name))
    )
    return "; ".join(f"{name} was {stored.get(name)}, is {expected.get(name)}" for name in names[:4])
