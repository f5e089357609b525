"""Figures 3 to 6: tune, train with fresh seeds, measure, ablate, draw and store."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from deepsquare._files import atomic_write, ensure_writable
from deepsquare._threads import one_thread
from deepsquare.paper.spirals import ablation, draw, measures
from deepsquare.paper.spirals.data import Array
from deepsquare.paper.spirals.intervals import BETTER, difference, mean, settled
from deepsquare.paper.spirals.networks import ACTIVATIONS, ONE_ARM, THREE_ARMS, Task
from deepsquare.paper.spirals.tuning import QUANTILES, Trained, Tuned, quantiles, retrain, tune
from deepsquare.paper.statistics import Interval
from deepsquare.paper.verdict import Verdict, judge_sign
from deepsquare.results import Row, Store, conditions, round_for_json

TASKS = (ONE_ARM, THREE_ARMS)
BOUNDARIES = 20  # networks per activation whose decision boundaries are measured
SPAN = 1_000_000  # seeds per base seed: the first are for tuning, then for the ablations, then for the final networks
ACCURACY = "test_accuracy"


@dataclass(frozen=True)
class SpiralsResult:
    """The rows, and the paths of the figures and of the store."""

    rows: tuple[Row, ...]
    figures: tuple[Path, ...]
    results: Path

    def metrics(self, row: str) -> Mapping[str, Any]:
        """The metrics of a row by its label: ``one-arm/relu_square``."""
        return next(present.metrics for present in self.rows if present.row == row)

    def verdict(self, task: str, metric: str = "test_loss") -> Verdict:
        """Whether ReLU-Square is better than ReLU, as the paper claims, by the interval of the difference."""
        metrics = self.metrics(f"{task}/relu_square")
        return judge_sign(BETTER[metric], Interval.read(metrics["against_relu"][metric], len(metrics[metric])))

    def __rich__(self) -> Table:
        """The summary, with the verdicts on the claims of Section 3.2."""
        table = Table(title="Section 3.2: spirals, on test data", caption=self._caption(), caption_justify="left")
        for heading in ("network", "1000 × loss", "minus ReLU's", "accuracy (%)", "turn"):
            table.add_column(heading, justify="left" if heading == "network" else "right", no_wrap=True)
        for task in TASKS:
            table.add_row(f"[bold]{task.name}[/bold]")
            for name in ACTIVATIONS:
                metrics = self.metrics(f"{task.name}/{name}")
                n = len(metrics["test_loss"])
                table.add_row(
                    draw.NAMES[name],
                    Interval.read(metrics["means"]["test_loss"], n, 1000).format(),
                    Interval.read(metrics["against_relu"]["test_loss"], n, 1000).format() if name != "relu" else "",
                    Interval.read(metrics["means"][ACCURACY], n, 100).format() if task is THREE_ARMS else "",
                    f"{metrics['means']['sharpest_turn']['mean']:.1f}°",
                )
            table.add_section()
        return table

    def _caption(self) -> str:
        lines = ["mean ± 95% interval over the seeds, differences paired by seed", "is ReLU-Square better than ReLU?"]
        for task in TASKS:
            claims = {"test_loss": "loss", ACCURACY: "accuracy", "sharpest_turn": "smoothness"}
            measured = self.metrics(f"{task.name}/relu_square")["against_relu"]
            verdicts = [
                f"{name} {self.verdict(task.name, key).value}" for key, name in claims.items() if key in measured
            ]
            lines.append(f"  {task.name}: {'; '.join(verdicts)}")
            better = self.metrics(f"settings/{task.name}")["relu_square_better"]
            counts, steps = (", ".join(str(count[key]) for count in better) for key in ("settings", "steps"))
            lines.append(f"    of {better[0]['of']} settings in {counts}, after {steps} steps")
        paths = (f"figures: {self.figures[0].parent}", f"rows: {self.results}")
        return "\n".join([*lines, *map(escape, paths)])


def run(
    figures: Path = Path("out/figures"),
    results: Path = Path("out/results"),
    *,
    seed: int = 0,
    seeds: int = 100,
    shorten: int = 1,
) -> SpiralsResult:
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
        rows, images = _Run(seed, seeds, shorten).compute()
    for file, image in images.items():
        with atomic_write(figures / file) as path:
            path.write_bytes(image)
    result = SpiralsResult(tuple(rows), tuple(figures / file for file in images), results / "spirals.jsonl")
    Store(result.results).replace(rows)
    rich.print(result)
    return result


class _Run:
    """The steps of a run, and their rows."""

    def __init__(self, seed: int, seeds: int, shorten: int) -> None:
        self.seed, self.shorten, self.start = seed, shorten, seed * SPAN
        ablation, fresh = self.start + SPAN // 4, self.start + SPAN // 2
        self.others = range(ablation, ablation + min(20, seeds))
        self.fresh = range(fresh, fresh + seeds)
        self.rows: list[Row] = []
        self.since = time.perf_counter()

    def compute(self) -> tuple[list[Row], dict[str, bytes]]:
        """Run all steps; returns the rows and the figures as PNG, by file name."""
        tuned, trained = {}, {}
        with Progress(transient=True) as progress:
            step = progress.add_task("", total=None)
            for task in TASKS:
                progress.update(step, description=f"{task.name}: every setting")
                tuned[task.name] = self.tune(task)
                progress.update(step, description=f"{task.name}: {len(self.fresh)} networks of each activation")
                trained[task.name] = self.train(task, tuned[task.name])
            progress.update(step, description="ablation and cost")
            self.ablate()
            self.cost()
            one, three = (trained[task.name] for task in TASKS)
            images = {
                "fig3.png": draw.fig3(one),
                "fig4.png": draw.fig4(one),
                "fig5.png": draw.fig5(three),
                "fig6.png": draw.fig6(three),
                "spirals_settings.png": draw.settings(tuned),
            }
        return self.rows, images

    def tune(self, task: Task) -> dict[str, Tuned]:
        """Every activation on the whole grid."""
        steps = task.steps // self.shorten
        seeds = range(self.start, self.start + task.tuning_seeds)
        tuned = {name: tune(task, name, seeds, steps) for name in ACTIVATIONS}
        self._store(f"settings/{task.name}", {"seeds": len(seeds), "first_seed": seeds[0]}, _settings(tuned))
        return tuned

    def train(self, task: Task, tuned: Mapping[str, Tuned]) -> dict[str, Trained]:
        """Every activation with its best setting, on fresh seeds."""
        steps = task.steps // self.shorten
        trained = {name: retrain(task, name, tuned[name], self.fresh, steps) for name in ACTIVATIONS}
        measured = {name: _measure(result) for name, result in trained.items()}
        for name, result in trained.items():
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
            metrics["curve"] = _curve(result)
            recipe = asdict(result.setting) | {
                "steps": result.steps,
                "seeds": len(self.fresh),
                "first_seed": self.fresh[0],
            }
            self._store(f"{task.name}/{name}", recipe, metrics, result.seconds)
        return trained

    def ablate(self) -> None:
        """Run the ablations of ``ablation.py``."""
        usual, steps = asdict(ablation.USUAL), ONE_ARM.steps // self.shorten
        iterations = max(1, 150 // self.shorten)

        def store(name: str, recipe: Mapping[str, Any], seeds: range, cases: list[dict[str, Any]]) -> None:
            recipe = {**recipe, "seeds": len(seeds), "first_seed": seeds[0]}
            self._store(f"ablation/{name}", recipe, {"cases": cases})

        few, fewer = self.others[:10], self.others[:5]
        store("data", usual | {"steps": steps}, few, ablation.by_data(few, steps))
        store("length", usual | {"steps": 3 * steps}, self.others, ablation.by_length(self.others, 3 * steps))
        recipe = usual | {"steps": steps, "iterations": iterations, "noise": 0}
        store("optimizer", recipe, fewer, ablation.by_optimizer(fewer, steps, iterations))
        store("start", {"initialization": "pytorch"}, few, ablation.at_start(few))

    def cost(self) -> None:
        """Measure the time of each activation relative to ReLU."""
        elements, repeats = 2**20, max(1, 40 // self.shorten)
        costs = measures.activation_costs(elements, repeats)
        metrics: dict[str, Any] = {"milliseconds": {}, "relative_to_relu": {}}
        for name, times in costs.items():
            metrics["milliseconds"][name] = {kind: round(1000 * best, 4) for kind, best in times.items()}
            relative = {kind: round(best / costs["relu"][kind], 2) for kind, best in times.items()}
            metrics["relative_to_relu"][name] = relative
        self._store("activation cost", {"elements": elements, "repeats": repeats, "threads": 1}, metrics)

    def _store(
        self, name: str, recipe: Mapping[str, Any], metrics: Mapping[str, Any], seconds: float | None = None
    ) -> None:
        """Add a row; ``seconds`` is by default the time since the previous row."""
        now = time.perf_counter()
        seconds = now - self.since if seconds is None else seconds
        self.rows.append(Row("spirals", name, self.seed, recipe, metrics, round(seconds, 2), **conditions()))
        self.since = now


def _settings(tuned: Mapping[str, Tuned]) -> dict[str, Any]:
    """The whole grid, the best setting of each activation, and how often ReLU-Square is better than ReLU."""
    relu, square = tuned["relu"], tuned["relu_square"]
    better = draw.log_ratio(square.test, relu.test) < 0
    chosen = {name: result.best for name, result in tuned.items()}
    return {
        "settings": [asdict(setting) for setting in relu.settings],
        "steps": list(relu.steps),
        "median_loss": {
            name: {
                split: [round_for_json(row) for row in getattr(result, split)]
                for split in ("train", "validation", "test")
            }
            for name, result in tuned.items()
        },
        "chosen": {name: asdict(setting) | {"steps": steps} for name, (setting, steps) in chosen.items()},
        "relu_square_better": [
            {"steps": steps, "settings": int(row.sum()), "of": len(row)}
            for steps, row in zip(relu.steps, better, strict=True)
        ],
    }


def _measure(trained: Trained) -> dict[str, Array]:
    """The metrics of every network at the chosen step."""
    metrics = {"test_loss": trained.loss, "train_loss": trained.train_loss}
    if trained.accuracy is None:
        lines = measures.paths(trained.networks, trained.parameters)
        metrics["roughness"] = np.array([measures.roughness(path) for path in lines])
        metrics["sharpest_turn"] = np.array([measures.largest_turn(path) for path in lines])
    else:
        metrics[ACCURACY] = trained.accuracy
        chosen = range(min(BOUNDARIES, len(trained.loss)))
        ticks, outputs = measures.on_grid(trained.networks, trained.parameters, chosen)
        metrics["sharpest_turn"] = np.array([measures.boundary_turn(ticks, network) for network in outputs])
    return metrics


def _curve(trained: Trained) -> dict[str, Any]:
    """The quantiles over the seeds during training."""
    curves = {"test_loss": trained.losses, ACCURACY: trained.accuracies}
    bands = {
        metric: [round_for_json(row) for row in quantiles(values)]
        for metric, values in curves.items()
        if values is not None
    }
    return {"steps": list(trained.checkpoints), "quantiles": list(QUANTILES), **bands}
