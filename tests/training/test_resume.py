"""Runs that are stopped and resumed end as the undisturbed ones."""

import dataclasses
import json
import os
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from helpers.images import make_colored_folders
from helpers.points import Points
from helpers.processes import command_line, start, wait
from helpers.runs import RECIPE, SMALL
from safetensors.torch import load_file
from torch import Tensor, nn

from deepsquare.nn import SquareSoftmin
from deepsquare.results import Store
from deepsquare.training import StoppedError, Trainer, TrainerConfig, fit
from deepsquare.training.loop import EpochMetrics


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colored_folders(tmp_path_factory.mktemp("data"))


def network() -> nn.Module:
    torch.manual_seed(1)
    softmin = SquareSoftmin()
    with torch.no_grad():
        softmin.root_scale.fill_(-0.5)  # type: ignore[union-attr]  # where s leads when its root crosses zero
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3), softmin)


PLAIN = dataclasses.replace(RECIPE, lr=0.4, warmup=0.0)
CONFIGS = {
    "plain": TrainerConfig(),
    "ema": TrainerConfig(ema=0.7),
    "micro": TrainerConfig(micro_batch_size=4),
    "bfloat16": TrainerConfig(precision="bfloat16"),
}


def weights(trainer: Trainer) -> list[Tensor]:
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    return tensors + ([] if trainer.ema is None else [*trainer.ema.parameters(), *trainer.ema.buffers()])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_run_stopped_at_any_step_ends_bit_for_bit_the_same(config: TrainerConfig, tmp_path: Path) -> None:
    data, signs = Points(48, 12, classes=3, distance=1.0), []
    whole = Trainer(network(), PLAIN, config)

    def on_step(epoch: int, epoch_metrics: EpochMetrics, lr: float) -> None:
        signs.append(bool(whole.model[5].root_scale > 0))  # type: ignore[index]

    torch.manual_seed(7)
    expected = fit(whole, data, PLAIN, data.evaluation, on_step=on_step)
    for stopped_at in range(1, 8):
        path, taken, part = tmp_path / f"{stopped_at}.pt", iter(range(1, 100)), Trainer(network(), PLAIN, config)
        torch.manual_seed(7)
        with pytest.raises(StoppedError):
            fit(
                part, data, PLAIN, data.evaluation, checkpoint=path,
                stop=lambda taken=taken, at=stopped_at: next(taken) == at,  # type: ignore[misc]
            )  # fmt: skip
        again = Trainer(network(), PLAIN, config)
        torch.manual_seed(99)
        history = fit(again, data, PLAIN, data.evaluation, checkpoint=path)
        assert all(map(torch.equal, weights(again), weights(whole)))
        assert history.accuracy == expected.accuracy
        assert history.train_loss == expected.train_loss
        assert history.ema == expected.ema
    assert not any(signs), "√s stays negative, which state_dict does not show"


def test_micro_batches_have_the_gradient_of_the_batch() -> None:
    data = Points(48, 12, classes=3, distance=1.0)
    model = nn.Linear(2, 3)
    gradients = []
    for micro_batch_size in (None, 4, 3, 12):
        trainer = Trainer(model, PLAIN, TrainerConfig(micro_batch_size=micro_batch_size))
        trainer.forward_backward(*next(data.epoch(0)))
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_a_training_state_of_version_2_is_resumed(tmp_path: Path) -> None:
    data, config = Points(48, 12, classes=3, distance=1.0), TrainerConfig(ema=0.7)
    path, steps = tmp_path / "last.pt", iter(range(1, 100))
    whole, part, resumed = (Trainer(network(), PLAIN, config) for _ in range(3))
    torch.manual_seed(7)
    expected = fit(whole, data, PLAIN, data.evaluation)
    torch.manual_seed(7)
    with pytest.raises(StoppedError):
        fit(part, data, PLAIN, data.evaluation, checkpoint=path, stop=lambda: next(steps) == 6)
    state = torch.load(path, weights_only=True)
    old_names = {"batch_size": "batch", "lr": "rate", "optimizer": "optimiser", "ema": "average"}
    progress = {"tally": state["progress"].pop("epoch_metrics"), "losing": state["progress"].pop("bad_epochs")}
    progress["tally"]["right"] = progress["tally"].pop("correct")
    state["progress"] |= progress
    del state["progress"]["history"]["correct"]  # came later
    state["recipe"] = {
        old_names.get(key, key) if key != "ema" else key: value for key, value in state["recipe"].items()
    }
    torch.save({**{old_names.get(key, key): value for key, value in state.items()}, "version": 2}, path)
    assert {"optimiser", "average"} < torch.load(path, weights_only=True).keys()
    history = fit(resumed, data, PLAIN, data.evaluation, checkpoint=path)
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    assert (history.accuracy, history.train_loss, history.ema) == (
        expected.accuracy, expected.train_loss, expected.ema,
    )  # fmt: skip


def train_in(data: Path, output: Path, *more: str) -> BaseProcess:
    command = ["train", "shufflenet_v2_x0_5+pooling", "--data", str(data), "--output", str(output)]
    command += ["--epochs", "5", "--batch-size", "12", "--lr", "0.002", "--checkpoint-minutes", "0"]
    command += [*SMALL, *more, "--results", str(output.parent)]
    return start(command_line, command, stderr=output.with_suffix(".err"))


def wait_for(path: Path, process: BaseProcess) -> None:
    end = time.monotonic() + 120
    while not path.exists() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.02)
    assert path.exists()


def stop(process: BaseProcess, path: Path, signal_number: int) -> int | None:
    """Send a signal, as a terminal does to all of its processes, when the next checkpoint is written."""
    first = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == first and process.is_alive():
        time.sleep(0.02)
    assert process.pid is not None
    os.killpg(process.pid, signal_number)
    return wait(process)


@pytest.mark.slow
def test_a_killed_a_terminated_and_an_interrupted_run_end_as_the_undisturbed_one(data: Path, tmp_path: Path) -> None:
    errors = tmp_path / "run.err"
    whole = train_in(data, tmp_path / "whole")
    assert wait(whole) == 0, (tmp_path / "whole.err").read_text()
    run = tmp_path / "run"
    killed = train_in(data, run)
    wait_for(run / "last.pt", killed)
    killed.kill()
    wait(killed)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        errors.write_text("")
        stopped = train_in(data, run, "--resume", "--workers", "2")
        assert stop(stopped, run / "last.pt", number) == code, errors.read_text()
        assert re.search(r"stopped after .*; the same command with --resume continues", errors.read_text())
        assert "Traceback" not in errors.read_text()
    assert wait(train_in(data, run, "--resume")) == 0, errors.read_text()
    ours, expected = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "whole"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.items())
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 6))
    (row,) = Store(tmp_path / "imagenet.jsonl").rows()  # the second run is the same run
    assert row.experiment == data.resolve().name
    assert row.metrics["accuracy"] == lines[-1]["accuracy"]
