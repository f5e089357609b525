"""A training run of a network without batch statistics: ``distributed_script.py DATA OUT [options]``, or by torchrun.

The losses of its steps and the weights at its end go to OUT. Options: ``micro`` takes micro-batches of two images;
``checkpoint`` writes a checkpoint at every step; ``die=5`` kills the last process at step 5 of the first attempt;
``long`` takes twice the epochs, and batch statistics; ``anneal`` squares the map, with β from 0 to 1.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from deepsquare.data.folders import open_source
from deepsquare.preprocessing import Preprocessing
from deepsquare.surgery import equip
from deepsquare.training import ImageNetRecipe, LoaderConfig, Trainer, TrainerConfig, fit, init_distributed
from deepsquare.training.image_folder import ImageBatches, ImageEvaluation
from deepsquare.training.loop import EpochMetrics


def main(data: Path, out: Path, options: Sequence[str] = ()) -> None:
    epochs, die = 6 if "long" in options else 3, [int(option[4:]) for option in options if option.startswith("die=")]
    recipe = ImageNetRecipe(epochs=epochs, batch_size=12, lr=0.05, warmup=1.0, size=16, eval_size=16, eval_resize=18)
    if "anneal" in options:
        recipe = replace(recipe, spec="square(after='2')", init="anneal")
    loading = LoaderConfig(pipeline="torchvision")
    preprocessing = Preprocessing(size=16, resize=18)
    losses: list[float] = []

    with init_distributed("cpu") as distributed:
        torch.manual_seed(0)
        before = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8) if "long" in options else nn.Identity(), nn.ReLU())
        network = nn.Sequential(*before, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
        equip(network, recipe.spec, init=recipe.init, input_shape=(3, 16, 16))
        config = TrainerConfig(micro_batch_size=2 if "micro" in options else None)
        trainer = Trainer(network, recipe, config, distributed, preprocessing)
        batches = ImageBatches(open_source(data, "train"), recipe, distributed=distributed, loading=loading)
        evaluation = ImageEvaluation(open_source(data, "val"), preprocessing, distributed, loading, batch_size=4)

        def on_step(epoch: int, epoch_metrics: EpochMetrics, lr: float) -> None:
            losses.append(epoch_metrics.mean_loss)
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if first and distributed.rank == distributed.world_size - 1 and len(losses) in die:
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint = out.with_suffix(".pt") if "checkpoint" in options else None
        history = fit(
            trainer, batches, recipe, evaluation, checkpoint=checkpoint, checkpoint_interval=0, on_step=on_step
        )
        if distributed.is_main_process:
            weights = [value.flatten().tolist() for value in network.state_dict().values()]
            metrics = {"losses": losses, "accuracy": history.accuracy, "loss": history.loss, "top5": history.top5}
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
            out.write_text(json.dumps({**metrics, "weights": weights, "restarts": restarts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
