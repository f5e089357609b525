"""Figures 4 and 6 by training regime: after which training is ReLU-Square better than ReLU?

A regime is a number of steps and a way to choose the learning rate:

- ``default``: Adam at its default rate, PyTorch's initialization, nothing tuned;
- ``constant``: each activation with its best setting of one grid, at a constant learning rate;
- ``decay``: the same with a linear decay to zero over the second half.

A setting is chosen by the statistic that is judged, the mean over seeds: the loss of the lowest mean validation loss,
the accuracy of the highest mean validation accuracy (of equal ones that with the lower loss). A network diverged if
its loss is not finite. It counts as the worst network of its regime, or as a constant prediction if that is worse.

The judgement is on test data and fresh seeds: the mean difference, paired by seed, its 95% interval, and p values that
are corrected by Holm's method over everything that is judged for a figure. The constants below were fixed before the
run whose rows are in ``results/``.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import rich
import torch
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from deepsquare._files import atomic_write, ensure_writable
from deepsquare._threads import one_thread
from deepsquare.paper.spirals import draw, tuning
from deepsquare.paper.spirals.ablation import PAIR
from deepsquare.paper.spirals.data import NOISE, Array, Split, trajectory
from deepsquare.paper.spirals.experiment import SPAN
from deepsquare.paper.spirals.measures import TIMES, mean
from deepsquare.paper.spirals.networks import ONE_ARM, THREE_ARMS, Networks, Optimizer, Setting, Task, train
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import Verdict, judge_sign
from deepsquare.results import Row, Store, conditions, round_for_json

Schedule: TypeAlias = Literal["default", "constant", "decay"]
Training: TypeAlias = tuple[Setting, int]  # a setting and a number of steps
Values: TypeAlias = Mapping[str, Array]  # by metric: one value per seed, NaN for a diverged network

EXPERIMENT = "spirals_regimes"
STEPS = {ONE_ARM: (750, 3000, 9000), THREE_ARMS: (150, 600, 1500, 4500)}
LRS: Mapping[Optimizer, tuple[float, ...]] = {"adam": (0.001, *tuning.LRS["adam"]), "sgd": tuning.LRS["sgd"]}
DEFAULT = {
    ONE_ARM: Setting("adam", 0.001, "pytorch", "standardised"),
    THREE_ARMS: Setting("adam", 0.001, "pytorch"),  # already centered
}
TUNING_SEEDS = 10
# Between the seeds of experiment.py (multiples of SPAN / 4), so that no network or data set was used before.
FIRST_TUNING_SEED, FIRST_SEED = 3 * SPAN // 8, 5 * SPAN // 8
SIGNS = {"loss": -1, "accuracy": 1}  # of an improvement
ALPHA = 0.05  # of the verdicts on a figure together


@dataclass(frozen=True)
class Regime:
    """A task under one kind of training."""

    task: Task
    schedule: Schedule
    steps: int

    @property
    def name(self) -> str:
        return f"{self.schedule}/{self.steps}"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy") if self.task.classification else ("loss",)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings to choose from."""
        if self.schedule == "default":
            return (DEFAULT[self.task],)
        return tuple(replace(setting, decay=self.schedule == "decay") for setting in tuning.grid(self.task, LRS))


def regimes(task: Task, shorten: int = 1) -> list[Regime]:
    """All regimes of a task; ``shorten`` divides their numbers of steps."""
    return [Regime(task, schedule, steps // shorten) for schedule in get_args(Schedule) for steps in STEPS[task]]


def evaluate(
    task: Task, activation: str, trained: Sequence[Training], seeds: Sequence[int], split: Split
) -> dict[Training, Values]:
    """Train networks with each setting for its number of steps; their metrics on ``split``.

    At a constant rate the shorter training is a prefix of the longer one.
    """
    longest: dict[Setting, int] = {}
    for setting, steps in trained:
        longest[setting] = max(steps, longest.get(setting, 0))
    batches: dict[tuple[Optimizer, int], dict[Training, None]] = {}
    for setting, steps in trained:
        total = steps if setting.decay else longest[setting]
        batches.setdefault((setting.optimizer, total), {})[setting, steps] = None
    results: dict[Training, Values] = {}
    for (_, total), batch in batches.items():
        settings = tuple(dict.fromkeys(setting for setting, _ in batch))
        networks = Networks(task, activation, settings, seeds)
        for steps, parameters in train(networks, total, {steps for _, steps in batch}).items():
            measured = _measure(networks, parameters, split) if steps else {}
            for index, setting in enumerate(settings):
                if (setting, steps) in batch:
                    results[setting, steps] = {name: table[index] for name, table in measured.items()}
    return results


def _measure(networks: Networks, parameters: torch.Tensor, split: Split) -> dict[str, Array]:
    """The metrics (settings, seeds)."""
    batch = networks.batch(split)
    losses = networks.losses(parameters, *batch)
    metrics = {"loss": losses}
    if networks.task.classification:
        metrics["accuracy"] = networks.accuracies(parameters, *batch)
    diverged = ~losses.isfinite()
    masked = {name: values.double().masked_fill(diverged, torch.nan) for name, values in metrics.items()}
    return {name: networks.table(values).numpy() for name, values in masked.items()}


def constant_prediction(task: Task, metric: str) -> float:
    """The loss or accuracy of the best constant prediction: the mean point, or equal probabilities of the arms."""
    if metric == "accuracy":
        return 1 / task.outputs
    return float(np.log(task.outputs) if task.classification else trajectory(TIMES).var(0).mean() + NOISE**2)


def settle(task: Task, metric: str, values: Array) -> Array:
    """The values of one regime, with those of diverged networks replaced by the worst."""
    sign, constant = SIGNS[metric], constant_prediction(task, metric)
    worst = min([sign * constant, *(sign * values[np.isfinite(values)])])
    return np.where(np.isfinite(values), values, sign * worst)


def choose(regime: Regime, metric: str, validation: Mapping[Training, Values]) -> tuple[Setting, float]:
    """The setting with the best mean on validation data, and this mean."""
    means = {
        name: settle(
            regime.task, name, np.stack([validation[setting, regime.steps][name] for setting in regime.settings])
        ).mean(1)
        for name in regime.metrics
    }
    best = np.lexsort((means["loss"], -SIGNS[metric] * means[metric]))[0]
    return regime.settings[best], float(means[metric][best])


def compare(metric: str, relu: Array, square: Array) -> dict[str, float]:
    """ReLU-Square minus ReLU, paired by seed: the mean, which is judged, and the median and shares beside it."""
    from scipy import stats  # of the extra paper

    differences = square - relu
    p = float(stats.ttest_1samp(differences, 0).pvalue) if np.ptp(differences) else float(not differences.any())
    (median,) = round_for_json([float(np.median(differences))], 5)
    assert median is not None
    better, equal = SIGNS[metric] * differences > 0, differences == 0
    shares = {"share_better": float(better.mean()), "share_equal": float(equal.mean())}
    return {**mean(differences), "median": median, **shares, "p": float(f"{p:.4g}")}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction of several p values."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def verdict(metric: str, difference: Mapping[str, float], n: int) -> Verdict:
    """Of one regime, from a stored difference over ``n`` seeds."""
    if difference["p_holm"] >= ALPHA:
        return Verdict.INCONCLUSIVE
    return judge_sign(SIGNS[metric], Interval.read(difference, n))


def run(
    figures: Path, results: Path, *, seeds: int = 100, tuning_seeds: int = TUNING_SEEDS, shorten: int = 1
) -> list[Row]:
    """Tune each activation in every regime, and judge it with ``seeds`` other networks; print a summary.

    Writes ``spirals_regimes.png`` to ``figures`` and ``spirals_regimes.jsonl`` to ``results``. ``tuning_seeds`` and
    ``shorten``, which divides every number of steps, are for tests.
    """
    if not 2 <= seeds <= SPAN // 8:
        raise ValueError(f"seeds is {seeds}; expected 2 to {SPAN // 8}")
    if not 1 <= shorten <= (most := min(map(min, STEPS.values()))):
        raise ValueError(f"shorten is {shorten}; expected 1 for the whole training, up to {most}")
    for folder in (figures, results):
        ensure_writable(folder)
    rows: list[Row] = []
    judged_on = range(FIRST_SEED, FIRST_SEED + seeds)
    tuned_on = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + tuning_seeds)
    with one_thread(), Progress(transient=True) as progress:
        for task in STEPS:
            shown = progress.add_task(task.name, total=None)
            rows += _run_task(task, regimes(task, shorten), tuned_on, judged_on)
            progress.remove_task(shown)
    with atomic_write(figures / "spirals_regimes.png") as path:
        draw.regimes(judgements(rows)).savefig(path, format="png")
    store = Store(results / f"{EXPERIMENT}.jsonl")
    store.replace(rows)
    rich.print(_summary(rows, f"figure: {figures}", f"rows: {store.path}"))
    return rows


def _run_task(task: Task, all_regimes: Sequence[Regime], tuned_on: range, judged_on: range) -> list[Row]:
    """The row of the search for the settings, and a row for everything that is judged."""
    since = time.perf_counter()
    tuned = [regime for regime in all_regimes if regime.schedule != "default"]
    grid = [(setting, regime.steps) for regime in tuned for setting in regime.settings]
    validation = {name: evaluate(task, name, grid, tuned_on, "validation") for name in PAIR}
    judged = [(regime, metric) for regime in all_regimes for metric in regime.metrics]
    chosen: dict[tuple[str, Regime, str], tuple[Setting, float | None]] = {}
    for name in PAIR:
        for regime, metric in judged:
            tunes = regime in tuned
            chosen[name, regime, metric] = choose(regime, metric, validation[name]) if tunes else (DEFAULT[task], None)
    seeds = {"tuning_seeds": len(tuned_on), "first_tuning_seed": tuned_on[0]}
    rows = [_row(f"{task.name}/settings", seeds, _search(tuned, validation), time.perf_counter() - since)]

    since = time.perf_counter()
    test = {}
    for name in PAIR:
        trained = [(chosen[name, regime, metric][0], regime.steps) for regime, metric in judged]
        test[name] = evaluate(task, name, trained, judged_on, "test")
    compared = []
    for regime, metric in judged:
        networks = {name: test[name][chosen[name, regime, metric][0], regime.steps] for name in PAIR}
        stored, difference = _judge(regime, metric, networks)
        for name in PAIR:
            setting, validated = chosen[name, regime, metric]
            stored[name] |= {"setting": asdict(setting), f"validation_{metric}": validated}
        compared.append({**stored, "difference": difference})
    corrected = holm([metrics["difference"]["p"] for metrics in compared])
    seconds = (time.perf_counter() - since) / len(judged)  # they share their networks
    seeds |= {"seeds": len(judged_on), "first_seed": judged_on[0]}
    for (regime, metric), metrics, p in zip(judged, compared, corrected, strict=True):
        metrics["difference"]["p_holm"] = float(f"{p:.4g}")
        recipe = {"task": task.name, "metric": metric, "schedule": regime.schedule, "steps": regime.steps, **seeds}
        rows.append(_row(f"{task.name}/{metric}/{regime.name}", recipe, metrics, seconds))
    return rows


def _judge(regime: Regime, metric: str, networks: Mapping[str, Values]) -> tuple[dict[str, Any], dict[str, float]]:
    """What a row stores of each activation, and the difference of these stored values."""
    stored: dict[str, dict[str, Any]] = {}
    for name, values in networks.items():
        stored[name] = {f"test_{kind}": round_for_json(of_seeds, 6) for kind, of_seeds in values.items()}
        stored[name]["diverged"] = int(np.isnan(values["loss"]).sum())
    table = np.array([stored[name][f"test_{metric}"] for name in PAIR], dtype=np.float64)  # None becomes NaN
    settled = settle(regime.task, metric, table)
    for name, of_seeds in zip(PAIR, settled, strict=True):
        stored[name] |= {**mean(of_seeds), "median": float(f"{np.median(of_seeds):.5g}")}
    return stored, compare(metric, *settled)


def _search(tuned: Sequence[Regime], validation: Mapping[str, Mapping[Training, Values]]) -> dict[str, Any]:
    """By activation and regime, the metrics on validation data: for each setting, of each seed."""
    return {
        "settings": [asdict(setting) for setting in tuned[0].settings],  # of the others without decay
        "validation": {
            name: {
                regime.name: {
                    metric: [round_for_json(found[setting, regime.steps][metric]) for setting in regime.settings]
                    for metric in regime.metrics
                }
                for regime in tuned
            }
            for name, found in validation.items()
        },
    }


def _row(name: str, recipe: Mapping[str, Any], metrics: Mapping[str, Any], seconds: float) -> Row:
    return Row(EXPERIMENT, name, 0, recipe, metrics, round(seconds, 2), **conditions())


def judgements(rows: Sequence[Row]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What was judged, by task and metric, as the figure and the pages show it; of rows with one label the first."""
    shown: dict[tuple[str, str], list[dict[str, Any]]] = {}
    first: dict[str, Row] = {}
    for row in rows:
        if row.experiment == EXPERIMENT and "difference" in row.metrics:
            first.setdefault(row.row, row)
    for row in first.values():
        recipe, metrics, metric = row.recipe, row.metrics, row.recipe["metric"]
        difference, n, unit = metrics["difference"], recipe["seeds"], 100 if metric == "accuracy" else 1  # per cent
        judged = {
            **{name: recipe[name] for name in ("schedule", "steps")},
            **{name: Interval.read(metrics[name], n, unit) for name in (*PAIR, "difference")},
            "settings": {name: metrics[name]["setting"] for name in PAIR},
            "diverged": {name: metrics[name]["diverged"] for name in PAIR},
            "median": unit * difference["median"],
            **{name: difference[name] for name in ("share_better", "share_equal", "p_holm")},
            "verdict": verdict(metric, difference, n),
        }
        shown.setdefault((recipe["task"], metric), []).append(judged)
    return shown


def _summary(rows: Sequence[Row], *paths: str) -> Table:
    """The differences with the verdicts."""
    caption = "\n".join(["mean ± 95% interval, paired by seed; is ReLU-Square better than ReLU?", *map(escape, paths)])
    title = "Figures 4 and 6 by training regime: ReLU-Square minus ReLU"
    table = Table(title=title, caption=caption, caption_justify="left")
    for heading in ("training", "steps", "difference", "better in", "verdict"):
        table.add_column(heading, justify="left" if heading == "training" else "right", no_wrap=True)
    for (task, metric), group in judgements(rows).items():
        table.add_section()
        table.add_row(f"[bold]{task}: {metric}[/bold]")
        for found in group:
            difference, share = found["difference"].format(signed=True), f"{found['share_better']:.0%}"
            table.add_row(found["schedule"], f"{found['steps']:,}", difference, share, found["verdict"].value)
    return table
