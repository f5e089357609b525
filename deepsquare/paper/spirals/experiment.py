"""Figures 3 to 6: tune, train with fresh seeds, measure, ablate, draw and store."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import rich
from matplotlib.figure import Figure
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from deepsquare._files import atomic_write, ensure_writable
from deepsquare._threads import one_thread
from deepsquare.paper.spirals import ablation, draw, measures
from deepsquare.paper.spirals.data import Array, Split
from deepsquare.paper.spirals.measures import BETTER, difference, mean, settled
from deepsquare.paper.spirals.networks import ACTIVATIONS, ONE_ARM, THREE_ARMS, Task
from deepsquare.paper.spirals.tuning import QUANTILES, Trained, Tuned, quantiles, retrain, tune
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import judge_sign
from deepsquare.results import Row, Store, conditions, round_for_json

TASKS = (ONE_ARM, THREE_ARMS)
BOUNDARIES = 20  # networks per activation whose decision boundaries are measured
SPAN = 1_000_000  # seeds per base seed: the first are for tuning, then for the ablations, then for the final networks
ACCURACY = "test_accuracy"


def run(figures: Path, results: Path, *, seed: int = 0, seeds: int = 100, shorten: int = 1) -> list[Row]:
    """Train ``seeds`` networks of each activation, with the setting that was best on other seeds; print a summary.

    Writes ``fig3.png`` to ``fig6.png`` and ``spirals_settings.png`` to ``figures`` and ``spirals.jsonl`` to
    ``results``: two to three minutes on one core. ``shorten`` divides every number of training steps, for tests.
    """
    for name, value, least in (("seed", seed, 0), ("seeds", seeds, 2)):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    if not 1 <= shorten <= min(task.steps for task in TASKS) // 4:
        raise ValueError(f"shorten is {shorten}; expected 1 for the whole training, up to {THREE_ARMS.steps // 4}")
    for folder in (figures, results):
        ensure_writable(folder)
    with one_thread():
        rows, drawn = _Run(seed, seeds, shorten).compute()
    for file, figure in drawn.items():
        with atomic_write(figures / file) as path:
            figure.savefig(path, format="png")
    store = Store(results / "spirals.jsonl")
    store.replace(rows)
    rich.print(_summary(rows, f"figures: {figures}", f"rows: {store.path}"))
    return rows


def _summary(rows: Sequence[Row], *paths: str) -> Table:
    """The losses and turns of every activation, with the verdicts on the claims of Section 3.2."""
    metrics = {row.row: row.metrics for row in rows}
    caption = ["mean ± 95% interval over the seeds, differences paired by seed", "is ReLU-Square better than ReLU?"]
    caption.append("  loss and accuracy depend on the training: deepsquare reproduce regimes")
    table = Table(title="Section 3.2: spirals, on test data", caption_justify="left")
    for heading in ("network", "1000 × loss", "minus ReLU's", "accuracy (%)", "turn"):
        table.add_column(heading, justify="left" if heading == "network" else "right", no_wrap=True)
    for task in TASKS:
        table.add_row(f"[bold]{task.name}[/bold]")
        for name in ACTIVATIONS:
            network = metrics[f"{task.name}/{name}"]
            means, against, n = network["means"], network.get("against_relu"), len(network["test_loss"])
            table.add_row(
                draw.NAMES[name],
                Interval.read(means["test_loss"], n, 1000).format(),
                Interval.read(against["test_loss"], n, 1000).format() if against else "",
                Interval.read(means[ACCURACY], n, 100).format() if task.classification else "",
                f"{means['sharpest_turn']['mean']:.1f}°",
            )
        table.add_section()
        square = metrics[f"{task.name}/relu_square"]
        turn = Interval.read(square["against_relu"]["sharpest_turn"], len(square["sharpest_turn"]))
        smoother = judge_sign(BETTER["sharpest_turn"], turn).value
        better = metrics[f"settings/{task.name}"]["relu_square_better"]
        counts, steps = (", ".join(str(count[key]) for count in better) for key in ("settings", "steps"))
        caption.append(f"  {task.name}: smoothness {smoother}")
        caption.append(f"    lower loss in {counts} of {better[0]['of']} settings, after {steps} steps")
    table.caption = "\n".join([*caption, *map(escape, paths)])
    return table


class _Run:
    """The steps of a run, and their rows."""

    def __init__(self, seed: int, seeds: int, shorten: int) -> None:
        self.seed, self.shorten, self.start = seed, shorten, seed * SPAN
        ablation, fresh = self.start + SPAN // 4, self.start + SPAN // 2
        self.others = range(ablation, ablation + min(20, seeds))
        self.fresh = range(fresh, fresh + seeds)
        self.rows: list[Row] = []
        self.since = time.perf_counter()

    def compute(self) -> tuple[list[Row], dict[str, Figure]]:
        """Run all steps; returns the rows and the figures by file name."""
        tuned, trained = {}, {}
        with Progress(transient=True) as progress:
            step = progress.add_task("", total=None)
            for task in TASKS:
                progress.update(step, description=f"{task.name}: every setting")
                tuned[task.name] = self.tune(task)
                progress.update(step, description=f"{task.name}: {len(self.fresh)} networks of each activation")
                trained[task.name] = self.train(task, tuned[task.name])
            progress.update(step, description="ablation")
            self.ablate()
            one, three = trained.values()
            figures = {
                "fig3.png": draw.fig3(one),
                "fig4.png": draw.fig4(one),
                "fig5.png": draw.fig5(three),
                "fig6.png": draw.fig6(three),
                "spirals_settings.png": draw.settings(tuned),
            }
        return self.rows, figures

    def tune(self, task: Task) -> dict[str, Tuned]:
        seeds = range(self.start, self.start + task.tuning_seeds)
        tuned = {name: tune(task, name, seeds, task.steps // self.shorten) for name in ACTIVATIONS}
        self._store(f"settings/{task.name}", {}, _settings(tuned), seeds)
        return tuned

    def train(self, task: Task, tuned: Mapping[str, Tuned]) -> dict[str, Trained]:
        steps = task.steps // self.shorten
        trained: dict[str, Trained] = {}
        measured: dict[str, dict[str, Array]] = {}
        for name in ACTIVATIONS:  # ReLU, which the others are compared with, is the first
            result = trained[name] = retrain(task, name, tuned[name], self.fresh, steps)
            measured[name] = _measure(result)
            metrics: dict[str, Any] = {metric: round_for_json(values) for metric, values in measured[name].items()}
            metrics["means"] = {metric: mean(settled(values)) for metric, values in measured[name].items()}
            if name != "relu":
                metrics["against_relu"] = {
                    metric: difference(measured[name][metric], measured["relu"][metric], sign)
                    for metric, sign in BETTER.items()
                    if metric in measured[name]
                }
            if task is ONE_ARM and name in ablation.PAIR:  # the others have no kink
                counts = measures.units(result.networks, result.parameters, result.networks.batch("train")[0])
                metrics["units"] = {kind: float(units.mean()) for kind, units in counts.items()}
            bands = {
                metric: [round_for_json(row) for row in quantiles(curve)] for metric, curve in result.curves.items()
            }
            metrics["curve"] = {"steps": list(result.checkpoints), "quantiles": list(QUANTILES), **bands}
            recipe = asdict(result.networks.settings[0]) | {"steps": result.steps}
            self._store(f"{task.name}/{name}", recipe, metrics, self.fresh)
        return trained

    def ablate(self) -> None:
        usual, steps = asdict(ablation.USUAL), ONE_ARM.steps // self.shorten
        iterations = max(1, 150 // self.shorten)
        few, fewer = self.others[:10], self.others[:5]
        cases = {"cases": ablation.by_data(few, steps)}
        self._store("ablation/data", usual | {"steps": steps}, cases, few)
        cases = {"cases": ablation.by_length(self.others, 3 * steps)}
        self._store("ablation/length", usual | {"steps": 3 * steps}, cases, self.others)
        cases = {"cases": ablation.by_optimizer(fewer, steps, iterations)}
        self._store("ablation/optimizer", usual | {"steps": steps, "iterations": iterations, "noise": 0}, cases, fewer)
        self._store("ablation/start", {"initialization": "pytorch"}, {"cases": ablation.at_start(few)}, few)

    def _store(
        self, name: str, recipe: Mapping[str, Any], metrics: Mapping[str, Any], seeds: range | None = None
    ) -> None:
        """Add a row with the seconds since the previous one."""
        before, self.since = self.since, time.perf_counter()
        if seeds:
            recipe = {**recipe, "seeds": len(seeds), "first_seed": seeds[0]}
        seconds = round(self.since - before, 2)
        self.rows.append(Row("spirals", name, self.seed, recipe, metrics, seconds, **conditions()))


def _settings(tuned: Mapping[str, Tuned]) -> dict[str, Any]:
    """The whole grid, the best setting of each activation, and how often ReLU-Square is better than ReLU."""
    relu, square = tuned["relu"], tuned["relu_square"]
    better = draw.log_ratio(square.test, relu.test) < 0
    chosen = {name: result.best for name, result in tuned.items()}

    def losses(result: Tuned) -> dict[str, Any]:
        return {split: [round_for_json(row) for row in getattr(result, split)] for split in get_args(Split)}

    return {
        "settings": [asdict(setting) for setting in relu.settings],
        "steps": list(relu.steps),
        "median_loss": {name: losses(result) for name, result in tuned.items()},
        "chosen": {name: asdict(setting) | {"steps": steps} for name, (setting, steps) in chosen.items()},
        "relu_square_better": [
            {"steps": steps, "settings": int(row.sum()), "of": len(row)}
            for steps, row in zip(relu.steps, better, strict=True)
        ],
    }


def _measure(trained: Trained) -> dict[str, Array]:
    """The metrics of every network at the chosen step."""
    metrics = {"test_loss": trained.loss, "train_loss": trained.train_loss}
    if ACCURACY not in trained.curves:
        lines = measures.paths(trained.networks, trained.parameters)
        metrics["roughness"] = np.array([measures.roughness(path) for path in lines])
        metrics["sharpest_turn"] = np.array([measures.largest_turn(path) for path in lines])
    else:
        metrics[ACCURACY] = trained.curves[ACCURACY][trained.chosen]
        chosen = range(min(BOUNDARIES, len(trained.loss)))
        ticks, outputs = measures.on_grid(trained.networks, trained.parameters, chosen)
        metrics["sharpest_turn"] = np.array([measures.boundary_turn(ticks, network) for network in outputs])
    return metrics
