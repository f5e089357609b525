"""A training run on a folder of images, from the checks before it starts to the row that it leaves behind."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepsquare import checkpoint
from deepsquare._files import atomic_write, ensure_writable
from deepsquare.data.splits import check_same_classes, open_source
from deepsquare.data.transforms import EvalTransform
from deepsquare.models import create_model
from deepsquare.results import Row, Store
from deepsquare.training import (
    DistributedContext,
    DivergedError,
    Engine,
    History,
    ImageNetRecipe,
    StoppedError,
    Trainer,
    fit,
)
from deepsquare.training.distributed import SINGLE_PROCESS
from deepsquare.training.image_folder import ImageBatches, ImageEvaluation, Loading, Normalize
from deepsquare.training.progress import TrainingProgress

logger = logging.getLogger("deepsquare")
IMAGENET = (1000, 1_281_167)  # its classes and training images
CHECKPOINT, MODEL, AVERAGE, LOG, SUMMARY = "last.pt", "model.safetensors", "ema.safetensors", "log.jsonl", "run.json"
JOB = ".job"  # of torchrun, that began the run


@dataclass(frozen=True)
class Settings:
    """How a run is done on this machine, which its outcome does not depend on (but for batch statistics).

    Attributes:
        micro_batch_size: images that a device takes at a time; more are done in several goes, so that the batch stays.
        channels_last: the layout that convolutions are fastest in.
        compile: by torch.compile.
        minutes: between two checkpoints within an epoch.
        tensorboard: write event files too.
        loading: how images are read.
    """

    micro_batch_size: int | None = None
    channels_last: bool = True
    compile: bool = False
    minutes: float = 15.0
    tensorboard: bool = False
    loading: Loading = field(default_factory=Loading)

    def __post_init__(self) -> None:
        if not self.minutes >= 0:
            raise ValueError(f"minutes is {self.minutes:g}; expected 0 or more")


@dataclass(frozen=True)
class TrainingSetup:
    """What a run consists of."""

    experiment: str  # imagenet, or the name of the folder of other data
    trainer: Trainer
    batches: ImageBatches
    evaluation: ImageEvaluation

    @property
    def preprocessing(self) -> checkpoint.Preprocessing:
        """What the network is to be shown, for its checkpoint."""
        transform = self.evaluation.transform
        return checkpoint.Preprocessing(tuple(self.batches.source.classes), transform.size, transform.resize)


def setup_training(
    recipe: ImageNetRecipe, data: Path, seed: int, settings: Settings, distributed: DistributedContext = SINGLE_PROCESS
) -> TrainingSetup:
    """Open the data, build the network and put both together; what does not fit is told here."""
    images, val = open_source(data, "train"), open_source(data, "val")
    check_same_classes(images, val)
    if len(images.classes) < 2:
        raise ValueError(f"{data} has one class, {images.classes[0]}; expected at least two to tell apart")
    if recipe.sync_bn and distributed.device.type != "cuda":
        raise ValueError("sync_bn is for GPUs; on the CPU, leave it out: each process has the statistics of its part")
    batches = ImageBatches(images, recipe, seed=seed, distributed=distributed, loading=settings.loading)
    share = recipe.batch_size // distributed.world_size
    if settings.micro_batch_size is not None and (settings.micro_batch_size < 1 or share % settings.micro_batch_size):
        reason = f"expected a divisor of the {share} images that each process takes a step"
        raise ValueError(f"micro_batch_size is {settings.micro_batch_size}; {reason}")
    engine = Engine(
        distributed, settings.micro_batch_size, recipe.precision, settings.compile, recipe.ema, recipe.sync_bn,
        Normalize(distributed.device, settings.channels_last),
    )  # fmt: skip
    model = _model(recipe, len(images.classes), seed, settings)
    transform = EvalTransform(recipe.eval_size, recipe.eval_resize)
    whole = (len(images.classes), len(images)) == IMAGENET
    return TrainingSetup(
        "imagenet" if whole else data.resolve().name,
        Trainer(model, recipe, engine),
        batches,
        ImageEvaluation(val, transform, distributed, settings.loading),
    )


def train(
    name: str,
    recipe: ImageNetRecipe,
    data: Path,
    output: Path,
    *,
    seed: int = 0,
    settings: Settings | None = None,
    distributed: DistributedContext = SINGLE_PROCESS,
    resume: bool = False,
    results: Path = Path("out/results"),
) -> History:
    """Train by the recipe, with everything kept in ``output``, and add a row to ``imagenet.jsonl`` of ``results``."""
    settings = settings or Settings()
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected 0 or more")
    parts = setup_training(recipe, data, seed, settings, distributed)
    trainer, batches = parts.trainer, parts.batches
    of = {"images": len(batches.source), "classes": len(batches.source.classes)}
    described = {"name": name, "seed": seed, **asdict(recipe), **of}
    ensure_writable(results)
    place = _prepare(output, described, trainer.model, resume or _restarted(output), distributed)
    torch.manual_seed(seed + 1 + distributed.rank)  # dropout differs between the parts of a batch
    with ExitStack() as stack:
        asked = stack.enter_context(_asked_to_stop())
        shown = stack.enter_context(TrainingProgress(recipe, len(batches), distributed.is_main_process))
        write = stack.enter_context(_journal(output, settings.tensorboard and distributed.is_main_process))

        def on_epoch(history: History) -> None:
            shown.epoch(history)
            if distributed.is_main_process:
                write(history)

        try:
            history = fit(
                trainer, batches, recipe, parts.evaluation, checkpoint=place, checkpoint_interval=60 * settings.minutes,
                identity=f"{name}, seed {seed}", on_epoch=on_epoch, on_step=shown.step, stop=lambda: bool(asked),
                judge_end=False,  # a few epochs to try it out may end there
            )  # fmt: skip
        except DivergedError as error:
            kept = f"; {place} is from before it went wrong" if place.exists() else ""
            raise ValueError(f"{error}, in a new --output{kept}") from error
        except StoppedError as stopped:
            raise KeyboardInterrupt(*stopped.args) if signal.SIGINT in asked else stopped from None
    if distributed.is_main_process:
        checkpoint.save(trainer.model, output / MODEL, parts.preprocessing)
        if trainer.ema is not None:
            checkpoint.save(trainer.ema.module, output / AVERAGE, parts.preprocessing)
        described = {
            **asdict(recipe), "schedule": f"{recipe.size} px", "processes": distributed.world_size, "micro_batch_size": settings.micro_batch_size,
            "pipeline": settings.loading.pipeline,
        }  # fmt: skip
        row = Row(parts.experiment, name, seed, described, history.metrics(), round(history.seconds, 1))
        Store(results / "imagenet.jsonl").append(row)
    return history


def _model(recipe: ImageNetRecipe, classes: int, seed: int, settings: Settings) -> nn.Module:
    torch.manual_seed(seed)
    shape = (3, recipe.size, recipe.size)
    model = create_model(recipe.model, recipe.spec, dropout=recipe.dropout, input_shape=shape, num_classes=classes)
    if recipe.start is not None:
        checkpoint.load_weights(model, recipe.start)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _restarted(output: Path) -> bool:
    """Whether torchrun has started this process again, after its job had begun the run in that folder."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again and (output / JOB).exists() and (output / JOB).read_text() == _job()


def _job() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _prepare(
    output: Path, described: dict[str, Any], model: nn.Module, resume: bool, distributed: DistributedContext
) -> Path:
    """The folder of a run, with room for it; the place of its checkpoint."""
    ensure_writable(output)
    place, described = output / CHECKPOINT, json.loads(json.dumps(described))  # tuples as the file has them
    if place.exists() and not resume:
        raise ValueError(f"{output} holds a run already; go on with it by --resume, or give another --output")
    if resume and (output / SUMMARY).exists():
        before = _summary(output / SUMMARY)
        if changed := [key for key in described if before.get(key) != described[key]]:
            differences = "; ".join(f"{key} was {before.get(key)}, is {described[key]}" for key in changed)
            raise ValueError(f"{output} holds another run: {differences}. Give another --output")
    copies = 5 + 3 * (described["ema"] is not None)  # weights and momentum in the old file and the new; the result
    needed = copies * sum(value.numel() * value.element_size() for value in model.state_dict().values())
    if shutil.disk_usage(output).free < needed:
        free = shutil.disk_usage(output).free
        raise OSError(f"{output} has room for {free / 1e6:.0f} MB; a run needs {needed / 1e6:.0f} MB: make room")
    distributed.all_gather(None)  # nobody writes before all have looked
    if distributed.is_main_process:
        with atomic_write(output / SUMMARY) as temporary:
            temporary.write_text(json.dumps(described, indent=2) + "\n")
        (output / JOB).write_text(_job())
        if not place.exists():
            (output / LOG).unlink(missing_ok=True)  # of a run whose checkpoint was removed
    return place


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or give another --output") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no description of a run; remove it, or give another --output")
    return found


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Which of SIGTERM and SIGINT (Ctrl-C) have arrived; a second Ctrl-C ends at once."""
    asked: list[int] = []

    def note(number: int, _: Any) -> None:
        if number in asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _journal(output: Path, tensorboard: bool) -> Iterator[Any]:
    """Writes an epoch as a line of JSON and, if asked, for TensorBoard."""
    board: Any = None
    if tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("--tensorboard needs TensorBoard: pip install 'deepsquare[tensorboard]'") from error
        board = SummaryWriter(str(output / "tensorboard"))

    def write(history: History) -> None:
        values = {key: value[-1] for key, value in asdict(history).items() if isinstance(value, list) and value}
        line = {"epoch": history.epochs, **values, "seconds": round(history.seconds, 1), "time": round(time.time())}
        with (output / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")
        for key, value in values.items() if board else ():
            board.add_scalar(key, value, history.epochs)

    try:
        yield write
    finally:
        if board is not None:
            board.close()
