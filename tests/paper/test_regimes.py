"""Figures 4 and 6 by training regime: how settings are chosen and judged, and the run."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.report import Page, write_store
from msgspec import structs
from scipy import stats

from deepsquare.cost import Cost
from deepsquare.paper.report import render
from deepsquare.paper.spirals import ablation, experiment, regimes
from deepsquare.paper.spirals.ablation import PAIR
from deepsquare.paper.spirals.networks import ONE_ARM, THREE_ARMS, Networks, train
from deepsquare.paper.spirals.regimes import DEFAULT, Regime
from deepsquare.paper.verdict import Verdict
from deepsquare.results import Row, Store

GRID = Regime(THREE_ARMS, "constant", 5)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("regimes")
    returned = regimes.run(folder, folder, seeds=4, tuning_seeds=2, shorten=75)
    assert (folder / "spirals_regimes.png").read_bytes().startswith(b"\x89PNG")
    stored = Store(folder / "spirals_regimes.jsonl").rows()
    assert [row.row for row in stored] == [row.row for row in returned]
    return stored


def test_seeds_are_fresh() -> None:
    run = experiment._Run(0, 100, 1)
    cases = len(ablation.CASES)
    stacked = ablation._stacked("relu", run.others[:10], cases, lambda case, *of: ONE_ARM.draw(*of)).seeds
    used = {*range(run.start, run.start + 10), *run.others, *run.fresh, *stacked}
    tuning = set(range(regimes.FIRST_TUNING_SEED, regimes.FIRST_TUNING_SEED + regimes.TUNING_SEEDS))
    judged = set(range(regimes.FIRST_SEED, regimes.FIRST_SEED + 100))
    assert regimes.TUNING_SEEDS >= 10
    assert len(used | tuning | judged) == len(used) + len(tuning) + len(judged)


def test_the_setting_with_the_best_mean_is_chosen() -> None:
    good, unsteady, equal, *others = GRID.settings

    def values(loss: list[float], accuracy: list[float]) -> dict[str, np.ndarray]:
        return {"loss": np.array(loss), "accuracy": np.array(accuracy)}

    found = {(setting, 5): values([9, 9, 9], [0.4, 0.4, 0.4]) for setting in others}
    found[good, 5] = values([2, 2, 2], [0.5, 0.5, 0.5])
    found[unsteady, 5] = values([1, 1, 7], [0.75, 0.75, 0.75])  # the lower median, the higher mean
    found[equal, 5] = values([2.5, 2.5, 2.5], [0.75, 0.75, 0.75])  # of equal accuracy and lower loss
    assert regimes.choose(GRID, "loss", found) == (good, 2)
    assert regimes.choose(GRID, "accuracy", found) == (equal, 0.75)
    found[good, 5] = values([2, 2, math.nan], [0.9, 0.9, math.nan])  # counted as 9 and as 1/3
    assert regimes.choose(GRID, "loss", found) == (equal, 2.5)
    assert regimes.choose(GRID, "accuracy", found)[0] == equal


def test_a_diverged_network_is_the_worst() -> None:
    nan = math.nan
    loss = regimes.settle(THREE_ARMS, "loss", np.array([[0.1, nan], [5.0, np.inf]]))
    np.testing.assert_array_equal(loss, [[0.1, 5.0], [5.0, 5.0]])
    np.testing.assert_allclose(regimes.settle(THREE_ARMS, "loss", np.array([0.1, nan])), [0.1, math.log(3)])
    np.testing.assert_allclose(regimes.settle(THREE_ARMS, "accuracy", np.array([0.9, nan])), [0.9, 1 / 3])
    np.testing.assert_allclose(regimes.settle(THREE_ARMS, "accuracy", np.array([0.2, nan])), [0.2, 0.2])
    _, points = ONE_ARM.draw(0, "test")
    assert regimes.constant_prediction(ONE_ARM, "loss") == pytest.approx(points.var(1).mean().item(), rel=0.02)
    wild = replace(DEFAULT[THREE_ARMS], optimizer="sgd", lr=1e9)
    found = regimes.evaluate(THREE_ARMS, "relu_square", [(wild, 9)], range(2), "test")
    assert all(np.isnan(values).all() for values in found[wild, 9].values())


def test_shared_training_equals_training_alone() -> None:
    slow, decay = DEFAULT[ONE_ARM], replace(DEFAULT[ONE_ARM], lr=0.01, decay=True)
    trained = [(slow, 10), (slow, 30), (decay, 10), (decay, 30), (replace(slow, optimizer="sgd"), 10)]
    found = regimes.evaluate(ONE_ARM, "relu_square", trained, range(3), "test")
    assert found.keys() == set(trained)
    for setting, steps in trained:
        networks = Networks(ONE_ARM, "relu_square", [setting], range(3))
        losses = networks.losses(train(networks, steps, [steps])[steps], *networks.batch("test"))
        np.testing.assert_allclose(found[setting, steps]["loss"], losses, rtol=1e-4)


def test_holm_by_hand() -> None:
    # In order 0.01 × 4, 0.015 × 3, 0.03 × 2 and 0.04 × 1, each at least the one before.
    assert regimes.holm([0.03, 0.01, 0.04, 0.015]) == pytest.approx([0.06, 0.04, 0.06, 0.045])
    assert regimes.holm([0.6, 0.9]) == [1, 1]
    clear = {"mean": -1.0, "low": -1.5, "high": -0.5}
    assert regimes.verdict("loss", {**clear, "p_holm": 0.049}, 9) is Verdict.REPRODUCED
    assert regimes.verdict("accuracy", {**clear, "p_holm": 0.049}, 9) is Verdict.CONTRARY
    assert regimes.verdict("loss", {**clear, "p_holm": 0.05}, 9) is Verdict.INCONCLUSIVE


def test_differences_are_those_of_the_stored_values(rows: list[Row]) -> None:
    judged = [row for row in rows if "difference" in row.metrics]
    assert len(judged) == 3 * 3 + 2 * 3 * 4
    for row in judged:
        metric = row.recipe["metric"]
        relu, square = (np.array(row.metrics[name][f"test_{metric}"]) for name in PAIR)
        difference = row.metrics["difference"]
        assert len(relu) == row.recipe["seeds"] == 4
        assert difference["mean"] == pytest.approx(np.mean(square - relu), rel=1e-4, abs=1e-12)
        assert difference["median"] == pytest.approx(np.median(square - relu), rel=1e-4, abs=1e-12)
        better = square > relu if metric == "accuracy" else square < relu
        assert difference["share_better"] == np.mean(better)
        if np.ptp(square - relu):
            assert difference["p"] == pytest.approx(stats.ttest_rel(square, relu).pvalue, rel=1e-3)
        assert difference["p_holm"] >= difference["p"]
    for task in (ONE_ARM, THREE_ARMS):
        found = [row.metrics["difference"] for row in judged if row.recipe["task"] == task.name]
        assert [p["p_holm"] for p in found] == pytest.approx(regimes.holm([p["p"] for p in found]), rel=1e-3)


def test_rows_name_the_chosen_settings(rows: list[Row]) -> None:
    by_name = {row.row: row for row in rows}
    search = by_name["one-arm/settings"].metrics
    assert {setting["lr"] for setting in search["settings"]} == {0.001, 0.003, 0.01, 0.03, 0.1, 0.3}
    for name in PAIR:
        losses = np.array(search["validation"][name]["decay/40"]["loss"], dtype=float)  # None becomes NaN
        means = np.where(np.isfinite(losses), losses, np.nanmax(losses)).mean(1)
        chosen = by_name["one-arm/loss/decay/40"].metrics[name]
        assert chosen["setting"] == {**search["settings"][int(means.argmin())], "decay": True}
        assert chosen["validation_loss"] == pytest.approx(means.min(), rel=1e-3)
        assert by_name["one-arm/loss/default/40"].metrics[name]["setting"]["lr"] == 0.001
        assert by_name["three-arm/accuracy/default/8"].metrics[name]["validation_accuracy"] is None


def test_the_pages_show_every_regime(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Cost(parameters=1, macs=1, elementwise_muls=1, activation_bytes=1)  # of the large networks: slow to count
    monkeypatch.setattr("deepsquare.paper.report.page.cost_of", lambda model, spec: costs)
    (tmp_path / "spirals_regimes.png").write_bytes(b"\x89PNG")
    page = Page(render([write_store(rows, tmp_path)], [tmp_path], tmp_path))
    lines = [line for line in page.tables["regimes"] if line[0] != "Training"]
    assert len(lines) == 9 + 2 * 12
    assert len([address for address in page.addresses if address.startswith("data:image/png")]) == 1
    older = structs.replace(rows[1], metrics={**rows[1].metrics, "difference": {}})  # of rows with one label the first
    shown = regimes.judgements([*rows, older])["one-arm", "loss"][0]
    assert lines[0][:2] == ["Adam at 0.001, not tuned", "10"]
    assert lines[0][4] == shown["difference"].format(signed=True)
    assert shown["verdict"].value in lines[0][-1]
    counts = [found["verdict"] for found in regimes.judgements(rows)["one-arm", "loss"]].count(Verdict.CONTRARY)
    assert f"contrary</span> in {counts}, " in page.text
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert f"| Adam at 0.001, not tuned | 10 | {shown['relu'].format()} |" in summary
    assert page.line("conditions", "spirals_regimes")[2] == "4 a network"


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds is 1; expected 2 to 125000"):
        regimes.run(tmp_path, tmp_path, seeds=1)
    with pytest.raises(ValueError, match="shorten is 151; expected 1 for the whole training, up to 150"):
        regimes.run(tmp_path, tmp_path, shorten=151)
