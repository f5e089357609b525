"""The report on the ablations: tables and sentences from their rows, and nothing before there are any."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.report import Page, write_store

from deepsquare.paper.grid.runner import TrainingRun
from deepsquare.paper.report.ablations import ablations
from deepsquare.paper.report.after_training import after_training
from deepsquare.paper.report.page import render
from deepsquare.paper.study.plan import read_plan
from deepsquare.results import Row

Value = Callable[[TrainingRun], float | None]  # the accuracy in per cent; None for a diverged run


def rows_of(family: str, value: Value, **metrics: Any) -> list[Row]:
    runs = next(one for one in read_plan().family if one.name == family).runs()
    return [row(run, value(run), **metrics) for run in runs]


def row(run: TrainingRun, accuracy: float | None, **metrics: Any) -> Row:
    final = {"accuracy": None if accuracy is None else accuracy / 100, "diverged": None if accuracy else "epoch 1"}
    return Row(run.experiment, run.row, run.seed, run.to_recipe(), {**final, **metrics}, 1.0)


def by_rate(run: TrainingRun) -> float:
    """Original has 70, 72 and 71% at the three rates, and a point more with each seed; others differ by a constant."""
    base = {"lr × 1/4": 70, "lr × 1": 72, "lr × 4": 71}[run.schedule] + run.seed
    gains = {"DeepSquare3": 1, "GAP × 2": 0.25, "DeepSquare1": -2}
    noise = 0.01 * (run.seed == 1)
    return base if run.row == "Original" else base + gains.get(run.row, 0.0) + noise


def test_nothing_is_said_before_there_are_rows() -> None:
    assert ablations([]) == []
    assert after_training([]) == []


def test_the_scale_experiment_compares_rows_with_original_at_each_rate() -> None:
    (section,) = [s for s in ablations(rows_of("scale", by_rate)) if s["title"].startswith("Scale")]
    assert (section["done"], section["planned"]) == (207, 207)
    lines = {line[0]: line[1:] for line in section["table"]}
    assert lines["Original"] == ["71.00", "–", "73.00", "–", "72.00", "–"]
    assert lines["DeepSquare3"][:2] == ["72.00", "+1.00 [+0.99, +1.02]"]
    first, best, at_once, spread = section["sentences"]
    assert first == "Original is best at × 1 (73.00%)."
    assert "ahead: DeepSquare3 (+1.00), GAP × 2 (+0.25); behind: DeepSquare1 (−2.00); undecided: DeepSquare2" in best
    assert "GAP × 2 minus Original is +0.25 [+0.24, +0.27], Square-Pooling minus GAP × 2 +0.75" in at_once
    assert spread.startswith("Between their best and their worst rate lie 2.0 points in the mean of")
    assert section["chart"].count(">DeepSquare3<") == 1
    assert "DeepSquare3: × ¼ 72.0%, × 1 74.0%, × 4 73.0%" in section["chart"]


def test_no_interval_and_no_sentence_before_all_seeds_are_there() -> None:
    rows = [row for row in rows_of("scale", by_rate) if row.seed < 2]
    section = ablations(rows)[0]
    assert section["sentences"] == []
    assert {line[0]: line[1:3] for line in section["table"]}["DeepSquare3"] == ["71.50", "–"]


def test_divergence_of_deepsquare6_is_counted_as_chance() -> None:
    rows = rows_of("DeepSquare6", lambda run: None if (run.row, run.seed) == ("DeepSquare6, 5+", 0) else 60.0)
    section = next(s for s in ablations(rows) if s["title"].startswith("DeepSquare6"))
    assert section["table"][0][1] == "60.00 (60.0 to 60.0)"
    assert section["table"][3][1] == "52.86 (10.0 to 60.0, 1 of 7 diverged)"
    counted, bound = section["sentences"]
    assert counted == "3 of 84 runs diverged: −s·x² (5s-) 0, +s·x² (5s+) 0, −x² (5-) 0, +x² (5+) 3."
    assert "below 35% with 95% confidence" in bound  # 1 − 0.05^(1/7)


def test_activations_and_starts() -> None:
    rows = rows_of("activations and depth", lambda run: 60 + run.seed if "EleSquare" in run.row else 70.0 + run.seed)
    section = next(s for s in ablations(rows) if s["title"].startswith("All activations"))
    assert section["table"][2][0] == "EleSquare"
    assert "−10.00 [−10.00, −10.00] with 7 layers" in section["sentences"][1]
    rows = rows_of("Square-Softmin start", lambda run: 70 + ("bias" in run.row and "shared" in run.row) + run.seed)
    section = next(s for s in ablations(rows) if s["title"].startswith("The start"))
    assert [line[4] for line in section["table"]] == [
        "0.00 [0.00, 0.00]",
        "+1.00 [+1.00, +1.00]",
        "0.00 [0.00, 0.00]",
        "+1.00 [+1.00, +1.00]",
    ]
    assert "excludes 0: DeepSquare5s- with its scale shared (+1.00), DeepSquare8 with" in section["sentences"][0]


def measured(seed: int) -> dict[str, Any]:
    probe = {"M": 0.7, "G": 0.71 + 0.001 * seed, "M, S²": 0.72, "M, M²": 0.72 + 0.01 * (seed - 1), "images": 10}
    signs = {"all": [0.0, 1.0, 0.5 if seed == 2 else 0.04], "own": [0.0, 1.0, 1.0]}
    anew = {"accuracy": 0.7 + 0.02 * (seed == 0), "loss": 1.0, "overflows": 0, "images": 10}
    return {"linear_probe": probe, "softmin_signs": signs, "reestimated_bn": anew}


def test_measurements_after_training() -> None:
    runs = next(one for one in read_plan().family if one.name == "scale").runs()
    runs = [run for run in runs if (run.row, run.schedule) == ("DeepSquare5s-", "lr × 1")]
    signs, anew, probe = after_training(
        [row(run, 65.0 if run.seed == 2 else 70.0, **measured(run.seed)) for run in runs]
    )
    assert signs["table"] == [["DeepSquare5s-", "CIFAR-10, lr × 1, 10 epochs", "70.0 (0), 70.0 (0), 65.0 (1)"]]
    assert signs["sentences"][0].startswith("In 2 of 3 runs with −s·x²")
    assert "differ from the others by −5.00 points in the mean; they are lower in 1" in signs["sentences"][1]
    assert anew["table"][0][2:4] == ["68.33", "70.67"]
    assert "+2.33 points in the mean of 3 runs, and raise it by more than half a point in 2" in anew["sentences"][0]
    assert probe["table"][0][2:] == [
        "70.00", "71.10", "72.00", "72.00", "+1.10 [+0.85, +1.35]", "0.00 [−2.48, +2.48]"
    ]  # fmt: skip
    assert probe["sentences"] == [
        "(G) is ahead of (M) in 1 of 1 rows, behind in 0.",
        "(M, S²) is ahead of (M, M²) in 0 of 1 rows, behind in 0.",
    ]


def test_the_page_and_the_summary_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepsquare.cost import Cost

    monkeypatch.setattr("deepsquare.paper.report.page.cost_of", lambda model, spec: Cost(1, 1, 1, 1))
    empty = Page(render([tmp_path], [], tmp_path / "empty"))
    assert "ablations" not in empty.ids
    folder = write_store(rows_of("scale", by_rate, **measured(0)), tmp_path / "rows", "cifar10_ablation.jsonl")
    page = Page(render([folder], [], tmp_path / "page"))
    assert page.line("ablations", "DeepSquare3")[1:3] == ["72.00", "+1.00 [+0.99, +1.02]"]
    assert "#ablations" in page.addresses
    assert page.line("table2", "DeepSquare3")[4:] == []  # its rows stay out of Table 2
    summary = (tmp_path / "page" / "summary.md").read_text()
    assert "- Original is best at × 1 (73.00%).\n" in summary
    assert "| DeepSquare3 | 72.00 | +1.00 [+0.99, +1.02] |" in summary
    assert "\n| Method | Runs | M | G | M, S² | M, M² | G minus M | (M, S²) minus (M, M²) |\n|---|---|" in summary
