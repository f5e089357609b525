"""The benchmarks run, compare and store; what they measure is told by running them, not by a test."""

from pathlib import Path

import pytest

from deepsquare.bench import train
from deepsquare.results import Store


def test_ratios_are_medians_over_the_rounds() -> None:
    seconds = {name: [1.0, 2.0, 4.0] for name in train.CONTESTANTS}
    seconds["deepsquare"] = [2.0, 1.0, 1.0]
    bench = train.TrainBench(seconds, gflop_per_epoch=800, gemm=150, threads=2)
    assert bench.ratio("torchvision + DataLoader", "deepsquare") == 2.0  # of 0.5, 2 and 4
    assert bench.ratio("deepsquare", "deepsquare") == 1.0


def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = train.run(rounds=2, steps=2, results=tmp_path)
    assert set(bench.seconds) == set(train.CONTESTANTS)
    assert all(len(times) == 2 and min(times) > 0 for times in bench.seconds.values())
    assert bench.gflop_per_epoch == pytest.approx(747, rel=0.02)  # 3 × 2 × 2.6 MMAC × 49,920 images, less one gradient
    assert "times as fast as torchvision" in capsys.readouterr().out.replace("\n", " ")
    (row,) = Store(tmp_path / "bench.jsonl").rows()
    assert row.metrics["seconds"] == bench.seconds


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rounds is 0 and steps is None; expected at least 1"):
        train.run(rounds=0, results=tmp_path)
