"""How the training steps of a run are computed on the CPU, chosen by measuring steps of this network on this machine.

Every choice computes in float32 and differs from the others in rounding only, which training amplifies: accuracies
differ as they do between seeds. The choice is stored beside the run's checkpoint, because a run resumes bit for bit
only with the same one.
"""

import copy
import json
import logging
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from deepsquare._files import atomic_write, remove_stale_temps
from deepsquare._terminal import printable
from deepsquare.training.channels_last import keep_channels_last
from deepsquare.training.loop import Batches, EpochMetrics, step, tune_malloc
from deepsquare.training.matmul_conv import faster_as_matmul, use_matmul
from deepsquare.training.recipe import Recipe, TrainerConfig
from deepsquare.training.trainer import Trainer, preserved_random_state

logger = logging.getLogger("deepsquare")
MIN_STEPS = 200  # a shorter run ends before a measurement pays
EXPECTED_GAIN = 0.1  # share of a run's time that compiling saves; a run that would save less than it costs is not tried
COMPILE_SECONDS, COMPILE_SECONDS_PER_LAYER = 5.0, 1.0  # rough, with an empty cache
MARGIN = 1.05  # how much faster than the default another step has to be, so that noise does not decide
TOLERANCE = 1e-2  # relative, of the loss after a few steps: more than rounding, less than an error of a compiler


@dataclass(frozen=True)
class StepConfig:
    """How training steps are computed.

    Attributes:
        channels_last: Memory format of images and weights.
        compile: Use torch.compile.
        threads: Threads of an operation.
        matmul_convs: Convolutions that are computed as matrix products.
        keep_channels_last: Replace operations that leave channels_last.
    """

    channels_last: bool = True
    compile: bool = False
    threads: int = 1
    matmul_convs: tuple[str, ...] = ()
    keep_channels_last: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; expected at least 1")

    @property
    def name(self) -> str:
        parts = ["compiled" if self.compile else "eager", "channels_last" if self.channels_last else "contiguous"]
        if self.matmul_convs:
            parts.append(f"{len(self.matmul_convs)} convolutions as matrix products")
        if self.keep_channels_last:
            parts.append("kept in every operation")
        return ", ".join(parts)


class _Speeds(msgspec.Struct):
    images_per_second: dict[str, float]


@dataclass(frozen=True)
class StepChoice:
    """The chosen step, the speed of each candidate by name, and the seconds that the choice took."""

    step: StepConfig
    images_per_second: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def metrics(self) -> dict[str, Any]:
        """As a row stores it."""
        speeds = {name: round(speed, 1) for name, speed in self.images_per_second.items()}
        chosen = {**asdict(self.step), "matmul_convs": list(self.step.matmul_convs)}
        return {**chosen, "images_per_second": speeds, "choice_seconds": round(self.seconds, 1)}

    @classmethod
    def from_metrics(cls, metrics: Any) -> "StepChoice | None":
        """The choice of an earlier run, which took no time now; None if that run measured nothing."""
        try:
            choice = cls(msgspec.convert(metrics, StepConfig), msgspec.convert(metrics, _Speeds).images_per_second)
        except msgspec.ValidationError:
            return None
        return choice if choice.images_per_second else None

    def save(self, path: Path) -> None:
        remove_stale_temps(path)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(self)))


def make_trainer(model: nn.Module, recipe: Recipe, step_config: StepConfig) -> Trainer:
    """A trainer of this model, in place, whose steps are computed as configured; the caller sets the threads."""
    memory_format = torch.channels_last if step_config.channels_last else torch.contiguous_format
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    use_matmul(model, step_config.matmul_convs)
    if step_config.keep_channels_last:
        keep_channels_last(model)
    config = TrainerConfig(channels_last=step_config.channels_last, compile=step_config.compile)
    return Trainer(model, recipe, config)


def choose_step(model: nn.Module, recipe: Recipe, batches: Batches, *, compiled: bool | None = None) -> StepChoice:
    """Choose the fastest step by measuring steps on copies of the model; nothing of the run changes.

    Args:
        compiled: whether to try torch.compile; by default, if the run is long enough to gain more than it costs.
    """
    start, default = time.perf_counter(), StepConfig(threads=torch.get_num_threads())
    if recipe.epochs * len(batches) < MIN_STEPS and compiled is None:
        return StepChoice(default)
    try:
        speeds = _measure_candidates(model, recipe, batches, default, compiled)
    except FloatingPointError:  # diverges within a few steps: that is a result, which the run itself will store
        return StepChoice(default, seconds=time.perf_counter() - start)
    fastest = max(speeds, key=lambda one: speeds[one])
    if speeds[fastest] < MARGIN * speeds[default]:
        fastest = default
    named = {candidate.name: speed for candidate, speed in speeds.items()}
    return StepChoice(fastest, named, time.perf_counter() - start)


def _measure_candidates(
    model: nn.Module, recipe: Recipe, batches: Batches, default: StepConfig, compiled: bool | None
) -> dict[StepConfig, float]:
    """Images per second of the eager steps and, if it pays, of the compiled ones."""
    tune_malloc()
    with preserved_random_state(), closing(batches.epoch(0)) as epoch:
        batch = next(epoch)
        candidates = _Candidates(model, recipe, batch)
        candidates.add(default)
        candidates.add(replace(default, channels_last=False))
        if keep_channels_last(copy.deepcopy(model)):
            candidates.add(replace(default, keep_channels_last=True))
        speeds = candidates.measure()
        if compiled is None:
            gain = EXPECTED_GAIN * recipe.epochs * len(batches) * recipe.batch_size / max(speeds.values())
            compiled = gain > compile_seconds(model)
        if compiled:
            torch.compiler.reset()  # graphs of earlier runs count towards the limit of recompilations
            fastest = max(speeds, key=lambda one: speeds[one])
            matmul_convs = faster_as_matmul(copy.deepcopy(model), batch[0])
            candidates.add(replace(fastest, compile=True, keep_channels_last=False))
            if matmul_convs:
                candidates.add(replace(default, compile=True, matmul_convs=matmul_convs))
            speeds = candidates.measure()
            torch.compiler.reset()
    return speeds


def compile_seconds(model: nn.Module) -> float:
    """A rough estimate of what trying torch.compile costs."""
    layers = sum(not list(module.children()) for module in model.modules())
    return COMPILE_SECONDS + COMPILE_SECONDS_PER_LAYER * layers


class _Candidates:
    """Steps of several configurations on one batch; each has a copy of the model."""

    def __init__(self, model: nn.Module, recipe: Recipe, batch: tuple[Tensor, Tensor]) -> None:
        self.model, self.recipe, self.batch = model, recipe, batch
        self.steps: dict[StepConfig, Callable[[], None]] = {}
        self.loss: float | None = None  # of the first candidate, after its warm-up

    def add(self, candidate: StepConfig) -> None:
        """Prepare a candidate and run a few steps; one that fails or computes another loss is left out."""
        metrics = EpochMetrics()
        try:
            trainer = make_trainer(copy.deepcopy(self.model), self.recipe, candidate)

            def run_step() -> None:
                step(trainer, *self.batch, self.recipe.lr_at(1 / 100), metrics)

            for _ in range(3):
                run_step()
        except Exception as error:  # compilers fail in many ways, and none of them may end the run
            if not candidate.compile:
                raise
            logger.warning("torch.compile fails (%s); the run continues without", str(error).strip().split("\n")[0])
            return
        if self.loss is None:
            self.loss = metrics.mean_loss
        if abs(metrics.mean_loss - self.loss) > TOLERANCE * abs(self.loss):
            logger.warning("%s: the loss is %g, expected %g; not used", candidate.name, metrics.mean_loss, self.loss)
            return
        self.steps[candidate] = run_step

    def measure(self, rounds: int = 9) -> dict[StepConfig, float]:
        """Images per second of each candidate. Rounds are interleaved, so that other work slows all of them alike.

        On one thread these are seconds of CPU time, which the runs beside this one influence less.
        """
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        seconds: dict[StepConfig, list[float]] = {candidate: [] for candidate in self.steps}
        for _ in range(rounds):
            for candidate, run_step in self.steps.items():
                start = clock()
                run_step()
                seconds[candidate].append(clock() - start)
        return {candidate: len(self.batch[1]) / statistics.median(times) for candidate, times in seconds.items()}


def resume_or_choose(path: Path | None, resumed: bool, choose: Callable[[], StepChoice]) -> StepChoice:
    """The choice stored at ``path``, or else a new one, stored there.

    A run that is ``resumed`` keeps its choice: one without a file started before there was a choice.
    """
    if path is not None and path.exists():
        try:
            return msgspec.json.decode(path.read_bytes(), type=StepChoice)
        except msgspec.MsgspecError as error:
            if resumed:
                reason = printable(str(error))
                message = f"{path} is damaged ({reason}); remove it and the checkpoint beside it to start the run again"
                raise ValueError(message) from error
    elif resumed:
        return StepChoice(StepConfig(threads=torch.get_num_threads()))
    choice = choose()
    if path is not None:
        choice.save(path)
    return choice


def without_failing_compiler(choice: StepChoice, model: nn.Module, recipe: Recipe, batches: Batches) -> StepChoice:
    """The same choice, or without torch.compile if that fails here: a compiler may be gone since the choice."""
    if not choice.step.compile:
        return choice
    torch.compiler.reset()
    with preserved_random_state(), closing(batches.epoch(0)) as epoch:
        candidates = _Candidates(model, recipe, next(epoch))
        candidates.add(choice.step)
    torch.compiler.reset()
    return choice if candidates.steps else replace(choice, step=replace(choice.step, compile=False, matmul_convs=()))
