"""Training on small images: our loop against bare steps on one batch, and against the usual loop.

The contestants take turns of a few steps, each in a process of its own, all others waiting, so that a busy moment of
the machine meets them alike. Every turn gives one time; a ratio is the median over the rounds of the ratio of their
times. The usual loop is torchvision's CIFAR10 data set, its transforms and a DataLoader with two workers.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare import _torchvision  # noqa: F401  # before torchvision
from deepsquare._files import ensure_writable
from deepsquare.cost import cost
from deepsquare.data import cifar10
from deepsquare.data.in_memory import InMemoryBatches, LabeledImages, Normalization
from deepsquare.models import create_model
from deepsquare.paper.cifar10.experiment import SCHEDULES
from deepsquare.paper.statistics import median, median_ratio
from deepsquare.results import Row, Store
from deepsquare.training import CifarRecipe
from deepsquare.training.loop import EpochMetrics, step, tune_malloc
from deepsquare.training.trainer import Engine, Trainer

IMAGES_PER_EPOCH = 50_000
Workload = Callable[[int], None]  # does so many steps


def _bare(data: LabeledImages, recipe: CifarRecipe) -> Workload:
    """The same steps on one batch that is never changed: what the data pipeline and the loop are held to."""
    tune_malloc()
    model, optimizer = _model(recipe)
    images, labels = next(InMemoryBatches(data, recipe.batch_size).epoch(0))

    def workload(steps: int) -> None:
        for _ in range(steps):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()

    return workload


def _ours(data: LabeledImages, recipe: CifarRecipe) -> Workload:
    tune_malloc()
    trainer = Trainer(_model(recipe)[0], recipe, Engine())
    batches = InMemoryBatches(data, recipe.batch_size, pad=recipe.pad, flip=recipe.flip)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        number = 0
        while True:
            yield from batches.epoch(number)
            number += 1

    source = endless()

    def workload(steps: int) -> None:
        epoch_metrics = EpochMetrics()
        for _ in range(steps):
            step(trainer, *next(source), recipe.lr, epoch_metrics)

    return workload


def _usual(data: LabeledImages, recipe: CifarRecipe, channels_last: bool = False) -> Workload:
    from torch.utils.data import DataLoader
    from torchvision import datasets
    from torchvision.transforms import v2

    normalize = Normalization()
    dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)  # its own __getitem__, on images that were not unpickled
    dataset.data = data.images.permute(0, 2, 3, 1).contiguous().numpy()
    dataset.targets = data.labels.tolist()
    dataset.target_transform = None
    dataset.transform = v2.Compose(
        [
            v2.RandomCrop(data.images.shape[2:], padding=recipe.pad, padding_mode="reflect"),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(normalize.mean, normalize.std),
        ]
    )
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    if "fork" in multiprocessing.get_all_start_methods():  # as in a script on Linux; this process was spawned
        workers["multiprocessing_context"] = "fork"
    loader = DataLoader(dataset, recipe.batch_size, shuffle=True, drop_last=True, **workers)
    model, optimizer = _model(recipe, channels_last)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    source = endless()

    def workload(steps: int) -> None:
        for _ in range(steps):
            images, labels = next(source)
            if channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()

    return workload


def _usual_tuned(data: LabeledImages, recipe: CifarRecipe) -> Workload:
    """The usual data with our memory settings: tells what the data pipeline alone is worth."""
    tune_malloc()
    return _usual(data, recipe, channels_last=True)


def _model(recipe: CifarRecipe, channels_last: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = create_model("vanilla_cnn")
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, recipe.optimizer(model)


CANDIDATES: dict[str, Callable[[LabeledImages, CifarRecipe], Workload]] = {
    "bare steps on one batch": _bare,
    "deepsquare": _ours,
    "torchvision + DataLoader": _usual,
    "the same, channels_last, buffers kept": _usual_tuned,
}


@dataclass(frozen=True)
class TrainBench:
    """Seconds per epoch of each contestant in each round, and what a matrix product reached on the same threads."""

    seconds: dict[str, list[float]]
    gflop_per_epoch: float
    gemm: float  # GFLOP per second
    threads: int

    def ratio(self, one: str, other: str) -> float:
        """How many times as long ``one`` takes as ``other``: the median over the rounds."""
        return median_ratio(self.seconds[one], self.seconds[other]).value

    def __rich__(self) -> Table:
        """The comparison."""
        bare, ours, usual, _ = CANDIDATES
        table = Table(
            title=f"Training the vanilla CNN on CIFAR-10, {self.threads} threads, {len(self.seconds[ours])} rounds",
            caption=f"overhead over bare steps {self.ratio(ours, bare) - 1:+.1%}, "
            f"{self.ratio(usual, ours):.2f} times as fast as torchvision + DataLoader",
        )
        for heading in ("", "s per epoch (median)", "best", "× deepsquare", "GFLOP/s", "of a matrix product"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, seconds in self.seconds.items():
            middle = median(seconds).value
            speed = self.gflop_per_epoch / middle
            cells = (f"{middle:.2f}", f"{min(seconds):.2f}", f"{self.ratio(name, ours):.2f}", f"{speed:.0f}")
            table.add_row(name, *cells, f"{speed / self.gemm:.0%}")
        return table


def run(
    *,
    rounds: int = 5,
    steps: int | None = None,
    folder: Path | None = None,
    results: Path = Path("out/results"),
) -> TrainBench:
    """Time every contestant over one epoch per round, print the comparison and add it to ``bench.jsonl``.

    Random images stand in where CIFAR-10 cannot be had: the time is the same.
    """
    if rounds < 1 or (steps is not None and steps < 1):
        raise ValueError(f"rounds is {rounds} and steps is {steps}; expected at least 1")
    ensure_writable(results)
    data = _source(folder)
    recipe = SCHEDULES["short"]
    whole = IMAGES_PER_EPOCH // recipe.batch_size
    steps = steps or whole
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    start = time.perf_counter()
    with _Stage(list(CANDIDATES), folder) as stage:
        for name in CANDIDATES:
            stage.time(name, min(steps, 20))  # warm
        for _ in range(rounds):
            for name in CANDIDATES:
                seconds[name].append(stage.time(name, steps) * whole / steps)
    one_pass = 2 * cost(create_model("vanilla_cnn")).macs
    first = 2 * 27 * 32 * 16 * 16  # the images need no gradient
    gflop = (3 * one_pass - first) * whole * recipe.batch_size / 1e9
    bench = TrainBench(seconds, gflop, _gemm_speed(), torch.get_num_threads())
    rich.print(bench)
    described = {
        "rounds": rounds,
        "steps": steps,
        "batch_size": recipe.batch_size,
        "threads": bench.threads,
        "data": data,
    }
    metrics = {"seconds": seconds, "gflop_per_epoch": gflop, "gemm_gflops": bench.gemm}
    row = Row("bench", "train", int(time.time()), described, metrics, round(time.perf_counter() - start, 1))
    Store(results / "bench.jsonl").append(row)
    return bench


def _gemm_speed(size: int = 2048) -> float:
    matrix = torch.randn(size, size)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9


class _Stage:
    """A waiting process per contestant; ``time`` gives one its turn."""

    def __init__(self, names: list[str], folder: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Any] = {}
        self._processes = []
        self._theirs: list[Any] = []
        for name in names:
            self._pipes[name], theirs = context.Pipe()
            self._theirs.append(theirs)
            self._processes.append(context.Process(target=_serve, args=(name, folder, theirs)))

    def __enter__(self) -> _Stage:
        for process in self._processes:
            process.start()
        for theirs in self._theirs:
            theirs.close()  # so that the end of a process ends its pipe
        try:
            for name in self._pipes:
                self._answer(name)  # ready
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes.values():
            with suppress(OSError):  # of a process that has ended
                pipe.send(0)
        for process in self._processes:
            process.join(timeout=10)
            process.terminate()

    def time(self, name: str, steps: int) -> float:
        """Seconds that a contestant takes for so many steps."""
        seconds: float = self._answer(name, steps)
        return seconds

    def _answer(self, name: str, steps: int | None = None) -> Any:
        try:
            if steps is not None:
                self._pipes[name].send(steps)
            return self._pipes[name].recv()
        except (EOFError, OSError) as error:
            reason = f"the process of {name!r} was killed, perhaps for want of memory; run the same command again"
            raise OSError(reason) from error


def _serve(name: str, folder: Path | None, pipe: Any) -> None:
    workload = CANDIDATES[name](_images(folder), SCHEDULES["short"])
    pipe.send("ready")
    while steps := pipe.recv():
        start = time.perf_counter()
        workload(steps)
        pipe.send(time.perf_counter() - start)


def _source(folder: Path | None) -> str:
    """What the data are; a wrong folder is an error here, before any process starts."""
    try:
        cifar10.load_cifar10(folder)
        return "CIFAR-10"
    except cifar10.DataUnavailableError as error:
        warnings.warn(f"random images stand in for CIFAR-10, which takes the same time: {error}", stacklevel=2)
        return "random images"


def _images(folder: Path | None) -> LabeledImages:
    try:
        return cifar10.load_cifar10(folder).train
    except cifar10.DataUnavailableError:
        rng = np.random.default_rng(0)
        images = torch.from_numpy(rng.integers(0, 256, (IMAGES_PER_EPOCH, 3, 32, 32), dtype=np.uint8))
        return LabeledImages(images, torch.from_numpy(rng.integers(0, 10, IMAGES_PER_EPOCH)))
