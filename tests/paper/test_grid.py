"""The grid: killed at any point, shared by two, interrupted, or on Ray, it ends with the same rows."""

import contextlib
import importlib.util
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers import toy_grid
from helpers.processes import start, wait
from helpers.toy_grid import RUNS, Toy

from deepsquare.models import create_model
from deepsquare.paper.cifar10 import experiment as cifar10
from deepsquare.paper.experiments import EXPERIMENTS
from deepsquare.paper.grid import backend, runner
from deepsquare.paper.grid.backend import Workers
from deepsquare.paper.grid.progress import Progress
from deepsquare.paper.grid.runner import InMemoryTraining, Task, TrainingRun, checkpoint_of, run_grid
from deepsquare.paper.options import OutputFolders
from deepsquare.paper.tables import TABLE_2, TABLE_3
from deepsquare.results import Row, Store
from deepsquare.surgery import equip_record
from deepsquare.training import Recipe
from deepsquare.training.step_config import StepChoice, StepConfig

PAUSE = 0.3  # seconds after every epoch, so that there is time to stop it


def silent(key: str, metrics: Any) -> None:
    pass


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The metrics of each run when nothing interrupts it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [InMemoryTraining(Toy())(run, None, silent) for run in RUNS]
    torch.set_num_threads(threads)
    return {row.key: outcome(row) for row in rows}


def outcome(row: Row) -> dict[str, Any]:
    """The metrics without those that measure time."""
    return {name: value for name, value in row.metrics.items() if name not in ("cpu_seconds", "step")}


def stored(store: Path) -> dict[str, Any]:
    rows = Store(store).rows()
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: outcome(row) for row in rows}


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


@pytest.mark.slow
def test_a_grid_killed_several_times_ends_with_the_rows_of_an_uninterrupted_one(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    store, errors, rng = tmp_path / "rows.jsonl", tmp_path / "stderr", random.Random(0)
    checkpoints = tmp_path / ".runs"
    for _ in range(2):
        grid = start(toy_grid.run, store, PAUSE, stderr=errors)
        until(lambda: list(checkpoints.glob("*.pt")))
        time.sleep(rng.uniform(0, 1.5))
        grid.kill()  # SIGKILL: the grid cannot stop its processes
        time.sleep(2.5)  # its processes exit by themselves
        later = {path.name: path.stat().st_mtime_ns for path in checkpoints.glob("*.pt")}
        time.sleep(1)
        assert later == {path.name: path.stat().st_mtime_ns for path in checkpoints.glob("*.pt")}, "still running"
    assert len(stored(store)) < len(RUNS)
    for path in checkpoints.glob("*.pt"):  # as a kill in the middle of a write leaves it
        path.with_name(f".{path.name}.{'0' * 32}").mkdir()
    assert wait(start(toy_grid.run, store, stderr=errors)) == 0, errors.read_text()
    assert f"{len(RUNS)} of {len(RUNS)}" in errors.read_text()
    assert stored(store) == expected
    assert list(checkpoints.glob("*")) == []


@pytest.mark.slow
def test_two_grids_share_the_runs(tmp_path: Path, expected: dict[str, Any]) -> None:
    store, errors = tmp_path / "rows.jsonl", tmp_path / "stderr"
    grids = [start(toy_grid.run, store, PAUSE, stderr=errors) for _ in range(2)]
    assert [wait(grid) for grid in grids] == [0, 0], errors.read_text()
    assert stored(store) == expected
    assert sum("%" in line for line in errors.read_text().splitlines()) == len(RUNS)  # none of them twice


@pytest.mark.slow
def test_ctrl_c_says_how_to_resume(tmp_path: Path) -> None:
    store, errors = tmp_path / "rows.jsonl", tmp_path / "stderr"
    grid = start(toy_grid.run, store, PAUSE, stderr=errors)
    until(lambda: list((tmp_path / ".runs").glob("*.pt")))
    assert grid.pid is not None
    os.killpg(grid.pid, signal.SIGINT)  # as a terminal does
    assert wait(grid) != 0
    assert f"of {len(RUNS)} runs left; the same command resumes from the last epochs" in errors.read_text()


def test_ctrl_c_while_a_condition_takes_back_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        with contextlib.ExitStack() as lock:
            lock.callback(threading.Lock().release)  # which fails, as that of a condition then does
            raise KeyboardInterrupt

    monkeypatch.setattr(backend, "wait", interrupted)
    waiting: Future[Row | None] = Future()
    processes = backend.Backend(1, queue.SimpleQueue(), lambda task: waiting, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        list(processes.results({"run": lambda _: None}, silent))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.slow
def test_on_a_real_ray_cluster(tmp_path: Path, expected: dict[str, Any]) -> None:
    store, errors = tmp_path / "rows.jsonl", tmp_path / "stderr"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}  # Ray's workers import the helpers of the tests
    grid = start(toy_grid.run, store, 0.0, "local", environment=environment, stderr=errors)
    assert wait(grid) == 0, errors.read_text()
    assert stored(store) == expected


def test_a_stored_run_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path / "rows.jsonl")
    run = RUNS[0]
    store.append(Row(run.experiment, run.row, run.seed, run.to_recipe(), {"accuracy": 0.5}, 1.0))
    run_grid([run], InMemoryTraining(Toy()), store)
    assert "all 1 runs are in" in capsys.readouterr().err
    assert Task(run, InMemoryTraining(Toy()), store.path)(silent) is None  # nor by a worker that was started earlier


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="processes is 0; expected at least 1"):
        Workers(processes=0).start(1)
    with pytest.raises(
        ValueError, match="--processes and --low-priority are for local processes; remove them, or --ray"
    ):
        Workers(ray="local", low_priority=True).start(1)
    with pytest.raises(ValueError, match="no row is called DeepSquare9; the rows are Original, DeepSquare1"):
        EXPERIMENTS["table2"](rows=("DeepSquare9",), output=OutputFolders(tmp_path))
    with pytest.raises(ValueError, match="seeds is 0; expected at least 1"):
        EXPERIMENTS["table2"](seeds=0, output=OutputFolders(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_nothing_listens_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no Ray cluster at '127\.0\.0\.1:9' .*; start one with 'ray start --head'"):
        run_grid(RUNS, InMemoryTraining(Toy()), Store(tmp_path / "rows.jsonl"), Workers(ray="127.0.0.1:9"))


def test_a_damaged_checkpoint_fails_its_run_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    damaged = checkpoint_of(RUNS[0], store.path)
    damaged.parent.mkdir()
    damaged.write_bytes(b"nonsense")
    with pytest.raises(OSError, match=r"1 of 2 runs failed:\nOriginal, toy, seed 0: .* is not a training checkpoint"):
        run_grid(RUNS[:2], InMemoryTraining(Toy()), store, Workers(processes=1))
    assert [row.row for row in store.rows()] == [RUNS[1].row]


@pytest.mark.parametrize(
    ("hours", "left"),
    [({}, ", about 0:04:00 left"), ({0: 1.0, 1: 10.0}, ", about 0:16:48 left (0.6 core-hours)")],
)
def test_the_time_that_is_left(hours: dict[int, float], left: str) -> None:
    runs = [replace(RUNS[0], seed=seed, recipe=Recipe(epochs=8 * (seed + 1))) for seed in (0, 1)]
    progress = Progress(2, 0, {runs[seed].key: value for seed, value in hours.items()})
    with progress.live(runs, workers=2):
        assert progress._left() == ""
        progress.update(runs[0].key, {"epochs": 1, "seconds": 100.0, "accuracy": 0.1})  # may have been resumed
        assert progress._left() == ""
        progress.update(runs[0].key, {"epochs": 4, "seconds": 172.0, "accuracy": 0.1})  # 3 epochs in 72 seconds
        progress.update("of a run that is over", {"epochs": 4, "seconds": 1.0, "accuracy": 0.1})
        assert progress._left() == left  # 4 epochs of the short run and 16 of the long one, on two workers


def test_another_seed_reuses_the_choice_made_on_this_machine(tmp_path: Path) -> None:
    store, run = Store(tmp_path / "rows.jsonl"), RUNS[0]
    choice = StepChoice(StepConfig(channels_last=False), {"eager, contiguous": 1.0})

    def train(run: TrainingRun, checkpoint: Path, on_progress: Any) -> Row:
        path = checkpoint.with_suffix(".json")
        chosen.append(path.read_text() if path.exists() else None)
        return Row(run.experiment, run.row, run.seed, run.to_recipe(), {"step": choice.metrics()}, 1.0)

    chosen: list[str | None] = []
    for seed in (10, 11):
        Task(replace(run, seed=seed), train, store.path)(silent)
    assert chosen[0] is None
    assert chosen[1] is not None
    assert msgspec.json.decode(chosen[1], type=StepChoice) == choice
    other = replace(run, recipe=replace(run.recipe, lr=0.01), seed=12)  # another recipe
    Task(other, train, store.path)(silent)
    rows = [msgspec.structs.replace(row, hardware="another machine") for row in store.rows()]
    store.path.write_bytes(b"".join(row.to_json() for row in rows))
    Task(replace(run, seed=13), train, store.path)(silent)
    assert chosen[2:] == [None, None]


class StopError(Exception):
    pass


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what torch.compile imports
@pytest.mark.slow
def test_a_resumed_run_keeps_its_compiled_step_and_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is that of a run without a choice."""
    choice, run = StepChoice(StepConfig(compile=True, matmul_convs=("layer3.conv",)), {"eager": 1.0}), RUNS[0]
    monkeypatch.setattr(runner, "choose_step", lambda *_: choice)
    uninterrupted = InMemoryTraining(Toy())(run, None, silent)
    checkpoint = tmp_path / "run.pt"

    def stop(key: str, metrics: Any) -> None:
        if metrics["epochs"] == 3:
            raise StopError

    with pytest.raises(StopError):
        InMemoryTraining(Toy())(run, checkpoint, stop)
    monkeypatch.setattr(runner, "choose_step", lambda *_: pytest.fail("the stored choice is reused"))
    resumed = InMemoryTraining(Toy())(run, checkpoint, silent)
    assert outcome(resumed) == outcome(uninterrupted)
    assert resumed.key == uninterrupted.key == run.key
    assert resumed.metrics["step"] == uninterrupted.metrics["step"] == choice.metrics()
    assert resumed.metrics["step"]["compile"]
    assert resumed.metrics["cpu_seconds"] > 0


def test_the_choice_is_removed_with_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(RUNS[0], tmp_path / "rows.jsonl")
    checkpoint.parent.mkdir()
    for suffix in (".pt", ".json", ".lock"):
        checkpoint.with_suffix(suffix).touch()
        checkpoint.with_name(f".{checkpoint.with_suffix(suffix).name}.{'0' * 32}").mkdir()
    runner.remove_checkpoint(RUNS[0], tmp_path / "rows.jsonl")
    assert list(checkpoint.parent.iterdir()) == []


def test_a_diverged_run_is_a_row() -> None:
    recipe = Recipe(epochs=6, batch_size=16, lr=1e4, warmup=0)
    row = InMemoryTraining(Toy())(TrainingRun("toy", "Original", 0, "vanilla_cnn", "", "toy", recipe), None, silent)
    assert "try a lower lr" in row.metrics["diverged"]
    assert len(row.metrics["train_loss"]) < 6


def test_the_tables_name_17_models_that_can_be_built() -> None:
    models = {run.row: run.spec for run in cifar10.table_runs([TABLE_2, TABLE_3], "short", 1)}
    assert len(models) == len(set(models.values())) == 17
    for rows in ((), ("Square-Pooling",)):  # not a second run with the label of Table 3
        (run,) = (run for run in cifar10.table_runs([TABLE_3], "short", 1, rows) if run.spec == "pooling")
        assert run.row == "DeepSquare3"
    for spec in models.values():
        model = create_model("vanilla_cnn", spec)
        assert (equip_record(model) is None) == (spec == "")
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
