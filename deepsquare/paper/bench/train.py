"""Training on CIFAR-10: our loop against bare steps on one batch, and against the standard loop.

The standard loop is torchvision's CIFAR10 dataset and transforms with a DataLoader of two workers. Each candidate has a
process of its own and is idle while another is measured. Then the step that a grid chooses, against the one before.
"""

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import cache, partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import numpy as np
import rich
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare.cost import cost
from deepsquare.data import cifar10
from deepsquare.data.in_memory import InMemoryBatches, LabeledImages
from deepsquare.models import create_model
from deepsquare.paper.bench import _common
from deepsquare.paper.bench import steps as training_steps
from deepsquare.paper.cifar10.experiment import SCHEDULES
from deepsquare.paper.options import Cifar10Folder
from deepsquare.paper.statistics import median, median_ratio
from deepsquare.preprocessing import CIFAR10_MEAN, CIFAR10_STD
from deepsquare.training import CifarRecipe
from deepsquare.training.loop import EpochMetrics, step, tune_malloc
from deepsquare.training.trainer import Trainer

IMAGES_PER_EPOCH = 50_000
STEPS_PER_ROUND = 10  # of the comparison of steps
Batches = Iterator[tuple[Tensor, Tensor]]
Workload = Callable[[int], None]  # runs this many steps


def _bare(data: LabeledImages, recipe: CifarRecipe) -> Workload:
    """The same steps on one fixed batch: the lower bound for the data pipeline and the loop."""
    tune_malloc()
    batch = next(InMemoryBatches(data, recipe.batch_size).epoch(0))
    return partial(_train, *_model(recipe, torch.channels_last), repeat(batch))


def _ours(data: LabeledImages, recipe: CifarRecipe) -> Workload:
    tune_malloc()
    trainer = Trainer(_model(recipe, torch.channels_last)[0], recipe)
    epochs = map(InMemoryBatches(data, recipe.batch_size, pad=recipe.pad, flip=recipe.flip).epoch, count())
    batches = chain.from_iterable(epochs)

    def workload(steps: int) -> None:
        epoch_metrics = EpochMetrics()
        for _ in range(steps):
            step(trainer, *next(batches), recipe.lr, epoch_metrics)

    return workload


def _standard(data: LabeledImages, recipe: CifarRecipe, tuned: bool = False) -> Workload:
    """If ``tuned``, with our memory settings: the difference that is left is the data pipeline's."""
    from torch.utils.data import DataLoader
    from torchvision import datasets
    from torchvision.transforms import v2

    dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)  # its __getitem__, without its unpickling of downloaded files
    dataset.data = data.images.permute(0, 2, 3, 1).contiguous().numpy()
    dataset.targets = data.labels.tolist()
    dataset.target_transform = None
    dataset.transform = v2.Compose(
        [
            v2.RandomCrop(data.images.shape[2:], padding=recipe.pad, padding_mode="reflect"),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(CIFAR10_MEAN, CIFAR10_STD),
        ]
    )
    memory_format = torch.channels_last if tuned else torch.contiguous_format
    if tuned:
        tune_malloc()
    fork = "fork" if "fork" in multiprocessing.get_all_start_methods() else None  # the default of a script on Linux
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": fork}
    loader = DataLoader(dataset, recipe.batch_size, shuffle=True, drop_last=True, **workers)
    epochs = chain.from_iterable(repeat(loader))
    batches = ((images.contiguous(memory_format=memory_format), labels) for images, labels in epochs)
    return partial(_train, *_model(recipe, memory_format), batches)


def _model(recipe: CifarRecipe, memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = create_model("vanilla_cnn").to(memory_format=memory_format)  # type: ignore[call-overload]
    return model, recipe.optimizer(model)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, steps: int) -> None:
    for _ in range(steps):
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


BARE, OURS, STANDARD = "bare steps on one batch", "deepsquare", "torchvision + DataLoader"
CANDIDATES: dict[str, Callable[[LabeledImages, CifarRecipe], Workload]] = {
    BARE: _bare,
    OURS: _ours,
    STANDARD: _standard,
    "the same, channels_last, buffers kept": partial(_standard, tuned=True),
}


def run(
    *,
    rounds: _common.Rounds = 5,
    steps: int | None = None,
    data: Cifar10Folder = None,
    results: _common.Results = _common.RESULTS,
) -> None:
    """The training loop on CIFAR-10 against bare steps, and against torchvision with a DataLoader.

    Args:
        steps: Training steps per round; one epoch if not given.
    """
    _common.check(results, rounds=rounds, steps=steps)
    if reason := _load(data)[1]:  # a wrong folder fails here, before any process starts
        warnings.warn(f"random images stand in for CIFAR-10, which takes the same time: {reason}", stacklevel=2)
    recipe = SCHEDULES["short"]
    epoch_steps = IMAGES_PER_EPOCH // recipe.batch_size
    steps = steps or epoch_steps
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {name: stack.enter_context(ProcessPoolExecutor(1, context)) for name in CANDIDATES}
        wait([pool.submit(_time, name, data, min(steps, 20)) for name, pool in pools.items()])  # warm-up
        candidates = {name: partial(time_in_process, pool, name, data, steps) for name, pool in pools.items()}
        times = _common.interleave(candidates, range(rounds))
    seconds = {name: [value * epoch_steps / steps for value in values] for name, values in times.items()}
    first_layer = 2 * 27 * 32 * 16 * 16  # computes no gradient for the images
    gflop = (3 * 2 * cost(create_model("vanilla_cnn")).macs - first_layer) * epoch_steps * recipe.batch_size / 1e9
    metrics: dict[str, Any] = {"seconds": seconds, "gflop_per_epoch": gflop, "gemm_gflops": _gemm_gflops()}
    metrics["steps"] = training_steps.measure(recipe, rounds, min(steps, STEPS_PER_ROUND))
    threads = torch.get_num_threads()
    rich.print(table(metrics, threads))
    rich.print(training_steps.table(metrics["steps"]))
    described = {
        "rounds": rounds, "steps": steps, "batch_size": recipe.batch_size, "threads": threads,
        "data": "random images" if reason else "CIFAR-10",
    }  # fmt: skip
    _common.append_row(results, "train", described, metrics, start)


def table(metrics: Mapping[str, Any], threads: int) -> Table:
    """The comparison, from the metrics of a row."""
    seconds: Mapping[str, Sequence[float]] = metrics["seconds"]
    overhead = median_ratio(seconds[OURS], seconds[BARE]).value - 1
    speedup = median_ratio(seconds[STANDARD], seconds[OURS]).value
    comparison = _common.make_table(
        f"Training the vanilla CNN on CIFAR-10, {threads} threads, {len(seconds[OURS])} rounds",
        f"overhead over bare steps {overhead:+.1%}, {speedup:.2f} times as fast as torchvision + DataLoader",
        ("", "s per epoch (median)", "best", "× deepsquare", "GFLOP/s", "of a matrix product"),
    )
    for name, values in seconds.items():
        middle, ratio = median(values).value, median_ratio(values, seconds[OURS]).value
        gflops = metrics["gflop_per_epoch"] / middle
        cells = (f"{middle:.2f}", f"{min(values):.2f}", f"{ratio:.2f}", f"{gflops:.0f}")
        comparison.add_row(name, *cells, f"{gflops / metrics['gemm_gflops']:.0%}")
    return comparison


def _gemm_gflops(size: int = 2048) -> float:
    """What a matrix product reaches on the same threads."""
    matrix = torch.randn(size, size)
    return 2 * size**3 / min(_common.time_call(lambda: matrix @ matrix) for _ in range(5)) / 1e9


def time_in_process(pool: ProcessPoolExecutor, name: str, folder: Path | None, steps: int) -> float:
    """Seconds that a candidate takes for this many steps, in the process of its own that ``pool`` holds."""
    try:
        return pool.submit(_time, name, folder, steps).result()
    except BrokenProcessPool as error:
        reason = f"the process of {name!r} was killed, perhaps for lack of memory; run the same command again"
        raise OSError(reason) from error


def _time(name: str, folder: Path | None, steps: int) -> float:
    return _common.time_call(partial(_workload(name, folder), steps))


@cache
def _workload(name: str, folder: Path | None) -> Workload:
    return CANDIDATES[name](_load(folder)[0], SCHEDULES["short"])


def _load(folder: Path | None) -> tuple[LabeledImages, str]:
    """The training images, and the reason why they are random, if so."""
    try:
        return cifar10.load_cifar10(folder).train, ""
    except cifar10.DataUnavailableError as error:
        rng = np.random.default_rng(0)
        images = torch.from_numpy(rng.integers(0, 256, (IMAGES_PER_EPOCH, 3, 32, 32), dtype=np.uint8))
        return LabeledImages(images, torch.from_numpy(rng.integers(0, 10, IMAGES_PER_EPOCH))), str(error)
