"""The benchmarks run, compare and store; what they measure is told by running them, not by a test."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.made_images import make_folder

from deepsquare.data import open_source, write_shards
from deepsquare.paper.bench import data, models, ops, train
from deepsquare.paper.bench import deployment as deploy
from deepsquare.paper.report import baselines as peers
from deepsquare.results import Store


def test_ratios_are_medians_over_the_rounds() -> None:
    seconds = {name: [1.0, 2.0, 4.0] for name in train.CANDIDATES}
    seconds["deepsquare"] = [2.0, 1.0, 1.0]
    bench = train.TrainBench(seconds, gflop_per_epoch=800, gemm=150, threads=2)
    assert bench.ratio("torchvision + DataLoader", "deepsquare") == 2.0  # of 0.5, 2 and 4
    assert bench.ratio("deepsquare", "deepsquare") == 1.0


@pytest.mark.filterwarnings("ignore:random images stand in")
def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = train.run(rounds=2, steps=2, results=tmp_path)
    assert set(bench.seconds) == set(train.CANDIDATES)
    assert all(len(times) == 2 and min(times) > 0 for times in bench.seconds.values())
    assert bench.gflop_per_epoch == pytest.approx(747, rel=0.02)  # 3 × 2 × 2.6 MMAC × 49,920 images, less one gradient
    assert "times as fast as torchvision" in capsys.readouterr().out.replace("\n", " ")
    (row,) = Store(tmp_path / "bench.jsonl").rows()
    assert row.metrics["seconds"] == bench.seconds


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.run(["shufflenet_v2_x0_5"], ["pooling", "se"], rounds=2, results=tmp_path)
    assert "time relative to the plain network" in " ".join(capsys.readouterr().out.split())
    (row,) = Store(tmp_path / "bench.jsonl").rows()
    found = peers.backbones([row])["shufflenet_v2_x0_5"].specs["se"]
    assert found.cost.parameters > found.base.parameters
    assert set(found.times) == {models.LATENCY, models.THROUGHPUT, models.TRAINING}
    assert all(time.low <= time.value <= time.high for time in found.times.values())


def test_deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")
    monkeypatch.setattr(deploy, "ENDINGS", {"onnx": ".onnx"})
    deploy.run(["shufflenet_v2_x0_5"], ["se"], rounds=3, results=tmp_path)
    rows = {row.row.rpartition("/")[2]: row.metrics for row in Store(tmp_path / "bench.jsonl").rows()}
    assert rows.keys() == {"float32", "int8"}
    for found in rows.values():
        assert list(found) == ["", "se", "again"]
        assert found["se"]["bytes"] > found[""]["bytes"] == found["again"]["bytes"]
        assert found[""]["1"]["ratio"][0] + found["again"]["1"]["ratio"][0] == pytest.approx(2, abs=0.01)
        assert min(low for one in found.values() for low in (*one["1"]["seconds"], *one["2"]["seconds"])) > 0
        assert 1e6 < found["se"]["memory"] < 1e9
    assert rows["int8"]["se"]["bytes"] < rows["float32"]["se"]["bytes"] / 2
    with pytest.raises(OSError, match=r"time of none.onnx failed:[\s\S]*no file none.onnx"):
        deploy._apart("time", [Path("none.onnx")], 1, 1)


def test_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:

    def one_map(functions: Sequence[str]) -> list[ops.Case]:
        kinds = (("contiguous", "float32"), ("channels_last", "bfloat16"))
        return [ops.Case(name, 16, 6, *kind) for name in functions for kind in kinds]

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # a minute of compiling, for nothing
    monkeypatch.setattr(ops, "cases", one_map)
    ops.run(tuple(ops.FUNCTIONS), rounds=2, batch_size=2, results=tmp_path)
    assert "square_excitation/contiguous/float32" in " ".join(capsys.readouterr().out.split())
    rows = {row.row: row for row in Store(tmp_path / "bench.jsonl").rows()}
    assert len(rows) == 2 * len(ops.FUNCTIONS)
    pooling, excitation = (rows[f"ops/{name}/contiguous/float32"] for name in ("square_pooling", "square_excitation"))
    found = excitation.metrics["16×6×6"]
    assert found["bytes"] == 2 * 16 * 36 * 4
    for kind in (ops.FORWARD, ops.STEP):
        assert {"formula / ours", "compiled / ours", "kernels off / ours", "timm SE / ours"} <= set(found[kind])
        low, high = found[kind]["ours / limit"][1:]
        assert 0 < low <= found[kind]["ours / limit"][0] <= high
    assert found[ops.FORWARD]["allocated"]["ours"] == found["bytes"]
    assert found[ops.FORWARD]["allocated"]["formula"] > 2 * found["bytes"]
    assert pooling.metrics["16×6×6"][ops.FORWARD]["allocated"]["ours"] == 2 * 16 * 4


def test_a_contestant_that_dies_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no CIFAR-10 in"):
        train.run(rounds=1, steps=1, folder=tmp_path / "nothing", results=tmp_path)
    with train._Stage(["bare steps on one batch", "deepsquare"], None) as stage:
        stage._processes[1].kill()
        stage._processes[1].join()
        with pytest.raises(OSError, match="the process of 'deepsquare' was killed"):
            stage.time("deepsquare", 1)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rounds is 0 and steps is None; expected at least 1"):
        train.run(rounds=0, results=tmp_path)
    with pytest.raises(ValueError, match="there is no function 'relu'; choose from square_pooling"):
        ops.run(["relu"], results=tmp_path)
    with pytest.raises(ValueError, match="batch_size is 0"):
        ops.run(batch_size=0, results=tmp_path)


def test_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "images")
    bench = data.run(folder, rounds=2, images=5, results=tmp_path)
    assert {data.PLAIN, "torchvision, in this process"} <= set(bench.seconds)
    assert all(len(times) == 2 and min(times) > 0 for times in bench.seconds.values())
    assert "images/s" in capsys.readouterr().out
    (row,) = Store(tmp_path / "bench.jsonl").rows()
    assert (row.row, row.recipe["of"], set(row.metrics["seconds"])) == ("data", 6, set(bench.seconds))
    twice = data.DataBench({data.PLAIN: [2.0, 4.0], "fast": [1.0, 2.0]}, bench.cpu)
    assert twice.speedup("fast").value == 2.0
    write_shards(open_source(folder, "train"), tmp_path / "shards" / "train")
    with pytest.raises(ValueError, match="has shards, which ImageFolder does not read"):
        data.run(tmp_path / "shards", results=tmp_path)
    with pytest.raises(ValueError, match="rounds is 0; expected at least 1"):
        data.run(folder, rounds=0, results=tmp_path)
