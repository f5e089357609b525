"""The file of a training state: damage is noticed, and the state before it is continued."""

import io
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.archives import BOMBS, archive_of
from helpers.points import Points
from helpers.runs import RECIPE
from torch import nn

from deepsquare._files import append_checksum, verify_checksum
from deepsquare.training import StoppedError, Trainer, fit
from deepsquare.training.state_file import FIELDS, previous_path, read_state, write_state


def state(number: int) -> dict[str, Any]:
    return {**dict.fromkeys(FIELDS), "model": {"weight": torch.full((50,), float(number))}}


def number(path: Path) -> float:
    return float(read_state(path)[0]["model"]["weight"][0])


def test_any_damaged_byte_is_noticed_and_the_state_before_it_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, rng = tmp_path / "last.pt", random.Random(0)
    write_state(path, state(1))
    write_state(path, state(2))
    assert (number(path), number(previous_path(path))) == (2, 1)
    assert previous_path(path).name == "last.previous.pt"
    content = path.read_bytes()
    for position in (0, len(content) - 1, *rng.sample(range(len(content)), 150)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert number(path) == 1
        assert f"{path} is damaged; the run continues from {previous_path(path)}" in caplog.messages[-1]
    for length in (0, 1, 40, 49, 1000, len(content) - 49, len(content) - 1):
        path.write_bytes(content[:length])
        assert number(path) == 1
    path.write_bytes(content[:-49])  # a whole archive
    assert torch.load(path, weights_only=True)["version"] == 4
    assert number(path) == 1
    previous_path(path).unlink()
    with pytest.raises(ValueError, match=r"last\.pt has lost its checksum, so it is damaged; remove it to start again"):
        read_state(path)
    previous_path(path).write_bytes(b"damaged too")
    path.write_bytes(content[:1000])
    with pytest.raises(ValueError, match=r"last\.pt is not a training checkpoint, or is damaged; remove it"):
        read_state(path)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("links", [True, False])
def test_killed_between_any_two_system_calls_one_state_is_left(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [-1]

    def killing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] -= 1
            if -50 < calls[0] < 0:  # at 0 calls left, and in every later one
                raise Killed
            return function(*args, **kwargs)

        return call

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("no hard links")

    for owner, name in (
        (os, "replace"), (os, "fsync"), (shutil, "copyfile"), (Path, "unlink"), (Path, "touch"), (Path, "chmod"),
        (Path, "write_bytes"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, killing(getattr(owner, name)))
    monkeypatch.setattr(os, "link", killing(os.link) if links else refuse)
    kept = []
    for count in range(12):
        calls[0] = 10_000
        path = tmp_path / str(count) / "last.pt"
        path.parent.mkdir()
        write_state(path, state(1))
        write_state(path, state(2))
        calls[0] = count
        with suppress(Killed):
            write_state(path, state(3))
        calls[0] = 10_000
        kept.append(number(path))
        write_state(path, state(4))
        assert (number(path), number(previous_path(path))) == (4, kept[-1])
        assert sorted(file.name for file in path.parent.iterdir()) == ["last.previous.pt", "last.pt"]
    assert kept[0] == 2
    assert kept[-1] == 3


def test_a_damaged_state_does_not_take_the_place_of_the_good_one(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write_state(path, state(1))
    write_state(path, state(2))
    path.write_bytes(b"damaged")
    _, keep = read_state(path)
    write_state(path, state(3), keep)
    assert (number(path), number(previous_path(path))) == (3, 1)
    path.unlink()  # to start again
    write_state(path, state(4))
    assert not previous_path(path).exists()


@pytest.mark.parametrize("version", [2, 3])
def test_a_state_without_a_checksum_is_read_with_a_warning(
    version: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "last.pt"
    torch.save({**state(5), "version": version}, path)
    assert number(path) == 5
    assert "is of an earlier version without a checksum" in caplog.text


def test_a_checksum_of_nothing_and_of_much(tmp_path: Path) -> None:
    for content in (b"", b"a", bytes(3 * 2**20)):
        buffer = io.BytesIO(content)
        append_checksum(buffer)
        (tmp_path / "x").write_bytes(buffer.getvalue())
        assert verify_checksum(tmp_path / "x") is True
        (tmp_path / "x").write_bytes(b"b" + buffer.getvalue()[1:])
        assert verify_checksum(tmp_path / "x") is (None if not content else False)
    (tmp_path / "x").write_bytes(b"deepsquare SHA256")
    assert verify_checksum(tmp_path / "x") is None


@pytest.mark.parametrize("case", BOMBS)
def test_an_archive_that_expands_is_damaged_whatever_its_checksum(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.pt"
    buffer = io.BytesIO()
    buffer.write(BOMBS[case][0](archive_of({"version": 4, **state(1), "more": torch.zeros(10_000)})))
    append_checksum(buffer)
    path.write_bytes(buffer.getvalue())
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch reads it"))
    with pytest.raises(ValueError, match=r"last\.pt is not a training checkpoint, or is damaged; remove it"):
        read_state(path)


def test_a_run_goes_on_from_the_state_before_a_damaged_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And ends bit for bit as an undisturbed one."""
    data, path = Points(48, 12, classes=3, distance=1.0), tmp_path / "last.pt"

    def trainer() -> Trainer:
        torch.manual_seed(1)
        return Trainer(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)), RECIPE)

    whole, part, again, steps = trainer(), trainer(), trainer(), iter(range(100))
    torch.manual_seed(7)
    expected = fit(whole, data, RECIPE, data.evaluation)
    torch.manual_seed(7)
    with pytest.raises(StoppedError):
        fit(part, data, RECIPE, data.evaluation, checkpoint=path, stop=lambda: next(steps) == 7)
    path.write_bytes(path.read_bytes()[:-100])
    history = fit(again, data, RECIPE, data.evaluation, checkpoint=path)
    assert "continues from" in caplog.text
    assert history.accuracy == expected.accuracy
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("progress", None), ("progress", {}), ("progress", [1]), ("recipe", None), ("recipe", 3),
        ("recipe", torch.zeros(3)), ("recipe", {"lr": torch.zeros(3)}), ("random", None),
        ("optimizer", {}), ("optimizer", None), ("model", None), ("random", {"torch": 1}), ("ema", 5),
    ],
)  # fmt: skip
def test_a_state_of_another_structure_gets_one_line(field: str, value: Any, tmp_path: Path) -> None:
    data, path = Points(48, 12, classes=3, distance=1.0), tmp_path / "last.pt"
    model = nn.Linear(2, 3)
    fit(model, data, RECIPE, data.evaluation, checkpoint=path, judge_end=False)
    stored, _ = read_state(path)
    write_state(path, {**stored, field: value})
    with pytest.raises(ValueError, match=r"last\.pt (is damaged|belongs to another model)|the progress of .*last\.pt"):
        fit(model, data, RECIPE, data.evaluation, checkpoint=path)
