"""A training run on a folder of images: checks, resume, signals, log, and the row of its result."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from deepsquare import checkpoint
from deepsquare._compat import RECIPE_KEYS, rename_keys
from deepsquare._files import atomic_write, ensure_writable, exclusive, explain_full, remove_stale_temps
from deepsquare._memory import OutOfMemoryError, explain_memory
from deepsquare.data.folders import check_same_classes, open_source
from deepsquare.models import create_model
from deepsquare.preprocessing import preprocessing_of
from deepsquare.results import Row, Store
from deepsquare.training.distributed import SINGLE_PROCESS, DistributedContext
from deepsquare.training.image_folder import ImageBatches, ImageEvaluation
from deepsquare.training.loop import DivergedError, History, StoppedError, fit
from deepsquare.training.recipe import DEFAULT_CONFIG, ImageNetRecipe, TrainerConfig, added_defaults, describe_run
from deepsquare.training.trainer import Trainer

IMAGENET = (1000, 1_281_167)  # its number of classes and of training images
CHECKPOINT, MODEL, EMA, LOG, SUMMARY = "last.pt", "model.safetensors", "ema.safetensors", "log.jsonl", "run.json"
AUXILIARY = (
    "googlenet",
    "inception_v3",
)  # have further classifiers in training, which the paper's loss has no term for
JOB = ".job"  # the torchrun job that started the run
LOCK = ".lock"  # held while a run uses its folder


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a run on a folder of images."""

    experiment: str  # imagenet, or the name of the folder
    trainer: Trainer
    batches: ImageBatches
    evaluation: ImageEvaluation


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
    batches = ImageBatches(train_source, recipe, seed, distributed, config.loading)
    share = recipe.batch_size // distributed.world_size
    if config.micro_batch_size is not None and share % config.micro_batch_size:
        reason = f"expected a divisor of the {share} images that each process takes per step"
        raise ValueError(f"micro_batch_size is {config.micro_batch_size}; {reason}")
    torch.manual_seed(seed)
    options: dict[str, Any] = {"init": recipe.init, "dropout": recipe.dropout, "num_classes": len(classes)}
    if recipe.model.rpartition("/")[2] in AUXILIARY:
        options["aux_logits"] = False
    model = create_model(recipe.model, recipe.spec, input_shape=(3, recipe.size, recipe.size), **options)
    if recipe.pretrained is not None:
        checkpoint.load_pretrained(model, recipe.pretrained)
    preprocessing = preprocessing_of(model, recipe.eval_size, recipe.eval_resize, classes)
    return TrainingSetup(
        "imagenet" if (len(classes), len(train_source)) == IMAGENET else data.resolve().name,
        Trainer(model, recipe, config, distributed, preprocessing),
        batches,
        ImageEvaluation(val_source, preprocessing, distributed, config.loading),
    )


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
    with _locked(output, distributed), explain_memory(f"the training of {name}", "choose a smaller model or batch"):
        setup = setup_training(recipe, data, seed, config, distributed)
        trainer, source = setup.trainer, setup.batches.source
        described = describe_run(recipe, config)
        ensure_writable(results)
        summary = {
            "name": name,
            "seed": seed,
            **added_defaults(),
            **described,
            "images": len(source),
            "classes": len(source.classes),
        }
        path = _prepare_folder(output, summary, trainer, resume)
        torch.manual_seed(seed + 1 + distributed.rank)  # each process has its own dropout masks
        history = _fit(setup, recipe, path, f"{name}, seed {seed}")
        if distributed.is_main_process:
            checkpoint.save(trainer.model, output / MODEL, trainer.preprocessing)
            if trainer.ema is not None:
                checkpoint.save(trainer.ema.module, output / EMA, trainer.preprocessing)
            described |= {
                "schedule": f"{recipe.size} px",
                "processes": distributed.world_size,
                "micro_batch_size": config.micro_batch_size,
                "pipeline": config.loading.pipeline,
            }
            row = Row(setup.experiment, name, seed, described, history.metrics(), round(history.seconds, 1))
            Store(results / "imagenet.jsonl").append(row)
        return history


@contextmanager
def _locked(output: Path, distributed: DistributedContext) -> Iterator[None]:
    """Keep other runs out of the folder; the main process holds the lock for all processes of this run."""
    with ExitStack() as stack:
        refused: OSError | None = None
        if distributed.is_main_process:
            try:
                if not output.exists():
                    stack.callback(_remove_if_empty, output)  # a mistake in the command leaves no folder
                ensure_writable(output)
                hint = "wait until that run ends, or choose another --output"
                stack.enter_context(exclusive(output / LOCK, str(output), hint))
                for file in (CHECKPOINT, MODEL, EMA, LOG, SUMMARY, JOB):  # of a killed run
                    remove_stale_temps(output / file)
            except OSError as error:
                refused = error
        refused = distributed.all_gather(refused)[0]  # the others would wait for the main process
        if refused is not None:
            raise refused
        yield


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _fit(setup: TrainingSetup, recipe: ImageNetRecipe, path: Path, identity: str) -> History:
    """Run the training loop with progress, log and signal handling."""
    from deepsquare.training.progress import TrainingProgress  # imports rich

    config, is_main_process = setup.trainer.config, setup.trainer.distributed.is_main_process
    progress = TrainingProgress(recipe, len(setup.batches), is_main_process)
    with ExitStack() as stack:
        signals = stack.enter_context(_record_signals())
        if progress.console.is_terminal:
            stack.enter_context(progress.bar)
        writer = stack.enter_context(_tensorboard(path.parent)) if config.tensorboard and is_main_process else None

        def on_epoch(history: History) -> None:
            progress.epoch(history)
            if is_main_process:
                _log_epochs(history, path.with_name(LOG), writer)

        try:
            history = fit(
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
            if is_main_process:
                _log_epochs(history, path.with_name(LOG))  # if the run was killed after its last checkpoint
            return history
        except DivergedError as error:
            hint = f"; {path} is from before the divergence" if path.exists() else ""
            raise ValueError(f"{error}, in a new --output{hint}") from error
        except OutOfMemoryError as error:
            resume = "; --resume continues from the last checkpoint, also with another --micro-batch-size or --workers"
            raise OutOfMemoryError(f"{error}{resume if path.exists() else ''}") from error
        except StoppedError as error:
            raise KeyboardInterrupt(*error.args) if signal.SIGINT in signals else error from None


def _prepare_folder(output: Path, summary: dict[str, Any], trainer: Trainer, resume: bool) -> Path:
    """Check the folder of a run and its free space, write the summary, and return the path of the checkpoint."""
    ensure_writable(output)
    path, summary_path, job_path = output / CHECKPOINT, output / SUMMARY, output / JOB
    job, restarts = os.environ.get("TORCHELASTIC_RUN_ID", ""), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # A process that torchrun has restarted resumes, if the same job had started the run.
    resume = resume or (restarts > 0 and job_path.exists() and job_path.read_text() == job)
    summary = json.loads(json.dumps(summary))  # tuples become lists, as in the file
    if path.exists() and not resume:
        raise ValueError(f"{output} already contains a run; continue it with --resume, or choose another --output")
    if resume and summary_path.exists():
        try:
            decoded = msgspec.json.decode(summary_path.read_bytes(), type=dict[str, Any])
            stored = {**added_defaults(), **rename_keys(decoded, RECIPE_KEYS)}
        except ValueError as error:
            raise ValueError(f"{summary_path} is damaged ({error}); remove it, or choose another --output") from error
        if changed := [key for key in summary if stored.get(key) != summary[key]]:
            differences = "; ".join(f"{key} was {stored.get(key)}, is {summary[key]}" for key in changed)
            raise ValueError(f"{output} contains another run: {differences}. Choose another --output")
    copies = 5 + 3 * (summary["ema"] is not None)  # weights and momentum in the old and the new file; the result
    needed = copies * sum(tensor.numel() * tensor.element_size() for tensor in trainer.model.state_dict().values())
    present = sum(file.stat().st_size for file in output.iterdir() if file.is_file())  # of the copies, when resumed
    free = shutil.disk_usage(output).free + present
    if free < needed:
        raise OSError(f"{output} has {free / 1e6:.0f} MB of free space; a run needs {needed / 1e6:.0f} MB")
    trainer.distributed.all_gather(None)  # no process writes before all have checked
    if trainer.distributed.is_main_process:
        with atomic_write(summary_path) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
        with atomic_write(job_path) as temporary:
            temporary.write_text(job)
        if not path.exists():
            (output / LOG).unlink(missing_ok=True)  # of a run whose checkpoint was removed
    return path


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


def _tensorboard(output: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs TensorBoard: pip install 'deepsquare[tensorboard]'") from error
    return SummaryWriter(str(output / "tensorboard"))


def _log_epochs(history: History, path: Path, writer: Any = None) -> None:
    """Append the last epoch to the log as a line of JSON and, if there is a writer, to TensorBoard's files.

    A killed run may leave a log that lacks epochs of its checkpoint, or has others: it is then written anew, without
    the times of the epochs that it lacked.
    """
    curves = {key: value for key, value in asdict(history).items() if isinstance(value, list) and value}
    stored = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    known, times, lines = {line.rpartition(', "seconds"')[0]: line for line in stored}, "", []
    for epoch in range(1, history.epochs + 1):
        metrics = json.dumps({"epoch": epoch, **{key: value[epoch - 1] for key, value in curves.items()}})[:-1]
        if epoch == history.epochs:
            times = f', "seconds": {round(history.seconds, 1)}, "time": {round(time.time())}'
        lines.append(known.get(metrics, f"{metrics}{times}}}\n"))
    with explain_full(path):
        if stored == lines[:-1]:
            with path.open("a") as file:
                file.write(lines[-1])
        elif stored != lines:
            with atomic_write(path) as temporary:
                temporary.write_text("".join(lines))
    for key, value in curves.items() if writer else ():
        writer.add_scalar(key, value[-1], history.epochs)
