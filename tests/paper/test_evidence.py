"""Which stored rows count, and what a table's rows find."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.report import BASE, row, rows_of, standard_rows, write_store

from deepsquare.paper.report.evidence import read_stores, table_findings
from deepsquare.paper.tables import TABLE_2


def test_truncated_lines_and_other_files(tmp_path: Path) -> None:
    cut = write_store(standard_rows(), tmp_path, "cut.jsonl") / "cut.jsonl"
    cut.write_text("\n" + cut.read_text(encoding="utf-8") + '{"experiment": "cif', encoding="utf-8")
    (tmp_path / "support.jsonl").write_text('{"family": "alexnet"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "only.jsonl").write_text('{"exp')
    rows, notes = read_stores([tmp_path])
    assert len(rows) == len(standard_rows())
    assert [note.split(":")[0] for note in notes] == ["cut.jsonl", "only.jsonl"]
    assert all("the last line is truncated" in note for note in notes)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"accuracy": "0.7"}, "row DeepSquare3 of cifar10, seed 0, cannot be read"),
        ({"test_accuracy": 3}, "cannot be read"),
    ],
)
def test_a_damaged_row_is_reported(metrics: dict[str, Any], message: str) -> None:
    odd = row("pooling", 0, 70.0, row="DeepSquare3")
    with pytest.raises(ValueError, match=message):
        table_findings(TABLE_2, [msgspec.structs.replace(odd, metrics={**odd.metrics, **metrics})])


def test_a_run_with_two_labels_counts_once() -> None:
    rows = [*rows_of("", BASE), *rows_of("pooling", BASE), *rows_of("pooling", BASE, row="Square-Pooling")]
    findings = table_findings(TABLE_2, rows)
    assert len(findings.rows[3].results[findings.schedules[0]].runs) == len(BASE)


def test_a_run_counts_once_and_the_first_folder_wins(tmp_path: Path) -> None:
    first = write_store([row("pooling", 0, 80.0)], tmp_path / "a")
    again = [row("pooling", 0, 70.0), row("pooling", 1, 71.0)]
    rows, notes = read_stores([first, write_store(again, tmp_path / "b"), tmp_path / "none"])
    assert [(r.seed, r.metrics["accuracy"]) for r in rows] == [(0, 0.8), (1, 0.71)]
    assert notes == []


def test_the_latest_of_two_recipes_counts() -> None:
    new: Mapping[str, Any] = {"recipe": {"weight_decay": 5e-4}, "date": "2025-12-01T00:00:00+00:00"}
    rows = [*rows_of("", BASE), *rows_of("pooling", BASE), *rows_of("", (70.0, 71.0, 72.0), **new)]
    findings = table_findings(TABLE_2, rows)
    (schedule,) = findings.schedules
    assert [run.accuracy for run in findings.rows[0].results[schedule].runs] == pytest.approx([70, 71, 72])
    assert not findings.rows[3].results
    assert findings.notes == (
        "cifar10, vanilla_cnn: 2 recipes are called “short”. The page shows the one that ran last and omits "
        "8 runs of the others.",
    )


def test_mean_curve() -> None:
    result = next(iter(table_findings(TABLE_2, rows_of("", BASE)).rows[0].results.values()))
    assert result.mean_curve[-1].mean == pytest.approx(81)
    assert len(result.mean_curve) == 12


@pytest.mark.parametrize(
    ("experiment", "part", "change", "reason"),
    [
        ("parity", "metrics", {"top1_agreement": "high"}, r"Expected `float \| null`, got `str`"),
        ("parity", "metrics", {"refused": 3}, "refused"),
        ("flowers", "metrics", {"accuracy": 71}, "<= 1.0"),
        ("flowers", "recipe", {"epochs": "ten"}, r"Expected `int \| null`, got `str` - at `\$.epochs`"),
        ("spirals", "recipe", {"model": ["a"]}, r"\$.model"),
        ("spirals", "metrics", {"means": {"test_loss": {"mean": 1, "low": 0, "high": None}}}, r"\$.means.*high"),
        ("regimes", "metrics", {"difference": None}, r"\$.difference"),
        ("fig2", "metrics", {"components": None}, r"\$.components"),
    ],
)
def test_a_field_of_another_type_is_named_with_file_and_line(
    experiment: str, part: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    plain = row("pooling", 0, 70.0, experiment=experiment)
    odd = row("pooling", 1, 70.0, experiment=experiment)
    rows = [plain, msgspec.structs.replace(odd, **{part: {**getattr(odd, part), **change}})]
    write_store(rows, tmp_path, "rows.jsonl")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*, seed 1: .*{reason}.*\. Remove that line"):
        read_stores([tmp_path])
