"""A training run on a folder of images: checks, resume, signals, log, and the row of its result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepsquare import checkpoint
from deepsquare._compat import RECIPE_KEYS, rename_keys
from deepsquare._files import atomic_write, ensure_writable
from deepsquare.data.splits import check_same_classes, open_source
from deepsquare.models import create_model
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import Row, Store
from deepsquare.training.config import DEFAULT_CONFIG, TrainerConfig, describe_run
from deepsquare.training.distributed import SINGLE_PROCESS, DistributedContext
from deepsquare.training.image_folder import ImageBatches, ImageEvaluation
from deepsquare.training.loop import DivergedError, History, StoppedError, fit
from deepsquare.training.recipe import ImageNetRecipe
from deepsquare.training.trainer import Trainer

IMAGENET = (1000, 1_281_167)  # its number of classes and of training images
CHECKPOINT, MODEL, EMA, LOG, SUMMARY = "last.pt", "model.safetensors", "ema.safetensors", "log.jsonl", "run.json"
JOB = ".job"  # the torchrun job that started the run


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a run on a folder of images."""

    experiment: str  # imagenet, or the name of the folder
    trainer: Trainer
    batches: ImageBatches
    evaluation: ImageEvaluation

    @property
    def preprocessing(self) -> Preprocessing:
        """For the checkpoint of the model."""
        return self.evaluation.preprocessing


def setup_training(
    recipe: ImageNetRecipe,
    data: Path,
    seed: int = 0,
    config: TrainerConfig = DEFAULT_CONFIG,
    distributed: DistributedContext = SINGLE_PROCESS,
) -> TrainingSetup:
    """Open the data and build the model; fail early where recipe, config and data do not fit."""
    train_source, val_source = open_source(data, "train"), open_source(data, "val")
    check_same_classes(train_source, val_source)
    classes = train_source.classes
    if len(classes) < 2:
        raise ValueError(f"{data} has one class, {classes[0]}; expected at least two")
    if config.sync_bn and distributed.device.type != "cuda":
        raise ValueError("sync_bn needs GPUs; on the CPU, leave it out: each process uses the statistics of its part")
    batches = ImageBatches(train_source, recipe, seed=seed, distributed=distributed, loading=config.loading)
    share = recipe.batch_size // distributed.world_size
    if config.micro_batch_size is not None and share % config.micro_batch_size:
        reason = f"expected a divisor of the {share} images that each process takes per step"
        raise ValueError(f"micro_batch_size is {config.micro_batch_size}; {reason}")
    preprocessing = Preprocessing(tuple(classes), recipe.eval_size, recipe.eval_resize)
    return TrainingSetup(
        "imagenet" if (len(classes), len(train_source)) == IMAGENET else data.resolve().name,
        Trainer(_create_model(recipe, len(classes), seed), recipe, config, distributed, preprocessing),
        batches,
        ImageEvaluation(val_source, preprocessing, distributed, config.loading),
    )


def _create_model(recipe: ImageNetRecipe, classes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    shape = (3, recipe.size, recipe.size)
    model = create_model(recipe.model, recipe.spec, dropout=recipe.dropout, input_shape=shape, num_classes=classes)
    if recipe.start is not None:
        checkpoint.load_weights(model, recipe.start)
    return model


def train(
    name: str,
    recipe: ImageNetRecipe,
    data: Path,
    output: Path,
    *,
    seed: int = 0,
    config: TrainerConfig = DEFAULT_CONFIG,
    distributed: DistributedContext = SINGLE_PROCESS,
    resume: bool = False,
    results: Path = Path("out/results"),
) -> History:
    """Train by the recipe, keep the run in ``output``, and append a row to ``imagenet.jsonl`` in ``results``.

    SIGTERM raises StoppedError and Ctrl-C KeyboardInterrupt, after the current step and a checkpoint.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected 0 or more")
    setup = setup_training(recipe, data, seed, config, distributed)
    described, source = describe_run(recipe, config), setup.batches.source
    ensure_writable(results)
    summary = {"name": name, "seed": seed, **described, "images": len(source), "classes": len(source.classes)}
    path = _prepare_folder(output, summary, setup.trainer.model, resume or _restarted(output), distributed)
    torch.manual_seed(seed + 1 + distributed.rank)  # each process has its own dropout masks
    history = _fit(setup, recipe, path, f"{name}, seed {seed}")
    if distributed.is_main_process:
        checkpoint.save(setup.trainer.model, output / MODEL, setup.preprocessing)
        if setup.trainer.ema is not None:
            checkpoint.save(setup.trainer.ema.module, output / EMA, setup.preprocessing)
        described |= {
            "schedule": f"{recipe.size} px",
            "processes": distributed.world_size,
            "micro_batch_size": config.micro_batch_size,
            "pipeline": config.loading.pipeline,
        }
        row = Row(setup.experiment, name, seed, described, history.metrics(), round(history.seconds, 1))
        Store(results / "imagenet.jsonl").append(row)
    return history


def _fit(setup: TrainingSetup, recipe: ImageNetRecipe, path: Path, identity: str) -> History:
    """Run the training loop with progress, log and signal handling."""
    from deepsquare.training.progress import TrainingProgress  # imports rich

    config, is_main_process = setup.trainer.config, setup.trainer.distributed.is_main_process
    with ExitStack() as stack:
        signals = stack.enter_context(_record_signals())
        progress = stack.enter_context(TrainingProgress(recipe, len(setup.batches), is_main_process))
        write_log = stack.enter_context(_open_log(path.parent, config.tensorboard and is_main_process))

        def on_epoch(history: History) -> None:
            progress.epoch(history)
            if is_main_process:
                write_log(history)

        try:
            return fit(
                setup.trainer,
                setup.batches,
                recipe,
                setup.evaluation,
                checkpoint=path,
                checkpoint_interval=60 * config.checkpoint_minutes,
                identity=identity,
                on_epoch=on_epoch,
                on_step=progress.step,
                stop=lambda: bool(signals),
                judge_end=False,  # a trial run of a few epochs may end at chance level
            )
        except DivergedError as error:
            hint = f"; {path} is from before the divergence" if path.exists() else ""
            raise ValueError(f"{error}, in a new --output{hint}") from error
        except StoppedError as error:
            raise KeyboardInterrupt(*error.args) if signal.SIGINT in signals else error from None


def _restarted(output: Path) -> bool:
    """Whether torchrun has restarted this process, after the same job had started the run in that folder."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return restarts > 0 and (output / JOB).exists() and (output / JOB).read_text() == _job_id()


def _job_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _prepare_folder(
    output: Path, summary: dict[str, Any], model: nn.Module, resume: bool, distributed: DistributedContext
) -> Path:
    """Check the folder of a run and its free space, write the summary, and return the path of the checkpoint."""
    ensure_writable(output)
    path, summary = output / CHECKPOINT, json.loads(json.dumps(summary))  # tuples become lists, as in the file
    if path.exists() and not resume:
        raise ValueError(f"{output} already contains a run; continue it with --resume, or choose another --output")
    if resume and (output / SUMMARY).exists():
        stored = _read_summary(output / SUMMARY)
        if changed := [key for key in summary if stored.get(key) != summary[key]]:
            differences = "; ".join(f"{key} was {stored.get(key)}, is {summary[key]}" for key in changed)
            raise ValueError(f"{output} contains another run: {differences}. Choose another --output")
    copies = 5 + 3 * (summary["ema"] is not None)  # weights and momentum in the old and the new file; the result
    needed = copies * sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    free = shutil.disk_usage(output).free
    if free < needed:
        raise OSError(f"{output} has {free / 1e6:.0f} MB of free space; a run needs {needed / 1e6:.0f} MB")
    distributed.all_gather(None)  # no process writes before all have checked
    if distributed.is_main_process:
        with atomic_write(output / SUMMARY) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
        (output / JOB).write_text(_job_id())
        if not path.exists():
            (output / LOG).unlink(missing_ok=True)  # of a run whose checkpoint was removed
    return path


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or choose another --output") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path} does not describe a run; remove it, or choose another --output")
    return dict(rename_keys(summary, RECIPE_KEYS))


@contextmanager
def _record_signals() -> Iterator[list[int]]:
    """A list to which SIGTERM and SIGINT (Ctrl-C) are appended; a second Ctrl-C raises KeyboardInterrupt at once."""
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        if number in received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _open_log(output: Path, tensorboard: bool) -> Iterator[Callable[[History], None]]:
    """A function that appends the last epoch to the log as a line of JSON and, on request, to TensorBoard's files."""
    writer: Any = None
    if tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("--tensorboard needs TensorBoard: pip install 'deepsquare[tensorboard]'") from error
        writer = SummaryWriter(str(output / "tensorboard"))

    def write(history: History) -> None:
        values = {key: value[-1] for key, value in asdict(history).items() if isinstance(value, list) and value}
        line = {"epoch": history.epochs, **values, "seconds": round(history.seconds, 1), "time": round(time.time())}
        with (output / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")
        for key, value in values.items() if writer else ():
            writer.add_scalar(key, value, history.epochs)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
