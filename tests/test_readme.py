"""README tells the truth: its code runs, and its numbers are what the library counts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import deepsquare as ds
from deepsquare.cost import Cost
from deepsquare.results import Store

ROOT = Path(__file__).parent.parent
README, RESULTS = ((ROOT / name).read_text() for name in ("README.md", "docs/results.md"))
TEXT = " ".join(README.split())


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(first, "README.md", "exec"), {})
    assert f"# {capsys.readouterr().out}" == first.splitlines()[-1] + "\n"
    exec(compile(second, "README.md", "exec"), {})
    assert "last_spatial_conv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        ("Square-Pooling | 2", 5, "+1.87 [+1.40, +2.34]"),
        ("Square-Pooling | 2", -2, "+0.82"),
        ("DeepSquare5s- | 5_", 5, "+1.13 [+0.55, +1.70]"),
        ("DeepSquare5s- | 5_", -2, "−0.13"),
        ("Square-Pooling & Square-Excitation", 4, "1.037 [1.03, 1.04]"),
        ("Square-Pooling & Square-Excitation", 6, "1.000 [0.99, 1.00]"),
        ("Squeeze-and-Excitation", 4, "1.100 [1.09, 1.11]"),
        ("Squeeze-and-Excitation", 6, "1.082 [1.07, 1.09]"),
    ],
)
def test_evidence_is_what_the_rows_say(row: str, column: int, value: str) -> None:
    (run,) = re.findall(r"all from one run: (.*)\.$", RESULTS, re.MULTILINE)
    tables = RESULTS.partition("## Cost of the baselines")[0] + RESULTS.partition(f"### resnet50: {run}\n")[2]
    line = next(line for line in tables.splitlines() if line.startswith(f"| {row} |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[column].removesuffix(" ≈") == value
    assert value in TEXT


def test_links_are_absolute_and_lead_to_files() -> None:
    links = re.findall(r"\]\((.*?)\)", README)
    assert all(link.startswith("https://") for link in links)
    files = [link.split("/main/")[1] for link in links if "/deepsquare/" in link]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_counts_of_figure_2() -> None:
    rows = Store(ROOT / "results" / "fig2.jsonl").rows()

    def networks(case: str, pieces: int = 0) -> str:
        counts = [row.metrics["components"] for row in rows if row.recipe["case"] == case]
        return f"{sum(n for c in counts for pair, n in c.items() if int(pair.split()[-1]) >= pieces):,}"

    assert f"in all {networks('EleSquare, (17) and (18), full rank', 2)} random networks" in TEXT
    assert networks("EleSquare, (17) and (18), full rank") == networks("EleSquare, (17) and (18), full rank", 2)
    assert f"in none of {networks('ReLU, full rank')} ReLU networks" in TEXT
    assert networks("ReLU, full rank", 2) == "0"
    assert f"{networks('ReLU, rank 1', 2)} of {networks('ReLU, rank 1')}" in TEXT


@pytest.fixture(scope="module")
def base() -> Cost:
    return ds.cost(ds.create_model("resnet50"))


@pytest.mark.parametrize("term", ["pooling", "softmin", "excitation", "encoding"])
def test_module_table(term: str, base: Cost) -> None:
    row = re.search(rf"^\| `{term}` .*$", README, re.MULTILINE)
    assert row is not None
    added = ds.cost(ds.create_model("resnet50", term)).added_to(base)
    parameters, share = re.search(r"\+(\d+) parameters?, \+([\d.]+)%", row.group()).groups()  # type: ignore[union-attr]
    assert int(parameters) == added["parameters"]
    assert share == f"{100 * added['elementwise_muls'] / base.macs:.3f}"
    assert row.group().endswith(f"| +{100 * added['activation_bytes'] / base.activation_bytes:.1f}% |")


def test_a_trained_network_starts_as_it_was_by_the_page_s_code() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trained.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "trained.md", "exec"), names)
    torch.testing.assert_close(names["after"], names["before"], rtol=1e-5, atol=1e-5)


def test_a_trained_network_keeps_its_accuracy() -> None:
    rows = {row.row: row.metrics["accuracy"] for row in Store(ROOT / "results" / "pretrained.jsonl").rows()}
    kept = {f"{100 * rows[name]:.2f}%" for name in ("base", *(row for row in rows if row.endswith(", identity")))}
    assert kept == {"74.00%"}
    assert "has 74.00% top-1 on 2,000 images before" in TEXT
    assert "and 74.00% after it" in TEXT
