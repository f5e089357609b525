"""A dozen kills at random moments change nothing; ``make soak`` sends more, and to grids and rival runs too."""

from pathlib import Path

import pytest
from soak import soak

KINDS = ("training", "export by two at once")


@pytest.mark.slow
def test_a_dozen_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")
    assert soak(tmp_path, kills=12, seed=1, names=KINDS) == []
    assert capsys.readouterr().out.splitlines()[-1] == "12 kills, seed 1: 0 violations"
