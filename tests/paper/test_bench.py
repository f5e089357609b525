"""The benchmarks run, compare and store; their numbers are not tested."""

import os
import signal
import subprocess
from collections.abc import Sequence
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
from helpers.tables import cells

from deepsquare.cost import cost_of
from deepsquare.data import cifar10, open_source, write_shards
from deepsquare.export.runtimes import RUNTIMES
from deepsquare.kernels import backend_for, cpu, without_kernels
from deepsquare.paper.bench import _common, activations, data, limits, ops, steps, train
from deepsquare.paper.bench import deployment as deploy
from deepsquare.paper.report.activations import activation_costs
from deepsquare.paper.report.bench import GEM_FORMS
from deepsquare.results import Row, Store
from deepsquare.training.step_config import StepChoice, StepConfig


def bench_rows(folder: Path) -> list[Row]:
    return Store(folder / "bench.jsonl").rows()


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
    assert "ours / contiguous" not in metrics[ops.FORWARD]
    other = rows["ops/square_excitation/channels_last/bfloat16"].metrics["16×6×6"][ops.STEP]
    assert {"ours / contiguous", "ours / float32"} <= set(other)
    assert pooling.metrics["16×6×6"][ops.FORWARD]["allocated"]["ours"] == 2 * 16 * 4
    assert {f"{name} / ours" for name in GEM_FORMS} <= set(pooling.metrics["16×6×6"][ops.STEP])


def test_the_limits_of_the_functions() -> None:
    def forward(**ratios: float) -> dict[str, Any]:
        return {"forward": {name: [value, value - 0.01, value + 0.01] for name, value in ratios.items()}}

    pooling = {"8×14×14": forward(**{"ours / limit": 1.16}), "8×7×7": forward(**{"ours / limit": 1.29})}
    last = {"ours / limit": 1.5, "ours / contiguous": 1.19, "ours / float32": 0.5}
    measured = {
        "square_pooling/contiguous/float32": {"8×28×28": forward(**{"ours / limit": 9.0}), **pooling},
        "square_pooling/channels_last/bfloat16": {"8×14×14": forward(**last), "8×7×7": forward(**last)},
    }
    assert limits.shared_maps(measured) == ["8×14×14", "8×7×7"]
    lines = limits.limit_lines(measured, ["8×14×14", "8×7×7"], "forward")
    assert [(line.layout, line.limit) for line in lines] == [
        ("contiguous", "one read"),
        ("channels_last", "one read"),
        ("channels_last", "contiguous"),
        ("channels_last", "float32, per byte"),
    ]
    assert [line.ratios["8×7×7"].value for line in lines] == [1.29, 1.5, 1.19, 1.0]
    assert [name for name in pooling if lines[0].misses(name)] == ["8×14×14"]  # above 1.15, and below 1.3
    assert not any(line.misses(name) for line in lines[1:] for name in pooling)
    (_, contiguous), _ = measured.items()
    shown = cells(limits.limits_table({"square_pooling/contiguous/float32": contiguous}, 9, "forward"))
    assert shown["square_pooling"][3:] == ["9.00 [8.99, 9.01] > 1.15", "1.16 [1.15, 1.17] > 1.15", "1.29 [1.28, 1.30]"]


def test_every_gem_computes_the_same() -> None:
    x = torch.rand(2, 3, 5, 5)
    forms = ops.FUNCTIONS["square_pooling"].baselines(x, torch.contiguous_format)
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
