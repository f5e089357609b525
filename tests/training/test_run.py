"""``deepsquare train`` and ``eval``, and clear messages for mistakes."""

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.images import make_colored_folders
from helpers.processes import command_line, start_ranks, wait
from helpers.runs import CONFIG, RECIPE, SMALL
from helpers.shell import Shell
from torch import nn

from deepsquare._files import exclusive
from deepsquare.checkpoint import load, read_header, save
from deepsquare.cost import Cost
from deepsquare.models import create_model
from deepsquare.results import Store
from deepsquare.training import LoaderConfig, Trainer, TrainerConfig
from deepsquare.training.run import setup_training, train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colored_folders(tmp_path_factory.mktemp("data"))


def test_train_and_eval_from_the_command_line(data: Path, tmp_path: Path, shell: Shell) -> None:
    changes = tmp_path / "changes.toml"
    changes.write_text('epochs = 4\nbatch_size = 24  # lr follows\nema = 0.5\nprecision = "bfloat16"\n')
    run, results = tmp_path / "run", tmp_path / "results"
    command: list[str | Path] = ["train", "shufflenet_v2_x0_5", "--data", data, "--output", run, "--results", results]
    command += ["--file", changes]
    code, output = shell(*command, "--micro-batch-size", "6", "--tensorboard", *SMALL)
    assert code == 0, output
    assert "0.4 for 1024 is 0.009375 for 24" in output
    assert re.search(r"epoch 4/4: train loss .*, top-1 .*%, top-5 100.00%, EMA", output)
    assert (run / "ema.safetensors").exists()
    assert list((run / "tensorboard").iterdir())
    (row,) = Store(results / "imagenet.jsonl").rows()
    assert row.recipe["batch_size"] == 24
    assert row.recipe["lr"] == pytest.approx(0.009375)
    assert (row.recipe["ema"], row.recipe["micro_batch_size"]) == (0.5, 6)
    code, output = shell("eval", run, "--data", data, "--json", *SMALL[-4:])
    assert code == 0, output
    metrics = json.loads(output)
    assert (metrics["images"], metrics["size"], metrics["resize"]) == (21, 32, 36)  # as it was trained
    _, output = shell("eval", run, "--data", data, "--json", "--size", "40", *SMALL[-4:])
    assert (json.loads(output)["size"], json.loads(output)["resize"]) == (40, 45)  # in the same ratio
    model, stored = load(run / "model.safetensors"), read_header(run / "model.safetensors").preprocessing
    assert stored is not None
    save(model.double(), tmp_path / "odd.safetensors", dataclasses.replace(stored, mean=(0.0, 0.0, 0.0)))
    code, output = shell("eval", tmp_path / "odd.safetensors", "--data", data, "--json", *SMALL[-4:])
    assert code == 0, output
    assert json.loads(output)["loss"] != pytest.approx(metrics["loss"])  # normalized by what the checkpoint says
    save(model, tmp_path / "odd.safetensors", dataclasses.replace(stored, class_names=stored.class_names[::-1]))
    code, output = shell("eval", tmp_path / "odd.safetensors", "--data", data)
    assert code == 2
    assert "red in the checkpoint is blue in the data; expected the data set that it was trained on" in output
    code, output = shell("eval", run / "last.pt", "--data", data)
    assert code == 2
    assert "last.pt is no model; expected" in output
    assert metrics["accuracy"] == pytest.approx(row.metrics["accuracy"], abs=1 / 21 + 1e-6)  # trained in bfloat16

    code, output = shell(*command, *SMALL)
    assert code == 2
    assert "already contains a run; continue it with --resume, or choose another --output" in output
    code, output = shell(*command, "--resume", "--seed", "4", *SMALL)
    assert code == 2
    assert "contains another run: seed was 0, is 4" in output
    make_colored_folders(other := tmp_path / "other")
    next((other / "train").rglob("*.jpg")).unlink()
    command[command.index(data)] = other
    code, output = shell(*command, "--resume", *SMALL)
    assert code == 2
    assert "contains another run: images was 48, is 47" in output


def test_flags_are_parsed_in_every_form_and_order(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_colored_folders(tmp_path / "lr")  # a folder that is called as a field is
    (tmp_path / "changes.toml").write_text("momentum = 0.8\nweight_decay = 0.1\nflip = true\nema = 0.5\n")
    monkeypatch.chdir(tmp_path)
    command = ["--data", "lr", "shufflenet_v2_x0_5+pooling", "--file=changes.toml", "--epochs=9", "--epochs", "1"]
    command += ["--weight-decay", "4e-5", "--no-flip", "--ema", "None", "--batch_size=12", "--results", "results"]
    code, output = shell("train", *command, "--output", "run", *SMALL)
    assert code == 0, output
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (described["model"], described["spec"]) == ("shufflenet_v2_x0_5", "pooling")
    assert (described["epochs"], described["momentum"]) == (1, 0.8)
    # The command line overrides the file, also by the recipe's own values.
    assert (described["weight_decay"], described["flip"], described["ema"]) == (4e-5, False, None)
    assert described["lr"] == pytest.approx(0.4 * 12 / 1024)


def test_a_refusal_is_not_a_restart(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(RECIPE, epochs=1, warmup=0.0)
    train("run", recipe, data, tmp_path / "run", config=CONFIG, results=tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of another job")
    with pytest.raises(ValueError, match="already contains a run; continue it with --resume"):
        train("run", recipe, data, tmp_path / "run", config=CONFIG, results=tmp_path)


def test_a_skipped_first_step_leaves_the_momentum_finite() -> None:
    torch.manual_seed(0)
    for _ in range(3):  # memory that is used again
        torch.full((64, 64), 1e30)
    trainer = Trainer(nn.Linear(64, 64), RECIPE, TrainerConfig(precision="float16"))
    for huge in (True, False):
        images = torch.full((12, 64), 6e4 if huge else 1.0)
        trainer.forward_backward(images, torch.zeros(12, dtype=torch.int64))
        trainer.optimizer_step(0.01)
    momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    assert len(momenta) == 2
    for momentum in momenta:
        assert momentum.abs().max() < 10


def test_the_recipes_are_listed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepsquare.paper.imagenet.hours.cost_of", lambda *_: Cost(1, 1, 1, 1))  # takes ten seconds
    code, output = shell("train")
    assert code == 0
    assert "resnet18+softmin@200" in output
    assert "78.14" in output
    code, output = shell("train", "resnet50+pooling", "--help")
    assert "--weight-decay" in output
    assert "0.0001" in output
    options = " ".join(output.replace("│", " ").split())
    assert "the model's default if None. (in most recipes: 0.2)" in options
    assert "Name of the base network. (by default that of the recipe)" in options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet19"], "no model named 'resnet19'; the nearest names are "),
        (["resnet18"], "--data is missing; give the folder that holds train and val"),
        (["resnet18", "--data", "DATA", "--batch-size", "10000"], "batch_size is 10000, but there are 48 images"),
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
        (["resnet18", "--data", "DATA", "--batch-size", "12", "--damaged", "2"], "damaged is 2.0; expected a share"),
        (["resnet18", "--data", "DATA", "--batch-size", "12", "--sync-bn"], "sync_bn needs GPUs"),
        (["--pretrained", "resnet18", "resnet19"], "no model named 'resnet19'"),
        (["resnet18", "--data", "DATA", "--file", "no.toml"], "no file no.toml"),
        (
            ["resnet18", "--data", "DATA", "--batch-size", "12", "--pretrained", "no.safetensors"],
            "no checkpoint at no.safetensors",
        ),
    ],
)
def test_mistakes_fail_early(arguments: list[str], message: str, data: Path, tmp_path: Path, shell: Shell) -> None:
    arguments = [str(data) if value == "DATA" else value for value in arguments]
    code, output = shell("train", *arguments, "--output", tmp_path / "run", "--pipeline", "torchvision")
    assert code == 2
    assert message in " ".join(output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ('lr = "0.1"', "lr is '0.1'; expected float"),
        ("lr = true", "lr is True; expected float"),
        ("batch_size = 1.5", "batch_size is 1.5; expected int"),
        ("crop_area = [0.1]", "crop_area is [0.1]; expected tuple[float, float]"),
        ("crop_area = 0.5", "crop_area is 0.5; expected tuple[float, float]"),
        ("pretrained = 3", "pretrained is 3; expected str | None"),
        ('precision = "float8"', "precision is 'float8'; expected Literal['float32', 'bfloat16', 'float16']"),
        ("micro_batch_size = 8", "--micro-batch-size is not part of a recipe; set it on the command line"),
        ("lrs = 1", "a recipe has no field lrs"),
    ],
)
def test_a_wrong_value_in_a_file_is_named_with_the_file(
    changes: str, message: str, tmp_path: Path, shell: Shell
) -> None:
    (path := tmp_path / "changes.toml").write_text(changes)
    code, output = shell("train", "resnet18", "--file", path)
    assert code == 2
    assert f"{path}: {message}" in output


def test_weights_of_a_base_network_are_continued(data: Path, tmp_path: Path) -> None:
    base = dataclasses.replace(RECIPE, spec="", dropout=None, epochs=3)
    train("base", base, data, tmp_path / "base", config=CONFIG, results=tmp_path)
    start = str(tmp_path / "base" / "model.safetensors")
    tuned = dataclasses.replace(base, spec="pooling", pretrained=start, lr=1e-9)
    history = train("tuned", tuned, data, tmp_path / "tuned", config=CONFIG, results=tmp_path)
    assert history.epochs == 3
    other = dataclasses.replace(tuned, model="resnet18")
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit"):
        train("other", other, data, tmp_path / "other", config=CONFIG, results=tmp_path)


def test_any_model_is_trained_on_any_class_folders(
    data: Path, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    base = create_model("timm/mobilenetv3_small_050", num_classes=7)
    torch.save(base.state_dict(), "base.pth")
    name = "timm/mobilenetv3_small_050+pooling"
    command = [name, "--data", str(data), "--epochs", "1", "--batch-size", "12", "--lr", "1e-9", "--size", "32"]
    command += ["--results", "results", "--pipeline", "torchvision", "--device", "cpu"]
    code, output = shell("train", *command, "--pretrained", "base.pth", "--init", "identity")
    assert code == 0, output
    (row,) = Store("results/imagenet.jsonl").rows()
    assert (row.row, row.recipe["model"], row.recipe["spec"]) == (name, "timm/mobilenetv3_small_050", "pooling")
    assert (row.recipe["eval_size"], row.recipe["eval_resize"], row.recipe["init"]) == (32, 37, "identity")
    model, stored = load(file := tmp_path / "out/train" / name / "model.safetensors"), read_header(file).preprocessing
    assert stored is not None
    assert (stored.class_names, stored.size, stored.resize) == (("blue", "green", "red"), 32, 37)
    trained, weights = model.state_dict(), base.state_dict()
    assert torch.allclose(trained["conv_stem.weight"], weights["conv_stem.weight"], atol=1e-6)
    assert trained["classifier.weight"].shape == (3, weights["classifier.weight"].shape[1])


@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_models_are_normalized_as_timm_says_and_have_one_classifier(data: Path) -> None:
    timm_s = dataclasses.replace(RECIPE, model="timm/mobilevit_xxs", spec="", dropout=None)
    preprocessing = setup_training(timm_s, data, config=CONFIG).trainer.preprocessing
    assert preprocessing is not None
    assert (preprocessing.mean, preprocessing.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    googlenet = dataclasses.replace(RECIPE, model="googlenet", size=64)
    setup = setup_training(googlenet, data, config=CONFIG)
    _, _, _, classes = setup.trainer.forward_backward(*next(setup.batches.epoch(0)))
    assert classes == 3


def test_damaged_images_are_named_and_too_many_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = make_colored_folders(tmp_path / "data")
    for number in range(3):
        (data / "train" / "red" / f"{number}.jpg").write_bytes(b"no image")
    recipe = dataclasses.replace(RECIPE, epochs=3)
    few = TrainerConfig(loading=LoaderConfig("torchvision", damaged=0.01))
    with pytest.raises(ValueError, match=r"images cannot be decoded, such as .*allowed is a share of 0.01"):
        train("run", recipe, data, tmp_path / "few", config=few, results=tmp_path)
    many = TrainerConfig(loading=LoaderConfig("torchvision", damaged=0.1))
    history = train("run", recipe, data, tmp_path / "many", config=many, results=tmp_path)
    assert history.epochs == 3
    assert "0.jpg cannot be decoded and is left out" in caplog.text


def test_a_diverged_run_stops_with_a_hint(data: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, lr=1e30, warmup=0.0, epochs=4)
    with pytest.raises(ValueError, match=r"the loss is.*lower lr.*, in a new --output$"):
        train("run", recipe, data, tmp_path / "run", config=CONFIG, results=tmp_path)


def test_a_full_disk_is_noticed_at_the_start(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": 10**6})())
    with pytest.raises(OSError, match=r"has 1 MB of free space; a run needs \d+ MB"):
        train("run", RECIPE, data, tmp_path / "run", config=CONFIG, results=tmp_path)


def test_a_folder_that_another_run_uses_is_refused(data: Path, tmp_path: Path, shell: Shell) -> None:
    run, line = tmp_path / "run", f"{tmp_path / 'run'} is in use by process {os.getpid()} on {platform.node()}; "
    line += "wait until that run ends, or choose another --output"
    run.mkdir()
    with exclusive(run / ".lock", "the test", ""):
        for resume in ([], ["--resume"]):
            code, output = shell("train", "resnet18", "--data", data, "--output", run, *resume, *SMALL)
            assert (code, output.splitlines()[-1]) == (2, f"deepsquare: error: {line}")
    assert list(run.iterdir()) == []


def test_no_process_of_a_refused_run_waits_for_the_others(data: Path, tmp_path: Path) -> None:
    run, errors = tmp_path / "run", tmp_path / "stderr"
    run.mkdir()
    with exclusive(run / ".lock", "the test", ""):
        command = [
            "train",
            "shufflenet_v2_x0_5",
            "--data",
            str(data),
            "--output",
            str(run),
            *SMALL,
            "--results",
            str(tmp_path),
        ]
        processes = start_ranks(command_line, command, stderr=errors)
        assert [wait(process, 60) for process in processes] == [2, 2], errors.read_text()
    assert errors.read_text().count(f"{run} is in use by process {os.getpid()} on") == 2
    processes = start_ranks(command_line, [*command, "--epochs", "1", "--batch-size", "12"], stderr=errors)
    assert [wait(process) for process in processes] == [0, 0], errors.read_text()  # the ranks of a run share its folder


def test_a_resumed_run_completes_its_log_and_removes_temporary_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options = tmp_path / "run", {"config": CONFIG, "results": tmp_path}
    recipe = dataclasses.replace(RECIPE, epochs=3)
    train("run", recipe, data, run, **options)  # type: ignore[arg-type]
    log, names = run / "log.jsonl", sorted(path.name for path in run.iterdir())
    whole = log.read_text()
    first, second, last = whole.splitlines(keepends=True)
    without_times = second.partition(', "seconds"')[0] + "}\n"
    later = first.replace('"epoch": 1', '"epoch": 4')
    for damaged, expected in (
        (first + second, [first, second]),
        (first + second + last[:30], [first, second]),
        (whole + later, [first, second]),
        (first + last, [first, without_times]),
    ):
        log.write_text(damaged)
        temporary = run / f".model.safetensors.{'0' * 32}" / ".tmpCiwvTt"  # of safetensors in a killed writer
        temporary.parent.mkdir()
        temporary.touch()
        train("run", recipe, data, run, resume=True, **options)  # type: ignore[arg-type]
        *lines, end = log.read_text().splitlines(keepends=True)
        assert lines == expected
        assert end.partition(', "seconds"')[0] == last.partition(', "seconds"')[0]
        assert sorted(path.name for path in run.iterdir()) == names

    def usage(path: Path) -> object:
        present = sum(file.stat().st_size for file in run.iterdir())
        return type("usage", (), {"free": 8 * 10**6 - present})()

    monkeypatch.setattr(shutil, "disk_usage", usage)  # what a new run needs, less what it has written
    train("run", recipe, data, run, resume=True, **options)  # type: ignore[arg-type]


def test_a_disk_that_is_full_for_the_log_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if (path.name, mode) == ("log.jsonl", "a"):
            return opened(Path("/dev/full"), mode, *arguments, **options)
        return opened(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    expected = r"^cannot write .*run/log\.jsonl \(No space left on device\); free some space, or choose another folder$"
    (tmp_path / "run").mkdir()
    with pytest.raises(OSError, match=expected):
        train("run", RECIPE, data, tmp_path / "run", config=CONFIG, results=tmp_path)


def test_training_does_not_import_torchvision() -> None:
    script = "import sys; sys.modules['timm'] = None; import deepsquare; known = {*sys.modules}; "
    script += "import deepsquare.training.run, deepsquare.cli.train; new = sys.modules.keys() - known; "
    script += "print(sorted({'torchvision', 'scipy', 'rich.progress', 'simplejpeg'} & new))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
