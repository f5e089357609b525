"""Locks: one holder at a time, named to the others, and none that outlives its process; a full disk is named."""

import errno
import fcntl
import os
import platform
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from helpers.locking import compete, hold, hold_and_fork
from helpers.processes import start, wait

from deepsquare._files import FullError, InUseError, atomic_write, exclusive, explain_full


def wait_for(path: Path, process: BaseProcess) -> None:
    end = time.monotonic() + 60
    while not path.exists() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists()


def test_the_second_is_told_who_holds_the_lock_and_a_killed_holder_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    holder = start(hold, path, stderr=tmp_path / "stderr")
    wait_for(tmp_path / "ready", holder)
    for _ in range(2):  # being refused changes nothing
        expected = f"^the folder is in use by process {holder.pid} on {platform.node()}; wait$"
        with pytest.raises(InUseError, match=expected), exclusive(path, "the folder", "wait"):
            pass
    holder.kill()
    wait(holder)
    assert path.exists()
    with exclusive(path, "the folder", "wait"):
        assert path.read_text() == f"process {os.getpid()} on {platform.node()}"
        with pytest.raises(InUseError), exclusive(path, "the folder", "wait"):  # the same process, once more
            pass
        assert path.exists()
    assert not path.exists()


def test_a_forked_process_does_not_keep_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    holder = start(hold_and_fork, path, stderr=tmp_path / "stderr")
    wait_for(tmp_path / "child", holder)
    wait_for(tmp_path / "ready", holder)
    child = int((tmp_path / "child").read_text())
    with pytest.raises(InUseError), exclusive(path, "the folder", "wait"):  # nor does it release the lock
        pass
    holder.kill()
    wait(holder)
    os.kill(child, 0)  # it is alive
    with exclusive(path, "the folder", "wait"):
        pass
    os.kill(child, signal.SIGKILL)


def test_processes_that_compete_hold_the_lock_one_at_a_time(tmp_path: Path) -> None:
    errors = tmp_path / "stderr"
    processes = [start(compete, tmp_path / ".lock", 100, stderr=errors) for _ in range(3)]
    assert [wait(process) for process in processes] == [0, 0, 0], errors.read_text()
    assert not (tmp_path / ".lock").exists()


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path = tmp_path / ".lock"
    with (
        pytest.warns(UserWarning, match=r"\.lock cannot be locked .*No locks available.*; start one process at a time"),
        exclusive(path, "the folder", "wait"),
    ):
        assert path.exists()
    assert not path.exists()


def test_a_link_in_place_of_the_lock_is_an_error_and_its_target_stays(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text("precious")
    (path := tmp_path / ".lock").symlink_to(target)
    with pytest.raises(OSError, match=r"symbolic links: .*\.lock"), exclusive(path, "the folder", "wait"):
        pass
    assert target.read_text() == "precious"
    assert path.is_symlink()


def test_a_full_disk_is_named_once_and_the_old_file_stays(tmp_path: Path) -> None:
    (path := tmp_path / "run.json").write_text("old")
    expected = rf"^cannot write {path} \(No space left on device\); free some space, or choose another folder$"
    for size in (10, 10**6):  # when it is closed, and when it is written
        with pytest.raises(FullError, match=expected), explain_full("the output"), atomic_write(path):
            Path("/dev/full").write_text("x" * size)
    with pytest.raises(FileNotFoundError), atomic_write(path):
        Path(tmp_path / "missing").read_text()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
