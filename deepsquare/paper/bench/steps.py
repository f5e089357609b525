"""The step that a grid chooses for a network against the eager steps in both memory formats, on one thread.

Eager steps on all threads show why a grid trains one run per core on one thread each: N threads would have to be more
than N times as fast.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import msgspec
import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from deepsquare._threads import cores, one_thread, use_threads
from deepsquare.data.in_memory import InMemoryBatches, LabeledImages
from deepsquare.models import create_model
from deepsquare.paper.bench import _common
from deepsquare.paper.statistics import bounds_label, median, median_ratio
from deepsquare.results import round_for_json
from deepsquare.training import CifarRecipe, Trainer
from deepsquare.training.loop import EpochMetrics, step, tune_malloc
from deepsquare.training.step_config import StepConfig, choose_step, make_trainer

CONTIGUOUS, BEFORE, CHOSEN = "eager, contiguous", "eager, channels_last", "chosen"
ALL_THREADS = "eager, channels_last, all threads"


def _shufflenet() -> nn.Module:
    """For 64×64 images, without the max-pooling that would leave too small a map."""
    model = create_model("shufflenet_v2_x0_5", num_classes=200)
    model.maxpool = nn.Identity()
    return model


# By name: the model, the side of its images, and the number of classes.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "vanilla_cnn": (partial(create_model, "vanilla_cnn"), 32, 10),
    "shufflenet_v2_x0_5, 64×64": (_shufflenet, 64, 200),
}


def measure(recipe: CifarRecipe, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds per step of each network before and with the chosen step, by round, and the choice."""
    tune_malloc()
    with one_thread():
        return {name: _measure(*network, recipe, rounds, steps) for name, network in NETWORKS.items()}


def _measure(
    build: Callable[[], nn.Module], size: int, classes: int, recipe: CifarRecipe, rounds: int, steps: int
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (8 * recipe.batch_size, 3, size, size), dtype=np.uint8))
    data = LabeledImages(images, torch.from_numpy(rng.integers(0, classes, len(images))))
    batches = InMemoryBatches(data, recipe.batch_size, pad=recipe.pad, flip=recipe.flip)
    choice = choose_step(build(), recipe, batches, compiled=True)
    workloads = {}
    configs = {CONTIGUOUS: StepConfig(channels_last=False), BEFORE: StepConfig(), CHOSEN: choice.step}
    for name, config in configs.items():
        trainer = make_trainer(build(), recipe, config)
        workloads[name] = partial(_run, trainer, chain.from_iterable(map(batches.epoch, count())), recipe.lr_at(0.1))
        workloads[name](3)  # warm-up
    workloads[ALL_THREADS] = use_threads(cores())(workloads[BEFORE])
    calls = {name: partial(_common.time_call, partial(workload, steps)) for name, workload in workloads.items()}
    times = _common.interleave(calls, range(rounds))
    seconds = {name: round_for_json([value / steps for value in values], 6) for name, values in times.items()}
    return {
        "seconds_per_step": seconds,
        "batch_size": recipe.batch_size,
        "threads": cores(),
        "choice": choice.metrics(),
    }


def _run(trainer: Trainer, batches: Iterator[tuple[Tensor, Tensor]], lr: float, steps: int) -> None:
    epoch_metrics = EpochMetrics()
    for _ in range(steps):
        step(trainer, *next(batches), lr, epoch_metrics)


def table(measured: Mapping[str, Any]) -> Table:
    """The comparison, from the metrics of a row."""
    headings = ("", "images/s", f"against {BEFORE}", f"against {CONTIGUOUS}", "eager: threads", "the chosen step")
    rounds = min(len(network["seconds_per_step"][CHOSEN]) for network in measured.values())
    comparison = _common.make_table(
        "Training steps on one thread: times as fast",
        f"median ({bounds_label(rounds)}); eager, channels_last: without a choice",
        headings,
    )
    for name, network in measured.items():
        seconds: Mapping[str, Sequence[float]] = network["seconds_per_step"]
        speed = f"{network['batch_size'] / median(seconds[CHOSEN]).value:.0f}"
        ratios = (
            _common.format_median(median_ratio(seconds[kind], seconds[CHOSEN]), 2) for kind in (BEFORE, CONTIGUOUS)
        )
        config = msgspec.convert(network["choice"], StepConfig)
        threads = _common.format_median(median_ratio(seconds[BEFORE], seconds[ALL_THREADS]), 2)
        comparison.add_row(name, speed, *ratios, f"{network['threads']}: {threads}", config.name)
    return comparison
