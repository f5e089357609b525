"""The store: every appended row is there, complete and once, whatever happens to its writers."""

import json
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import torch

from deepsquare.results import Row, Store, conditions


def row(seed: int = 0, **changes: object) -> Row:
    values = {"experiment": "e", "row": "r", "seed": seed, "recipe": {"lr": 0.1}, "metrics": {"accuracy": 0.5}}
    return Row(**{**values, "seconds": 1.5, **changes})  # type: ignore[arg-type]


def test_rows_come_back_with_their_conditions(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "rows.jsonl")
    assert store.rows() == []
    assert store.append(row())
    assert store.append(row(1, metrics={"curve": [0.1, 0.2]}))
    first, second = store.rows()
    assert (first.seed, first.metrics, first.seconds) == (0, {"accuracy": 0.5}, 1.5)
    assert second.metrics == {"curve": [0.1, 0.2]}
    assert first.hardware.endswith(f" CPUs, {torch.backends.cpu.get_cpu_capability()}")
    assert first.versions["torch"]
    assert first.date.startswith("20")
    assert set(conditions()) == {"versions", "hardware", "commit", "date"}


def test_the_same_run_is_stored_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    assert store.append(row())
    assert not store.append(row(metrics={"accuracy": 0.9}))
    assert store.append(row(recipe={"lr": 0.2}))
    assert [row.metrics["accuracy"] for row in store.rows()] == [0.5, 0.5]


def test_a_truncated_last_line_is_skipped_and_then_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    complete = store.path.read_bytes()
    store.append(row(1))
    store.path.write_bytes(store.path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="the last line is truncated; its run will be repeated"):
        assert [row.seed for row in store.rows()] == [0]
    store.append(row(2))
    assert [row.seed for row in store.rows()] == [0, 2]
    assert store.path.read_bytes().startswith(complete)


def test_a_complete_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    store.append(row(1))
    store.path.write_bytes(store.path.read_bytes()[:-1])
    store.append(row(2))
    assert [row.seed for row in store.rows()] == [0, 1, 2]


@pytest.mark.parametrize(("field", "value"), [("metrics", None), ("recipe", [1]), ("seed", "0"), ("date", None)])
def test_a_field_of_another_type_is_named(tmp_path: Path, field: str, value: object) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    store.path.write_text(json.dumps(json.loads(store.path.read_text()) | {field: value}) + "\n")
    with pytest.raises(ValueError, match=rf"line 1: not a row \(Expected .* at `\$\.{field}`\)"):
        store.rows()


def test_nan_is_rejected(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        store.append(row(metrics={"loss": float("nan")}))
    assert store.rows() == []


def test_a_malformed_line_in_the_middle_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    store.path.write_text("nonsense\n" + store.path.read_text())
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: not a row .*; remove that line to continue"):
        store.rows()
    store.path.write_text(json.dumps({"experiment": "e"}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: not a row \(Object missing required field `row`\)"):
        store.rows()


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    store.path.write_text(json.dumps(json.loads(store.path.read_text()) | {"colour": "red"}) + "\n")
    with pytest.raises(ValueError, match="unknown field `colour`"):
        store.rows()


def test_a_wrong_type_is_not_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$\.seed`"):
        store.append(row(seed="0"))  # type: ignore[arg-type]
    assert store.rows() == []


def test_replace_writes_the_rows_as_they_are(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    rows = [row(1, date="2026-01-01", commit="abc"), row(2)]
    store.replace(rows)
    assert store.rows() == rows
    with pytest.raises(ValueError, match="JSON"):
        store.replace([row(metrics={"loss": float("inf")})])
    assert store.rows() == rows


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    before = store.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write a row to .* \(No space left on device\); free some space"):
        store.append(row(1))
    monkeypatch.undo()
    assert store.path.read_bytes() == before
    assert store.append(row(1))


def _write(path: Path, writer: int) -> None:
    for seed in range(15):
        Store(path).append(row(seed, row=f"by {writer}"))
        Store(path).append(row(seed, row="by both"))


@pytest.mark.skipif(os.name != "posix", reason="locks are those of POSIX")
def test_two_writers_share_a_store(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    written = [(row.row, row.seed) for row in Store(path).rows()]
    assert len(written) == len(set(written)) == 45


def test_a_missing_field_is_named_where_it_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append(row(0))
    store.append(row(1, metrics={"times": {"pooling": {"seconds": 1}}}))
    second = store.rows()[1]
    for fields, key in (
        (second.metrics, "accuracy"),
        (second.metrics["times"]["pooling"], "rounds"),
        (second.recipe, "epochs"),
    ):
        with pytest.raises(ValueError, match=rf"line 2: the row has no '{key}' .*remove that line") as caught:
            fields[key]
        assert str(caught.value).startswith(str(store.path))
        assert isinstance(caught.value, KeyError)  # templates take it as a field that is not there
    assert store.rows()[1].metrics.get("accuracy") is None
    assert pickle.loads(pickle.dumps(store.rows())) == store.rows()


def test_a_deeply_nested_line_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.path.write_text('{"recipe": ' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: not a row .*; remove that line to continue"):
        store.rows()
