"""A grid small enough to be killed many times."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepsquare.data.in_memory import InMemoryBatches, LabeledImages, eval_batches
from deepsquare.paper.grid.backend import Workers
from deepsquare.paper.grid.runner import InMemoryTraining, TrainingRun, run_grid
from deepsquare.results import Store
from deepsquare.training import Evaluation, Recipe

RECIPE = Recipe(epochs=6, batch_size=16, lr=0.05)
ROWS = {"Original": "", "DeepSquare3": "pooling", "DeepSquare5s-": "softmin"}
RUNS = [
    TrainingRun("toy", label, seed, "vanilla_cnn", spec, "toy", RECIPE)
    for seed in range(2)
    for label, spec in ROWS.items()
]


@dataclass(frozen=True)
class Toy:
    """Random images whose class is their brightest channel; ``pause`` seconds after every epoch."""

    pause: float = 0.0

    def __call__(self, run: TrainingRun) -> tuple[InMemoryBatches, Evaluation]:
        rng = np.random.default_rng(0)
        images = torch.from_numpy(rng.integers(0, 256, (64, 3, 32, 32), dtype=np.uint8))
        labels = images.float().mean((2, 3)).argmax(1)
        data = LabeledImages(images, labels)

        def evaluation() -> Iterable[tuple[Tensor, Tensor]]:
            time.sleep(self.pause)
            return eval_batches(data)

        return InMemoryBatches(data, run.recipe.batch_size, pad=2, seed=run.seed), evaluation


def run(store: Path, pause: float = 0.0, ray: str | None = None) -> None:
    run_grid(RUNS, InMemoryTraining(Toy(pause)), Store(store), Workers(2) if ray is None else Workers(ray=ray))
