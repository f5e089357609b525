"""Many processes train like one, evaluate every image once, and restart when one of them is killed."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from signal import SIGKILL
from typing import Any

import pytest
import torch.distributed as dist
from helpers import distributed_script
from helpers.images import make_colored_folders
from helpers.processes import start, start_ranks, wait

from deepsquare.training import DistributedContext, init_distributed
from deepsquare.training.distributed import rendezvous


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colored_folders(tmp_path_factory.mktemp("data"))


def one_process(data: Path, out: Path, *options: str) -> int | None:
    return wait(start(distributed_script.main, data, out, options, stderr=out.with_suffix(".err")))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone") / "run.json"
    assert one_process(data, out) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for one, other in zip(result["weights"], expected["weights"], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert result["accuracy"] == expected["accuracy"]  # counted exactly: 21 images on two processes, batches of 4
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("options", [(), ("micro",), ("anneal",)])
def test_two_processes_follow_the_loss_of_one(
    data: Path, alone: dict[str, Any], tmp_path: Path, options: tuple[str, ...]
) -> None:
    if "anneal" in options:
        assert one_process(data, tmp_path / "alone.json", *options) == 0
        alone = json.loads((tmp_path / "alone.json").read_text())
        assert [1.0] in alone["weights"]  # β
    out, errors = tmp_path / "run.json", tmp_path / "stderr"
    processes = start_ranks(distributed_script.main, data, out, options, stderr=errors)
    assert [wait(process) for process in processes] == [0, 0], errors.read_text()
    same(json.loads(out.read_text()), alone)
    assert alone["losses"][-1] < 0.7 * alone["losses"][0]  # it learns: the comparison is not one of standing still


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_run_ends_alike(
    data: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command += [distributed_script.__file__, str(data), str(tmp_path / "run.json"), "checkpoint", "die=5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["restarts"] == "1"
    losses = len(result["losses"])
    assert 0 < losses < len(alone["losses"])  # it went on, not anew
    same({**result, "losses": alone["losses"][:-losses] + result["losses"]}, alone)


def test_ten_kills_at_random_steps_change_no_bit(data: Path, tmp_path: Path) -> None:
    random = Random(0)
    for _ in range(10):
        die = f"die={random.randint(1, 4)}"
        assert one_process(data, tmp_path / "killed.json", "long", "checkpoint", die) == -SIGKILL
    assert one_process(data, tmp_path / "killed.json", "long", "checkpoint") == 0
    assert one_process(data, tmp_path / "undisturbed.json", "long") == 0
    killed, undisturbed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("killed", "undisturbed"))
    assert len(killed["losses"]) < len(undisturbed["losses"])  # the last attempt was not the whole run
    for name in ("weights", "accuracy", "loss"):
        assert killed[name] == undisturbed[name]


def test_restarted_processes_do_not_read_what_earlier_ones_left() -> None:
    store = dist.HashStore()
    names = []
    for attempt in range(3):  # in earlier attempts rank 2 dies and leaves its token
        if attempt < 2:
            store.set("deepsquare/token/2", f"dead{attempt}")
        with ThreadPoolExecutor(3) as threads:
            stores = list(threads.map(lambda rank: rendezvous(store, rank, 3, timeout=30), range(3)))
        stores[1].set("address", str(attempt))
        names += [one.get("address").decode() for one in stores]
        assert not stores[0].check(["address of another attempt"])
        stores[2].set("address of another attempt", "")
    assert names == ["0"] * 3 + ["1"] * 3 + ["2"] * 3


def test_a_process_that_does_not_join_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"1 of 2 processes did not join .* the first is rank 1;"):
        rendezvous(dist.HashStore(), 0, 2, timeout=0.1)


def test_every_index_belongs_to_one_process() -> None:
    for size in (1, 2, 3, 7):
        parts = [list(DistributedContext(rank, size).shard(11)) for rank in range(size)]
        assert sorted(index for part in parts for index in part) == list(range(11))


def test_an_incomplete_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with (
        pytest.raises(ValueError, match="has RANK but not LOCAL_RANK, WORLD_SIZE; start with torchrun"),
        init_distributed(),
    ):
        pass
