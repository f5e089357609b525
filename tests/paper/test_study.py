"""The study: its status follows from the rows, and what is missing runs in order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.study_plans import CIFAR, TINY, append, write
from helpers.toy_grid import RUNS, Toy
from scipy import stats

from deepsquare.data import tiny_imagenet
from deepsquare.data.in_memory import LabeledImages
from deepsquare.data.tiny_imagenet import TinyImageNet
from deepsquare.paper.cifar10.experiment import table_runs
from deepsquare.paper.grid.backend import Workers
from deepsquare.paper.grid.runner import InMemoryTraining, Task, run_tasks
from deepsquare.paper.options import OutputFolders
from deepsquare.paper.report.ledger import Evidence
from deepsquare.paper.report.page import render
from deepsquare.paper.report.study import study_families
from deepsquare.paper.study import experiment
from deepsquare.paper.study.experiment import TinyImageNetData, build_model, run_study, study_status
from deepsquare.paper.study.plan import PLAN, read_plan
from deepsquare.paper.study.status import core_hours, hours_per_day
from deepsquare.paper.tables import TABLE_2
from deepsquare.results import Row, Store
from deepsquare.surgery import equip_record


def test_the_committed_rows_of_the_long_schedule_count(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "results"
    families = {status.family.name: status for status in study_status(PLAN, committed)}
    labels = {row.row for row in families["CIFAR-10, every row"].done.values()}
    assert {"Original", "DeepSquare3", "DeepSquare8"} <= labels


def test_a_family_over_the_budget_is_dropped_from_the_end(tmp_path: Path) -> None:
    plan = write(tmp_path / "plan.toml", CIFAR, TINY, budget=13)  # 8 and 10 core-hours
    cifar, tiny = study_status(plan, tmp_path)
    assert cifar.fits
    assert not tiny.fits
    assert (tiny.left, tiny.look) == (0.0, "dropped: over the budget")
    small = TINY.replace('"tiny"', '"small"').replace("hours = 1.0", "hours = 0.1").replace('"64 px"', '"other"')
    assert [s.fits for s in study_status(write(plan, CIFAR, TINY, small, budget=13), tmp_path)] == [True, False, False]


def test_the_status_says_what_is_done_spent_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write(tmp_path / "plan.toml", CIFAR)
    append(tmp_path, seeds=1, cpu_seconds=1800.0)
    (status,) = study_status(plan, tmp_path)
    assert [(run.row, run.seed) for run in status.missing] == [("DeepSquare3", 0), ("Original", 1), ("DeepSquare3", 1)]
    assert status.spent == 0.5
    assert status.left == 1.5  # at the measured half an hour, not at the planned two
    assert status.look == "2 seeds"
    output = OutputFolders(tmp_path, tmp_path, tmp_path)
    assert run_study(plan=plan, status=True, output=output) is False
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 4 runs done" in printed
    assert "0.5 core-hours spent, 1.5 left; 0.5 core-hours a day came in: about 3 days more" in printed


def test_looks_are_announced_until_a_family_is_complete(tmp_path: Path) -> None:
    looks = CIFAR.replace("[2]", "[1, 2]").replace("[0.05]", "[0.01, 0.04]")
    plan = write(tmp_path / "plan.toml", looks)
    assert study_status(plan, tmp_path)[0].look == "1 seed"
    for row, seeds in (("Original", 1), ("DeepSquare3", 1)):
        append(tmp_path, seeds=seeds, row=row)
    assert study_status(plan, tmp_path)[0].look == "2 seeds"
    for row in ("Original", "DeepSquare3"):
        append(tmp_path, seeds=2, row=row)
    assert study_status(plan, tmp_path)[0].look == "complete"


def test_runs_of_an_earlier_family_count_for_the_look_and_their_time_for_the_estimate(tmp_path: Path) -> None:
    more = CIFAR.replace('"cifar"', '"more"').replace("seeds = 2", "seeds = 3").replace("[2]", "[3]")
    plan = write(tmp_path / "plan.toml", CIFAR, more)
    append(tmp_path, seeds=3, cpu_seconds=1800.0)
    append(tmp_path, seeds=1, row="DeepSquare3", cpu_seconds=1800.0)
    cifar, second = study_status(plan, tmp_path)
    assert [(run.row, run.seed) for run in second.missing] == [("DeepSquare3", 2)]
    assert (cifar.look, second.look) == ("2 seeds", "3 seeds")
    assert second.left == 0.5
    append(tmp_path, seeds=3, row="DeepSquare3", cpu_seconds=1800.0)
    store = tmp_path / "cifar10.jsonl"
    store.write_bytes(b"".join(row.to_json() for row in Store(store).rows() if row.seed != 1))
    assert [status.look for status in study_status(plan, tmp_path)] == ["2 seeds", "3 seeds"]  # seed 1 is the first's


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write(tmp_path / "plan.toml", CIFAR.replace('"cifar"', '"[/x] [red]"'))
    folder = tmp_path / "[red]"
    run_study(plan=plan, status=True, output=OutputFolders(folder, folder, folder))
    printed = "".join(capsys.readouterr().out.split())
    assert "[/x][red]" in printed
    assert "/[red]hasnorowsyet" in printed


def test_a_complete_study_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write(tmp_path / "plan.toml", CIFAR)
    for row in ("Original", "DeepSquare3"):
        append(tmp_path, seeds=2, row=row)
    assert run_study(plan=plan, output=OutputFolders(tmp_path, tmp_path, tmp_path)) is False
    assert "nothing is missing of the families that fit into the budget" in capsys.readouterr().out
    run_study(plan=plan, status=True, output=OutputFolders(tmp_path, tmp_path, tmp_path))
    assert "4.0 core-hours spent, 0.0 left" in " ".join(capsys.readouterr().out.split())


def test_core_hours_are_cpu_time_and_elapsed_time_where_a_row_has_none() -> None:
    row = Row("e", "r", 0, {}, {"cpu_seconds": 1800.0}, 7200.0, date="2026-01-01T10:00:00+00:00")
    assert core_hours(row) == 0.5
    older = Row("e", "r", 1, {}, {}, 7200.0, date="2026-01-02T10:00:00+00:00")
    assert core_hours(older) == 2.0
    assert hours_per_day([row, older]) == 1.25
    assert hours_per_day([]) is None


def test_a_row_of_another_plan_is_refused_before_anything_runs(tmp_path: Path) -> None:
    plan = write(tmp_path / "plan.toml", CIFAR)
    (run,) = table_runs([TABLE_2], "long", 1, ["Original"])
    recipe = {**run.to_recipe(), "lr": 0.4}
    Store(tmp_path / "cifar10.jsonl").append(Row("cifar10", "Original", 0, recipe, {"accuracy": 0.1}, 1.0))
    before = (tmp_path / "cifar10.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"cifar10.jsonl, line 1: Original, long, seed 0 .* \(lr was 0.4, is 0.1\)"):
        run_study(plan=plan, output=OutputFolders(tmp_path, tmp_path, tmp_path))
    assert (tmp_path / "cifar10.jsonl").read_bytes() == before


def test_rows_without_values_and_misplaced_rows_are_no_results(tmp_path: Path) -> None:
    plan, store = write(tmp_path / "plan.toml", CIFAR, TINY), tmp_path / "cifar10.jsonl"
    append(tmp_path, seeds=1)
    store.rename(tmp_path / "tiny_imagenet.jsonl")  # another experiment's store
    assert not study_status(plan, tmp_path)[0].done
    append(tmp_path, seeds=1)
    row = Store(store).rows()[0].to_json()
    for old, new, message in (
        (b'{"accuracy": 0.8}', b"{}", "line 2: Original, long, seed 0 has seconds 3600.0 and no accuracy"),
        (b'{"accuracy": 0.8}', b'{"accuracy": 0.8, "cpu_seconds": "x"}', "has seconds 'x' and an accuracy"),
        (b": 3600.0", b": -1.0", "has seconds -1.0 and an accuracy; expected a time and an accuracy. Remove that line"),
    ):
        store.write_bytes(b"\n" + row.replace(old, new))
        with pytest.raises(ValueError, match=message):
            study_status(plan, tmp_path)


def test_results_that_are_no_folder_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, missing = write(tmp_path / "plan.toml", CIFAR), tmp_path / "missing"
    assert run_study(plan=plan, status=True, output=OutputFolders(missing, missing, missing)) is False
    assert "has no rows yet; give the folder of the rows as --results" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match=r"--results .*plan.toml is a file; expected the folder of the rows"):
        study_status(plan, plan)
    (tmp_path / "cifar10.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"cifar10.jsonl is a folder; expected a file with one row per line"):
        study_status(plan, tmp_path)


def test_a_store_of_an_older_version_is_refused_with_file_and_line(tmp_path: Path) -> None:
    plan = write(tmp_path / "plan.toml", CIFAR)
    append(tmp_path, seeds=1)
    with (tmp_path / "cifar10.jsonl").open("a") as file:
        file.write('{"experiment": "cifar10", "label": "Original", "seed": 1}\n')
    with pytest.raises(ValueError, match=r"cifar10.jsonl, line 2: not a row"):
        run_study(plan=plan, output=OutputFolders(tmp_path, tmp_path, tmp_path))


def test_tiny_imagenet_is_asked_for_before_anything_runs(tmp_path: Path) -> None:
    plan, output = write(tmp_path / "plan.toml", TINY, CIFAR), OutputFolders(tmp_path, tmp_path, tmp_path)
    with pytest.raises(
        ValueError, match=r"10 of the 14 runs need Tiny ImageNet; give its folder as --data, or .* 'tiny' "
    ):
        run_study(plan=plan, output=output)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder; expected the folder of Tiny ImageNet"):
        run_study(plan=plan, data=tmp_path / "nowhere", output=output)


def test_a_model_that_cannot_be_built_is_named_before_the_data_is_read(tmp_path: Path) -> None:
    plan = write(tmp_path / "plan.toml", TINY.replace("shufflenet_v2_x0_5", "shufflenet_v9"))
    with pytest.raises(ValueError, match=r"row 'plain' \(64 px\) has no usable model: no model named 'shufflenet_v9'"):
        run_study(plan=plan, data=tmp_path / "nowhere", output=OutputFolders(tmp_path, tmp_path, tmp_path))


def test_the_network_has_no_stem_pool_and_keeps_its_spec(tmp_path: Path) -> None:
    plain, equipped = read_plan(write(tmp_path / "plan.toml", TINY)).family[0].runs()[:2]
    model = build_model(equipped)
    maps: list[torch.Size] = []
    model.get_submodule("stage4").register_forward_hook(lambda module, inputs, output: maps.append(output.shape[2:]))
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 200)
    assert maps == [(4, 4)]
    record = equip_record(model)
    assert record is not None
    assert not any(isinstance(module, torch.nn.MaxPool2d) for module in build_model(plain).modules())
    with pytest.raises(ValueError, match="vanilla_cnn has no max-pooling in its stem; set stem_pool = true"):
        build_model(replace(plain, model="vanilla_cnn"))


def test_dropout_is_that_of_the_recipe_in_every_row(tmp_path: Path) -> None:
    for recipe, ratios in (("dropout = 0.2", [0.2]), ("dropout = 0.0", [])):
        family = read_plan(write(tmp_path / "plan.toml", TINY + f"recipe = {{ {recipe} }}\n")).family[0]
        for run in family.runs()[:2]:
            assert [m.p for m in build_model(run).modules() if isinstance(m, torch.nn.Dropout)] == ratios


@pytest.fixture
def random_images(monkeypatch: pytest.MonkeyPatch) -> TinyImageNet:
    """Random images in place of the data set."""
    rng = np.random.default_rng(0)
    parts = [
        LabeledImages(
            torch.from_numpy(rng.integers(0, 256, (count, 3, 64, 64), dtype=np.uint8)), torch.arange(count) % 200
        )
        for count in (400, 200)
    ]
    data = TinyImageNet(parts[0], parts[1], tuple(f"n{number:08}" for number in range(200)))
    monkeypatch.setattr(tiny_imagenet, "load_tiny_imagenet", lambda folder, size=64: data)
    experiment._splits.cache_clear()
    return data


def test_a_run_stores_top5_and_which_images_were_right(random_images: TinyImageNet, tmp_path: Path) -> None:
    family = TINY + "recipe = { epochs = 1, warmup = 0.0, batch_size = 32 }\n"
    _, run = read_plan(write(tmp_path / "plan.toml", family)).family[0].runs()[:2]
    store = tmp_path / "tiny_imagenet.jsonl"
    row = Task(run, InMemoryTraining(TinyImageNetData(tmp_path), build_model), store)(lambda key, metrics: None)
    assert row is not None
    assert {"accuracy", "top5", "correct", "train_loss"} <= row.metrics.keys()
    assert row.recipe["stem_pool"] is False
    assert Store(store).rows()[0].key == run.key
    experiment._splits.cache_clear()


def test_held_out_training_images_take_the_place_of_the_validation_images(
    random_images: TinyImageNet, tmp_path: Path
) -> None:
    family = TINY + "recipe = { held_out = 100, batch_size = 30 }\n"
    run = read_plan(write(tmp_path / "plan.toml", family)).family[0].runs()[0]
    batches, evaluation = TinyImageNetData(tmp_path)(run)
    assert len(batches) == 300 // 30
    assert sum(len(labels) for _, labels in evaluation()) == 100
    experiment._splits.cache_clear()


@pytest.mark.slow
def test_runs_of_several_stores_are_trained_by_one_pool(tmp_path: Path) -> None:
    stores = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    tasks = [Task(run, InMemoryTraining(Toy()), stores[run.seed]) for run in RUNS]
    run_tasks(tasks, Workers(2))
    for seed, store in enumerate(stores):
        assert {row.key for row in Store(store).rows()} == {run.key for run in RUNS if run.seed == seed}
    assert list((tmp_path / ".runs").glob("*")) == []


def study_row(label: str, seed: int, accuracy: float, diverged: str | None = None) -> Row:
    family = next(family for family in read_plan().family if family.name == "ShuffleNetV2-0.5×")
    run = next(run for run in family.runs() if (run.row, run.seed) == (label, seed))
    metrics = {"accuracy": accuracy, "top5": 2 * accuracy, "diverged": diverged}
    return Row("tiny_imagenet", label, seed, run.to_recipe(), metrics, 1.0)


def shown_of(rows: list[Row]) -> list[dict[str, Any]]:
    return study_families(rows, Evidence(rows, [], {}, {}, None, None).against_plain())


PLAIN, POOLED = "ShuffleNetV2-0.5×", "Square-Pooling (SP)"


def test_the_report_gives_no_interval_before_the_first_look() -> None:
    rows = [study_row(PLAIN, seed, 0.40 + 0.01 * seed) for seed in range(3)]
    rows += [study_row(POOLED, seed, 0.42 + 0.01 * seed) for seed in (0, 2)]  # two pairs; seed 1 is missing
    (shown,) = shown_of(rows)
    plain, pooled = shown["entries"]
    assert (plain["seeds"], plain["top1"], plain["top5"]) == ("3 of 5", pytest.approx(41), pytest.approx(82))
    assert pooled["so_far"] == pytest.approx(2)
    assert (pooled["judged"], pooled["next_look"]) == (None, 3)
    assert shown_of([]) == []


@pytest.mark.parametrize(("scatter", "verdict"), [(1.0, "inconclusive"), (0.1, "reproduced")])
def test_a_look_uses_its_seeds_and_the_error_probability_that_it_spends(scatter: float, verdict: str) -> None:
    differences = [2 - scatter, 2.0, 2 + scatter, 9.0]  # the fourth seed comes after the look at three
    rows = [study_row(PLAIN, seed, 0.40) for seed in range(4)]
    rows += [study_row(POOLED, seed, 0.40 + difference / 100) for seed, difference in enumerate(differences)]
    judged = shown_of(rows)[0]["entries"][1]["judged"]
    assert judged.n == (3, 3)
    assert judged.mean == pytest.approx(2)
    # Student's t for 95% and 2 degrees of freedom, and 0.1 points for the images. The verdict is at 99%.
    se = (scatter**2 / 3 + 0.1**2) ** 0.5
    df = min(4, se**4 / (scatter**2 / 3) ** 2 * 2)
    assert judged.high - judged.mean == pytest.approx(stats.t.ppf(0.975, df) * se, rel=1e-5)
    assert judged.verdict.value == verdict


def test_a_diverged_run_counts_as_chance() -> None:
    rows = [study_row(PLAIN, 0, 0.40), study_row(POOLED, 0, 0.30, diverged="epoch 3: the loss is nan")]
    assert shown_of(rows)[0]["entries"][1]["so_far"] == pytest.approx(0.5 - 40)


def test_the_page_has_the_study_and_keeps_its_rows_out_of_table_7(tmp_path: Path) -> None:
    Store(tmp_path / "tiny_imagenet.jsonl").append(study_row(PLAIN, 0, 0.4321))
    page = render([tmp_path], [], tmp_path / "report")
    summary = (tmp_path / "report" / "summary.md").read_text()
    assert "| ShuffleNetV2-0.5× | 1 of 5 | 43.21 | 86.42 | – | – |" in summary
    assert "proxy" not in summary
    assert '<td class="n">43.21</td>' in page.read_text()
