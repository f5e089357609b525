"""The benchmarks run, compare and store; their numbers are not tested."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.few_images import no_data, time_with_few_images
from helpers.images import make_class_folders
from helpers.processes import run_module, warm_context
from rich.console import Console
from rich.table import Table

from deepsquare.cost import cost_of
from deepsquare.data import cifar10, open_source, write_shards
from deepsquare.export.runtimes import RUNTIMES
from deepsquare.kernels import backend_for, cpu, without_kernels
from deepsquare.paper.bench import _common, activations, data, models, ops, steps, train
from deepsquare.paper.bench import deployment as deploy
from deepsquare.paper.report.activations import activation_costs
from deepsquare.paper.report.bench import GEM_FORMS, backbones
from deepsquare.results import Row, Store
from deepsquare.training.step_config import StepChoice, StepConfig


def bench_rows(folder: Path) -> list[Row]:
    return Store(folder / "bench.jsonl").rows()


def cells(table: Table) -> dict[str, list[str]]:
    """The cells of each row of a table, by its first cell."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    rows = [line.strip("│").split("│") for line in capture.get().splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_candidates_are_interleaved() -> None:
    calls: list[str] = []
    times = _common.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, range(3))  # type: ignore[misc]
    assert calls == ["a", "b"] * 3
    assert [len(values) for values in times.values()] == [3, 3]


def test_ratios_are_medians_over_the_rounds() -> None:
    seconds = {name: [1.0, 2.0, 4.0] for name in train.CANDIDATES} | {train.OURS: [2.0, 1.0, 1.0]}
    table = train.table({"seconds": seconds, "gflop_per_epoch": 800, "gemm_gflops": 150}, threads=2)
    assert cells(table)[train.STANDARD][:3] == ["2.00", "1.00", "2.00"]  # the median of 0.5, 2 and 4
    assert cells(table)[train.OURS][2] == "1.00"
    assert "2.00 times as fast" in str(table.caption)
    seconds = {data.BASELINE: [2.0, 4.0], "fast": [1.0, 2.0]}
    assert cells(data.table(seconds, seconds))["fast"][-1] == "2.00 [2.00, 2.00]"
    assert "(range of 2 rounds)" in str(data.table(seconds, seconds).caption)


@pytest.mark.slow
def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)  # compiling takes minutes
    monkeypatch.setattr(steps, "NETWORKS", {"vanilla_cnn": steps.NETWORKS["vanilla_cnn"]})
    monkeypatch.setattr(cifar10, "load_cifar10", no_data)
    monkeypatch.setattr(train, "_time", time_with_few_images)
    monkeypatch.setattr(train, "_gemm_gflops", partial(train._gemm_gflops, size=256))
    monkeypatch.setattr("multiprocessing.get_context", {"spawn": warm_context()}.__getitem__)
    with pytest.warns(UserWarning, match="random images stand in for CIFAR-10, .*: no network"):
        train.run(rounds=2, steps=2, data=None, results=tmp_path)
    assert "times as fast as torchvision" in capsys.readouterr().out.replace("\n", " ")
    (row,) = bench_rows(tmp_path)
    seconds = row.metrics["seconds"]
    assert set(seconds) == set(train.CANDIDATES)
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
    gflop = row.metrics["gflop_per_epoch"]  # 3 × 2 × 2.6 MMAC × 49,920 images, less the gradient for the images
    assert gflop == pytest.approx(747, rel=0.02)
    assert set(row.recipe) == {"rounds", "steps", "batch_size", "threads", "data"}
    assert row.recipe["data"] == "random images"
    network = row.metrics["steps"]["vanilla_cnn"]
    assert set(network["seconds_per_step"]) == {steps.CONTIGUOUS, steps.BEFORE, steps.CHOSEN, steps.ALL_THREADS}
    assert network["choice"]["images_per_second"][steps.BEFORE] > 0


def test_the_ratio_of_steps() -> None:
    seconds = {steps.CONTIGUOUS: [0.4, 0.3, 0.3], steps.BEFORE: [0.3, 0.2, 0.2], steps.CHOSEN: [0.1, 0.1, 0.2]}
    seconds[steps.ALL_THREADS] = [0.2, 0.16, 0.1]
    choice = StepChoice(StepConfig(compile=True, matmul_convs=("a", "b"))).metrics()
    network = {"seconds_per_step": seconds, "batch_size": 20, "threads": 2, "choice": choice}
    (row,) = cells(steps.table({"tiny": network})).values()
    assert row[0] == "200"
    assert row[1].startswith("2.00 [")
    assert row[2].startswith("3.00 [")
    assert row[3].startswith("2: 1.50 [")
    assert row[4] == "compiled, channels_last, 2 convolutions as matrix products"


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ROUND_SECONDS", 0.01)
    models.run(["shufflenet_v2_x0_5"], ["pooling", "se"], rounds=2, results=tmp_path)
    assert "time relative to the plain network" in " ".join(capsys.readouterr().out.split())
    (row,) = bench_rows(tmp_path)
    (run,) = backbones([row])["shufflenet_v2_x0_5"]
    times = run["specs"]["se"]
    assert times["parameters"] > 0
    assert set(times["times"]) == {models.LATENCY, models.THROUGHPUT, models.TRAINING}
    assert all(time.low <= time.value <= time.high for time in times["times"].values())
    stored = {spec: set(row.metrics[spec]["seconds"][models.LATENCY]) for spec in ("pooling", "se")}
    assert stored == {"pooling": {"base", "own", "without_kernels"}, "se": {"base", "own"}}
    base, other = (row.metrics[spec]["seconds"][models.TRAINING]["base"] for spec in ("pooling", "se"))
    assert base == other  # all networks are compared with the same iterations of the plain one


def test_all_networks_run_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def workloads(backbone: str, spec: str) -> dict[str, Callable[[], None]]:
        return dict.fromkeys(models.WORKLOADS, lambda: calls.append(spec))

    monkeypatch.setattr(models, "_workloads", workloads)
    monkeypatch.setattr(models, "ROUND_SECONDS", 0)  # one iteration per round
    times = models._time("resnet50", ["se", "excitation"], 4)
    in_rounds = calls[2 * len(models.WORKLOADS) :]  # without the choice of the number of iterations
    turns = [in_rounds[first : first + 4] for first in range(0, len(in_rounds), 4)]
    assert len(turns) == 4 * len(models.WORKLOADS)
    assert all(sorted(turn) == ["", "excitation", "excitation", "se"] for turn in turns)  # with and without kernels
    assert len({tuple(turn) for turn in turns}) > 1
    assert all(len(values) == 4 for of in times.values() for by_name in of.values() for values in by_name.values())


@pytest.mark.slow
def test_deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")
    monkeypatch.setattr(deploy, "RUNTIMES", {"onnx": RUNTIMES["onnx"]})
    monkeypatch.setattr(deploy, "PRECISIONS", ("int8",))
    monkeypatch.setattr(deploy, "NUM_IMAGES", 4)

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """The memory of the equipped network in a Python of its own, the others from one that has imported torch."""
        start = subprocess.run if Path(command[-1]).stem == "se" else run_module
        return start(command, **options)

    with monkeypatch.context() as patch:
        patch.setattr(deploy, "subprocess", SimpleNamespace(run=run))
        deploy.run(["timm/test_resnet"], ["se"], rounds=3, results=tmp_path)
    (row,) = bench_rows(tmp_path)
    assert row.row == "deploy/timm/test_resnet/onnx/int8"
    metrics = row.metrics
    assert list(metrics) == ["", "se", "again"]
    assert metrics["se"]["bytes"] > metrics[""]["bytes"] == metrics["again"]["bytes"]
    assert metrics["se"]["bytes"] < 0.5 * 4 * cost_of("timm/test_resnet", "se").parameters
    assert metrics[""]["1"]["ratio"][0] + metrics["again"]["1"]["ratio"][0] == pytest.approx(2, abs=0.01)
    assert min(low for one in metrics.values() for low in (*one["1"]["seconds"], *one["2"]["seconds"])) > 0
    assert 1e6 < metrics["se"]["memory"] < 1e9
    with pytest.raises(OSError, match=r"latency of none.onnx failed:[\s\S]*no file none.onnx"):
        deploy._in_subprocess("latency", [Path("none.onnx")], 1, 1)


def test_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes a minute
    monkeypatch.setattr(ops, "MAPS", dict.fromkeys(("float32", "bfloat16"), ((16, 6),)))
    ops.run(tuple(ops.FUNCTIONS), rounds=2, batch_size=2, results=tmp_path)
    assert "square_excitation/contiguous/float32" in " ".join(capsys.readouterr().out.split())
    rows = {row.row: row for row in bench_rows(tmp_path)}
    assert len(rows) == 4 * len(ops.FUNCTIONS)  # in two layouts and two dtypes
    pooling, excitation = (rows[f"ops/{name}/contiguous/float32"] for name in ("square_pooling", "square_excitation"))
    metrics = excitation.metrics["16×6×6"]
    assert metrics["bytes"] == 2 * 16 * 36 * 4
    for kind in (ops.FORWARD, ops.STEP):
        assert {"formula / ours", "compiled / ours", "kernels off / ours", "timm SE / ours"} <= set(metrics[kind])
        low, high = metrics[kind]["ours / limit"][1:]
        assert 0 < low <= metrics[kind]["ours / limit"][0] <= high
    assert metrics[ops.FORWARD]["allocated"]["ours"] == metrics["bytes"]
    assert metrics[ops.FORWARD]["allocated"]["formula"] > 2 * metrics["bytes"]
    assert pooling.metrics["16×6×6"][ops.FORWARD]["allocated"]["ours"] == 2 * 16 * 4
    assert {f"{name} / ours" for name in GEM_FORMS} <= set(pooling.metrics["16×6×6"][ops.STEP])


def test_every_gem_computes_the_same() -> None:
    x = torch.rand(2, 3, 5, 5)
    forms = ops.FUNCTIONS["square_pooling"].baselines(3, x.dtype, torch.contiguous_format)
    for form in forms.values():
        torch.testing.assert_close(form(x), x.square().mean((2, 3)).sqrt())


@pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")
def test_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deepsquare.functional._relu_square", backend_for)
        plain, fused = (activations.ACTIVATIONS[name] for name in (activations.PLAIN, activations.FUSED))
        backends: list[Any] = [plain(torch.ones(1)), fused(torch.ones(1))]
    assert backends == [None, cpu]
    activations.run(rounds=2, elements=(64,), results=tmp_path)
    assert "Time relative to ReLU" in capsys.readouterr().out
    (row,) = bench_rows(tmp_path)
    assert row.recipe["threads"] == 1
    for kind in (activations.FORWARD, activations.STEP):
        measured = row.metrics["64"][kind]
        assert set(measured) == set(activations.ACTIVATIONS)
        assert measured["relu"]["/ relu"] == [1, 1, 1]
        assert set(measured["tanh"]) == {"seconds", "/ relu", f"/ {activations.PLAIN}", f"/ {activations.FUSED}"}
    costs = activation_costs([row])
    assert costs
    assert [(s["form"], s["pass"]) for s in costs["statements"]] == [
        (form, kind) for form in ("plain operations", "fused kernel") for kind in ("forward", "forward + backward")
    ]
    with pytest.raises(ValueError, match="there is no compiled kernel"), without_kernels():
        activations.run(rounds=1, results=tmp_path)


def test_a_killed_candidate_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no CIFAR-10 in"):
        train.run(rounds=1, steps=1, data=tmp_path / "nothing", results=tmp_path)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
        with pytest.raises(OSError, match="the process of 'deepsquare' was killed"):
            train.time_in_process(pool, "deepsquare", None, 1)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rounds is 0; expected at least 1"):
        train.run(rounds=0, steps=None, data=None, results=tmp_path)
    with pytest.raises(ValueError, match="there is no function 'relu'; choose from square_pooling"):
        ops.run(["relu"], rounds=1, results=tmp_path)
    with pytest.raises(ValueError, match="batch_size is 0"):
        ops.run(["relu_square"], rounds=1, batch_size=0, results=tmp_path)


def test_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_class_folders(tmp_path / "images")
    data.run(folder, rounds=2, images=5, results=tmp_path)
    assert "images/s" in capsys.readouterr().out
    (row,) = bench_rows(tmp_path)
    assert (row.row, row.recipe["of"]) == ("data", 6)
    seconds, cpu = row.metrics["seconds"], row.metrics["cpu"]
    assert {data.BASELINE, "torchvision, in this process"} <= set(seconds) == set(cpu)
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
    write_shards(open_source(folder, "train"), tmp_path / "shards" / "train")
    with pytest.raises(ValueError, match="has shards, which ImageFolder does not read"):
        data.run(tmp_path / "shards", rounds=1, results=tmp_path)
    with pytest.raises(ValueError, match="rounds is 0; expected at least 1"):
        data.run(folder, rounds=0, results=tmp_path)
