"""The simulation of the rule: its runs have the properties that were measured, and it recognizes false verdicts."""

from pathlib import Path

import numpy as np
import pytest

from deepsquare.paper.options import OutputFolders
from deepsquare.paper.regimes import LONG, Regime, regimes
from deepsquare.paper.simulation import (
    TRUTHS,
    Outcome,
    Truth,
    draw_study,
    improvements,
    is_false,
    run_rule,
    shift_for,
    simulate,
    undecidable,
)
from deepsquare.paper.statistics import image_variance
from deepsquare.paper.verdict import Differs, Diverges, Hypothesis, NoDifference, NotWorse, Verdict
from deepsquare.results import Store

SMALL = Regime("small", "cifar10", "long", ((3, 0.01), (6, 0.04)), {})


def test_simulated_runs_scatter_as_the_measured_ones() -> None:
    effects = {f"row {k}": 0.0 for k in range(8)} | {"better": 1.0}
    samples = draw_study(effects, SMALL, (0.0,), np.random.default_rng(0))
    values = {name: sample.values for name, sample in samples.items()}
    assert {len(accuracies) for accuracies in values.values()} == {6}
    within = np.sqrt(np.mean([np.var(accuracies, ddof=1) for accuracies in values.values()]))
    assert within == pytest.approx(0.25, abs=0.04)  # of 60 epochs: 0.23
    one, other = samples["row 0"].correct[0], samples["row 0"].correct[1]
    assert np.mean(one != other) == pytest.approx(0.13, abs=0.02)
    correct = {name: sample.correct for name, sample in samples.items()}
    spread = [image_variance(correct, {"row 0": 1.0, f"row {k}": -1.0}) or 0.0 for k in range(1, 8)]
    assert np.sqrt(np.mean(spread)) == pytest.approx(0.1, abs=0.02)
    plain = np.mean([values[f"row {k}"] for k in range(8)])
    assert np.mean(values["better"]) - plain == pytest.approx(1.0, abs=0.4)
    assert shift_for(0.0) == 0 < shift_for(1.0)


EFFECTS = {"Original": 0.0, "row": 0.5}
DIFFERS, SAME = Differs.between("row", "Original", 1.0), NoDifference.between("row", "Original")


@pytest.mark.parametrize(
    ("hypothesis", "true", "false_verdicts"),
    [
        (DIFFERS, 0.5, "contrary"),
        (DIFFERS, 1.0, "contrary, smaller than claimed"),
        (DIFFERS, 1.5, "contrary, smaller than claimed"),
        (DIFFERS, 0.0, "contrary, reproduced"),
        (DIFFERS, -0.5, "reproduced"),
        (SAME, 0.0, "contrary"),
        (SAME, 0.6, "reproduced"),
        (NotWorse.between("row", "Original"), -0.4, "contrary"),
        (NotWorse.between("row", "Original"), -0.6, "reproduced"),
        (Diverges({"row": 1.0}), 0.0, "reproduced"),
    ],
)
def test_false_verdicts(hypothesis: Hypothesis, true: float, false_verdicts: str) -> None:
    kinds = [Verdict.REPRODUCED, Verdict.CONTRARY]
    kinds += [Verdict.SMALLER] if isinstance(hypothesis, Differs) else []
    found = [kind.value for kind in kinds if is_false(hypothesis, kind, {"Original": 0.0, "row": true})]
    assert sorted(found) == false_verdicts.split(", ")
    assert not is_false(hypothesis, Verdict.INCONCLUSIVE, EFFECTS)


def test_a_large_effect_is_found_and_a_missing_one_is_smaller() -> None:
    claim = Differs.between("DeepSquare3", "Original", 1.06)

    def outcome(truth: Truth) -> Outcome:
        return simulate(truth, 3, 0, SMALL, [claim])

    true, absent = outcome(Truth("large", lambda claimed: 3.0 * (claimed > 0))), outcome(TRUTHS[0])
    assert true.verdicts == {"DeepSquare3": {Verdict.REPRODUCED: 3}}
    assert absent.verdicts == {"DeepSquare3": {Verdict.SMALLER: 3}}
    assert true.with_false_verdict == absent.with_false_verdict == 0


def test_the_command_stores_a_row_for_each_truth(tmp_path: Path) -> None:
    run_rule(studies=1, output=OutputFolders(results=tmp_path))
    rows = Store(tmp_path / "error_rates.jsonl").rows()
    assert [row.row for row in rows] == [truth.name for truth in TRUTHS]
    power = undecidable(rows)
    assert power.keys() <= improvements().keys() | set(rows[1].metrics["verdicts"])
    assert "DeepSquare6" not in power  # divergence is not simulated
    with pytest.raises(ValueError, match="studies is 0; expected at least 1"):
        run_rule(studies=0, output=OutputFolders(results=tmp_path))


def test_the_planned_rows_are_simulated() -> None:
    assert improvements().keys() <= regimes()[LONG].planned.keys()
    assert improvements()["DeepSquare3"] == 1.06
    assert improvements()["DeepSquare6"] == 0  # divergence
