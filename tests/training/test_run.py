"""``deepsquare train`` and ``eval``: recipes as the paper has them, runs that survive, clear words for mistakes."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.colored import make_images
from safetensors.torch import load_file
from torch import Tensor, nn

from deepsquare.checkpoint import load, read_preprocessing, save
from deepsquare.nn import SquareSoftmin
from deepsquare.results import Store
from deepsquare.training import Engine, ImageNetRecipe, StoppedError, Trainer, fit
from deepsquare.training.image_folder import Loading
from deepsquare.training.loop import EpochMetrics
from deepsquare.training.run import Settings, train

RECIPE = ImageNetRecipe(
    epochs=2, batch_size=12, lr=0.02, warmup=1.0, model="shufflenet_v2_x0_5", spec="pooling", dropout=0.2,
    size=32, eval_size=32, eval_resize=36, ema=0.9,
)  # fmt: skip
RESULTS = Path(__file__).parents[2] / "results"
SETTINGS = Settings(loading=Loading(pipeline="torchvision"))
SMALL = ["--size", "32", "--eval-size", "32", "--eval-resize", "36", "--pipeline", "torchvision", "--device", "cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"))


# ---- runs that go on ----


class Points:
    """Points in the plane, as batches."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(48) % 3
        self.points = torch.randn(48, 2, generator=generator) + self.labels[:, None]

    def __len__(self) -> int:
        return 4

    def epoch(self, number: int, start: int = 0) -> Any:
        order = torch.randperm(48, generator=torch.Generator().manual_seed(number))
        for index in order.view(4, 12)[start:]:
            yield self.points[index], self.labels[index]

    def evaluation(self) -> Any:
        yield self.points, self.labels


def network() -> nn.Module:
    torch.manual_seed(1)
    softmin = SquareSoftmin()
    with torch.no_grad():
        softmin.root_scale.fill_(-0.5)  # type: ignore[union-attr]  # where s leads when its root crosses zero
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3), softmin)


PLAIN = dataclasses.replace(RECIPE, lr=0.4, warmup=0.0)
ENGINES = {
    "plain": Engine(),
    "ema": Engine(ema=0.7),
    "micro": Engine(micro_batch_size=4),
    "bfloat16": Engine(precision="bfloat16"),
}


def weights(trainer: Trainer) -> list[Tensor]:
    found = [*trainer.model.parameters(), *trainer.model.buffers()]
    return found + ([] if trainer.ema is None else [*trainer.ema.parameters(), *trainer.ema.buffers()])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_run_stopped_at_any_step_ends_bit_for_bit_alike(engine: Engine, tmp_path: Path) -> None:
    data, signs = Points(), []
    whole = Trainer(network(), PLAIN, engine)

    def on_step(epoch: int, epoch_metrics: EpochMetrics, lr: float) -> None:
        signs.append(bool(whole.model[5].root_scale > 0))  # type: ignore[index]

    torch.manual_seed(7)
    expected = fit(whole, data, PLAIN, data.evaluation, on_step=on_step)
    for stopped_at in range(1, 8):
        place, taken, part = tmp_path / f"{stopped_at}.pt", iter(range(1, 100)), Trainer(network(), PLAIN, engine)
        torch.manual_seed(7)
        with pytest.raises(StoppedError):
            fit(
                part, data, PLAIN, data.evaluation, checkpoint=place,
                stop=lambda taken=taken, at=stopped_at: next(taken) == at,  # type: ignore[misc]
            )  # fmt: skip
        again = Trainer(network(), PLAIN, engine)
        torch.manual_seed(99)
        history = fit(again, data, PLAIN, data.evaluation, checkpoint=place)
        assert all(map(torch.equal, weights(again), weights(whole)))
        assert history.accuracy == expected.accuracy
        assert history.train_loss == expected.train_loss
        assert history.ema == expected.ema
    assert not any(signs), "√s stays negative, which state_dict does not show"


def test_a_batch_in_several_goes_has_the_same_gradient() -> None:
    data = Points()
    model = nn.Linear(2, 3)
    found = []
    for micro_batch_size in (None, 4, 3, 12):
        trainer = Trainer(model, PLAIN, Engine(micro_batch_size=micro_batch_size))
        trainer.forward_backward(*next(data.epoch(0)))
        assert model.weight.grad is not None
        found.append(model.weight.grad.clone())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def run_in(data: Path, output: Path, *more: str, epochs: int = 8) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deepsquare", "train", "shufflenet_v2_x0_5+pooling", "--data", str(data)]
    command += [*f"--epochs {epochs} --batch-size 12 --lr 0.002 --minutes 0".split(), "--output", str(output)]
    command += [*SMALL, *more, "--results", str(output.parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def wait_for(place: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not place.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert place.exists(), process.communicate()[1]


def stop(process: subprocess.Popen[str], place: Path, signal_number: int) -> str:
    """Send a signal, as a terminal does to all of its processes, when the next checkpoint is written."""
    first = place.stat().st_mtime_ns
    while place.stat().st_mtime_ns == first and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal_number)
    return process.communicate(timeout=120)[1]


def test_a_killed_a_terminated_and_an_interrupted_run_end_as_the_undisturbed_one(data: Path, tmp_path: Path) -> None:
    whole = run_in(data, tmp_path / "whole")
    said = whole.communicate(timeout=240)[1]
    assert whole.returncode == 0, said
    run = tmp_path / "run"
    killed = run_in(data, run)
    wait_for(run / "last.pt", killed)
    killed.kill()
    killed.communicate()
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        stopped = run_in(data, run, "--resume", "--workers", "2")
        said = stop(stopped, run / "last.pt", number)
        assert stopped.returncode == code, said
        assert re.search(r"stopped after .*; the same command with --resume goes on", said)
        assert "Traceback" not in said
    last = run_in(data, run, "--resume")
    said = last.communicate(timeout=240)[1]
    assert last.returncode == 0, said
    ours, expected = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "whole"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.items())
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    (row,) = Store(tmp_path / "imagenet.jsonl").rows()  # the second run is the same run
    assert row.experiment == data.resolve().name
    assert row.metrics["accuracy"] == lines[-1]["accuracy"]


# ---- the commands ----


def test_train_and_eval_from_the_command_line(
    data: Path, tmp_path: Path, deepsquare: Callable[..., tuple[int, str]]
) -> None:
    changes = tmp_path / "changes.toml"
    changes.write_text('epochs = 4\nbatch_size = 24  # lr follows\nema = 0.5\nprecision = "bfloat16"\n')
    run, results = tmp_path / "run", tmp_path / "results"
    given = ["train", "shufflenet_v2_x0_5", "--data", data, "--output", run, "--results", results, "--file", changes]
    code, said = deepsquare(*given, "--micro-batch-size", "6", "--tensorboard", *SMALL)
    assert code == 0, said
    assert "0.4 for 1024 is 0.009375 for 24" in said
    assert re.search(r"epoch 4/4: train loss .*, top-1 .*%, top-5 100.00%, averaged weights", said)
    assert (run / "ema.safetensors").exists()
    assert list((run / "tensorboard").iterdir())
    (row,) = Store(results / "imagenet.jsonl").rows()
    assert row.recipe["batch_size"] == 24
    assert row.recipe["lr"] == pytest.approx(0.009375)
    assert (row.recipe["ema"], row.recipe["micro_batch_size"]) == (0.5, 6)
    code, said = deepsquare("eval", run, "--data", data, "--json", *SMALL[-4:])
    assert code == 0, said
    found = json.loads(said)
    assert (found["images"], found["size"], found["resize"]) == (21, 32, 36)  # as it was trained
    model, shown = load(run / "model.safetensors"), read_preprocessing(run / "model.safetensors")
    assert shown is not None
    save(model.double(), tmp_path / "odd.safetensors", dataclasses.replace(shown, mean=(0.0, 0.0, 0.0)))
    code, said = deepsquare("eval", tmp_path / "odd.safetensors", "--data", data, "--json", *SMALL[-4:])
    assert code == 0, said
    assert json.loads(said)["loss"] != pytest.approx(found["loss"])  # other images, by what it says
    save(model, tmp_path / "odd.safetensors", dataclasses.replace(shown, classes=shown.classes[::-1]))
    code, said = deepsquare("eval", tmp_path / "odd.safetensors", "--data", data)
    assert code == 2
    assert "it has red where the data have blue; expected the data that it was trained for" in said
    code, said = deepsquare("eval", run / "last.pt", "--data", data)
    assert code == 2
    assert "last.pt is no model; expected" in said
    assert found["accuracy"] == pytest.approx(row.metrics["accuracy"], abs=1 / 21 + 1e-6)  # trained in bfloat16

    code, said = deepsquare(*given, *SMALL)
    assert code == 2
    assert "holds a run already; go on with it by --resume, or give another --output" in said
    code, said = deepsquare(*given, "--resume", "--seed", "4", *SMALL)
    assert code == 2
    assert "holds another run: seed was 0, is 4" in said
    make_images(other := tmp_path / "other")
    next((other / "train").rglob("*.jpg")).unlink()
    given[given.index(data)] = other
    code, said = deepsquare(*given, "--resume", *SMALL)
    assert code == 2
    assert "holds another run: images was 48, is 47" in said


def test_flags_are_read_in_every_form_and_order(
    tmp_path: Path, deepsquare: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_images(tmp_path / "lr")  # a folder that is called as a field is
    (tmp_path / "changes.toml").write_text("momentum = 0.8\n")
    monkeypatch.chdir(tmp_path)
    given = ["--data", "lr", "shufflenet_v2_x0_5+pooling", "--file=changes.toml", "--epochs=9", "--epochs", "1"]
    code, said = deepsquare("train", *given, "--batch_size=12", "--output", "run", "--results", "results", *SMALL)
    assert code == 0, said
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (described["model"], described["spec"]) == ("shufflenet_v2_x0_5", "pooling")
    assert (described["epochs"], described["momentum"]) == (1, 0.8)
    assert described["lr"] == pytest.approx(0.4 * 12 / 1024)


def test_a_refusal_is_not_a_restart(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(RECIPE, epochs=1, warmup=0.0, ema=None)
    train("run", recipe, data, tmp_path / "run", settings=SETTINGS, results=tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of another job")
    with pytest.raises(ValueError, match="holds a run already; go on with it by --resume"):
        train("run", recipe, data, tmp_path / "run", settings=SETTINGS, results=tmp_path)


def test_a_first_step_that_is_skipped_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    for _ in range(3):  # memory that is used again
        torch.full((64, 64), 1e30)
    trainer = Trainer(nn.Linear(64, 64), RECIPE, Engine(precision="float16"))
    for huge in (True, False):
        images = torch.full((12, 64), 6e4 if huge else 1.0)
        trainer.forward_backward(images, torch.zeros(12, dtype=torch.int64))
        trainer.optimizer_step(0.01)
    momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    assert len(momenta) == 2
    for momentum in momenta:
        assert momentum.abs().max() < 10


def test_the_recipes_are_listed(deepsquare: Callable[..., tuple[int, str]]) -> None:
    code, said = deepsquare("train")
    assert code == 0
    assert "resnet18+softmin@200" in said
    assert "78.14" in said
    code, said = deepsquare("train", "resnet50+pooling", "--help")
    assert "--weight-decay" in said
    assert "0.0001" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet19"], "there is no recipe 'resnet19'; choose from resnet18, "),
        (["resnet18"], "no data is named; give the folder that holds train and val: --data DIR"),
        (["resnet18", "--data", "DATA", "--batch-size", "10000"], "the batch is 10000, but there are 48 images"),
        (
            ["resnet18", "--data", "DATA", "--batch-size", "12", "--micro-batch-size", "5"],
            "micro_batch_size is 5; expected a divisor of the 12",
        ),
        (["resnet18", "--data", "DATA", "--warmup", "500"], "warmup is 500.0; expected between 0 and the 120 epochs"),
        (["resnet18", "--data", "NOWHERE", "--batch-size", "12"], "NOWHERE"),
        (
            ["resnet18", "--data", "DATA", "--batch-size", "12", "--device", "gpu"],
            "the device is 'gpu'; expected cpu or cuda",
        ),
        (["resnet18", "--data", "DATA", "--batch-size", "12", "--seed", "-1"], "seed is -1; expected 0 or more"),
        (["resnet18", "--data", "DATA", "--batch-size", "12", "--workers", "-1"], "workers is -1; expected 0 or more"),
        (["resnet18", "--data", "DATA", "--batch-size", "12", "--damaged", "2"], "damaged is 2; expected a share"),
        (["resnet18", "--data", "DATA", "--batch-size", "12", "--sync-bn"], "sync_bn is for GPUs"),
        (["--start", "resnet18", "resnet50"], "the first name of a recipe is not resnet50; give it first"),
        (["resnet18", "--data", "DATA", "--file", "no.toml"], "no file no.toml"),
        (
            ["resnet18", "--data", "DATA", "--batch-size", "12", "--start", "no.safetensors"],
            "no checkpoint at no.safetensors",
        ),
    ],
)
def test_mistakes_are_told_before_the_hours_are_spent(
    arguments: list[str], message: str, data: Path, tmp_path: Path, deepsquare: Callable[..., tuple[int, str]]
) -> None:
    placed = [str(data) if value == "DATA" else value for value in arguments]
    code, said = deepsquare("train", *placed, "--output", tmp_path / "run", "--pipeline", "torchvision")
    assert code == 2
    assert message in " ".join(said.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ('lr = "0.1"', "lr is '0.1'; expected a number"),
        ("lr = true", "lr is True; expected a number"),
        ("batch_size = 1.5", "batch_size is 1.5; expected a whole number"),
        ("crop_area = [0.1]", "crop_area is (0.1,); expected 2 numbers"),
        ("crop_area = 0.5", "crop_area is 0.5; expected 2 numbers"),
        ("start = 3", "start is 3; expected text or nothing"),
        ('precision = "float8"', "precision is 'float8'; expected one of float32, bfloat16, float16"),
        (
            "micro_batch_size = 8",
            "--micro-batch-size is how a run is done, not part of a recipe; give it on the command line",
        ),
        ("lrs = 1", "a recipe has no field lrs"),
    ],
)
def test_a_wrong_value_in_a_file_is_named_with_the_file(
    changes: str, message: str, tmp_path: Path, deepsquare: Callable[..., tuple[int, str]]
) -> None:
    (place := tmp_path / "changes.toml").write_text(changes)
    code, said = deepsquare("train", "resnet18", "--file", place)
    assert code == 2
    assert f"{place}: {message}" in said


def test_weights_of_a_base_network_are_continued(data: Path, tmp_path: Path) -> None:
    base = dataclasses.replace(RECIPE, spec="", dropout=None, epochs=3, ema=None)
    train("base", base, data, tmp_path / "base", settings=SETTINGS, results=tmp_path)
    start = str(tmp_path / "base" / "model.safetensors")
    tuned = dataclasses.replace(base, spec="pooling", start=start, lr=1e-9)
    history = train("tuned", tuned, data, tmp_path / "tuned", settings=SETTINGS, results=tmp_path)
    assert history.epochs == 3
    other = dataclasses.replace(tuned, model="resnet18")
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit"):
        train("other", other, data, tmp_path / "other", settings=SETTINGS, results=tmp_path)


def test_damaged_images_are_named_and_too_many_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = make_images(tmp_path / "data")
    for number in range(3):
        (data / "train" / "red" / f"{number}.jpg").write_bytes(b"no image")
    recipe = dataclasses.replace(RECIPE, epochs=3, ema=None)
    few = Settings(loading=Loading("torchvision", damaged=0.01))
    with pytest.raises(ValueError, match=r"images cannot be read, such as .*allowed is a share of 0.01"):
        train("run", recipe, data, tmp_path / "few", settings=few, results=tmp_path)
    many = Settings(loading=Loading("torchvision", damaged=0.1))
    history = train("run", recipe, data, tmp_path / "many", settings=many, results=tmp_path)
    assert history.epochs == 3
    assert "0.jpg cannot be read and is left out" in caplog.text


def test_a_loss_that_is_lost_stops_with_what_to_try(data: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, lr=1e30, warmup=0.0, ema=None, epochs=4)
    with pytest.raises(ValueError, match=r"the loss is.*lower lr.*, in a new --output$"):
        train("run", recipe, data, tmp_path / "run", settings=SETTINGS, results=tmp_path)


def test_a_full_disk_is_told_at_the_start(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": 10**6})())
    with pytest.raises(OSError, match=r"has room for 1 MB; a run needs \d+ MB"):
        train("run", RECIPE, data, tmp_path / "run", settings=SETTINGS, results=tmp_path)
