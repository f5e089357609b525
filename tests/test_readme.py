"""README tells the truth: its code runs, and its numbers are what the library counts."""

import json
import re
from pathlib import Path

import pytest

import deepsquare as ds
from deepsquare.cost import Cost

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "branch_end" in capsys.readouterr().out


def test_counts_of_figure_2() -> None:
    rows = json.loads((Path(__file__).parent.parent / "results" / "fig2.json").read_text())["rows"]

    def networks(case: str, pieces: int = 0) -> str:
        counts = [row["components"] for row in rows if row["case"] == case]
        return f"{sum(n for c in counts for pair, n in c.items() if int(pair.split()[-1]) >= pieces):,}"

    assert f"in all {networks('EleSquare, (17) and (18), full rank', 2)} random networks" in README
    assert networks("EleSquare, (17) and (18), full rank") == networks("EleSquare, (17) and (18), full rank", 2)
    assert f"in none of {networks('ReLU, full rank')} ReLU networks" in README
    assert networks("ReLU, full rank", 2) == "0"
    assert f"{networks('ReLU, rank 1', 2)} of {networks('ReLU, rank 1')}" in README


@pytest.fixture(scope="module")
def base() -> Cost:
    return ds.cost(ds.create_model("resnet50"))


@pytest.mark.parametrize("word", ["pooling", "softmin", "excitation", "encoding"])
def test_module_table(word: str, base: Cost) -> None:
    row = re.search(rf"^\| `{word}` .*$", README, re.MULTILINE)
    assert row is not None
    added = ds.cost(ds.create_model("resnet50", word)).added_to(base)
    parameters, share = re.search(r"\+(\d+) parameters?, \+([\d.]+)%", row.group()).groups()  # type: ignore[union-attr]
    assert int(parameters) == added["parameters"]
    assert share == f"{100 * added['elementwise_muls'] / base.macs:.3f}"
    assert row.group().endswith(f"| +{100 * added['activation_bytes'] / base.activation_bytes:.1f}% |")
