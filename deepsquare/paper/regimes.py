"""The regimes in which accuracies are compared: data and schedule, and when the study's plan has them judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from deepsquare.paper.study.plan import read_plan

SHORT, LONG, LONGEST = "CIFAR-10, 10 epochs", "CIFAR-10, every row", "CIFAR-10, 200 epochs"
LONG_BASELINES = "CIFAR-10, baselines"
TINY, TINY_SQUARES, TINY_BASELINES = (
    "ShuffleNetV2-0.5×",
    "ShuffleNetV2-0.5×, other squares",
    "ShuffleNetV2-0.5×, baselines",
)
TINY_DROPOUT = "ShuffleNetV2-0.5×, dropout 0.2"
TINY_VANILLA, TINY_RESNET = "vanilla CNN, 200 classes", "ResNet10 of a quarter of the width"
DEEPSQUARE6, ACTIVATIONS, SOFTMIN_START = "DeepSquare6", "activations and depth", "Square-Softmin start"
TITLES = {  # of the regimes whose family in the plan is called otherwise
    LONG: "CIFAR-10, 60 epochs",
    LONG_BASELINES: "CIFAR-10, 60 epochs",
    DEEPSQUARE6: "CIFAR-10, 10 epochs",
    f"{DEEPSQUARE6}, lr × 1/4": "CIFAR-10, 10 epochs, a quarter of the learning rate",
    f"{DEEPSQUARE6}, lr × 4": "CIFAR-10, 10 epochs, four times the learning rate",
    ACTIVATIONS: "CIFAR-10, 10 epochs",
    SOFTMIN_START: "CIFAR-10, 10 epochs",
    TINY: "Tiny ImageNet, ShuffleNetV2-0.5×",
    TINY_SQUARES: "Tiny ImageNet, ShuffleNetV2-0.5×",
    TINY_BASELINES: "Tiny ImageNet, ShuffleNetV2-0.5×",
    TINY_DROPOUT: "Tiny ImageNet, ShuffleNetV2-0.5×, dropout 0.2",
    TINY_VANILLA: "Tiny ImageNet, vanilla CNN",
    TINY_RESNET: "Tiny ImageNet, ResNet10",
}
SHORT_SUFFIX = "@short"  # of a row of the short schedule, in another regime
TEST_IMAGES = 10_000  # of CIFAR-10; as many validation images of Tiny ImageNet


@dataclass(frozen=True)
class Regime:
    """Conditions under which accuracies are compared, and when: numbers of seeds with the alpha that each spends."""

    name: str
    experiment: str
    schedule: str
    looks: tuple[tuple[int, float], ...]
    planned: Mapping[str, int] = field(hash=False)
    keys: frozenset[str] = frozenset()  # of the planned runs; without any, the recipe that ran last counts

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)


@cache
def regimes() -> dict[str, Regime]:
    """By name: the families of the study's plan that are judged, and the short schedule, which is older than it."""
    plan = read_plan()
    planned: dict[tuple[str, str], dict[str, int]] = {}
    keys: dict[tuple[str, str], set[str]] = {}
    for family in plan.family:
        for run in family.runs():
            rows = planned.setdefault((run.experiment, run.schedule), {})
            rows[run.row] = max(rows.get(run.row, 0), run.seed + 1)
            if run.experiment != "cifar10":
                keys.setdefault((run.experiment, run.schedule), set()).add(run.key)
    short = Regime(SHORT, "cifar10", "short", ((3, 0.05),), {})
    named = {SHORT: short}
    for family in plan.family:
        if any(family.alpha):
            looks = tuple(zip(family.looks, family.alpha, strict=True))
            for schedule in (family.schedule, *family.more_schedules):
                name = family.name if schedule == family.schedule else f"{family.name}, {schedule}"
                conditions = family.experiment, schedule
                named[name] = Regime(name, *conditions, looks, planned[conditions], frozenset(keys.get(conditions, ())))
    return named
