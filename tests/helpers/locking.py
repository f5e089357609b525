"""Processes that hold a lock, and that compete for one."""

import os
import time
from pathlib import Path

from deepsquare._files import InUseError, exclusive


def hold(path: Path, *, fork: bool = False) -> None:
    """Hold the lock until killed; with ``fork``, beside a forked process that lives on."""
    with exclusive(path, "the folder", "wait"):
        if fork and os.fork() == 0:
            path.with_name("child").write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
        path.with_name("ready").touch()
        time.sleep(60)


def hold_and_fork(path: Path) -> None:
    hold(path, fork=True)


def compete(path: Path, turns: int) -> None:
    """Take the lock so many times, and fail if another process has it at the same time."""
    owner, mine = path.with_name("owner"), str(os.getpid())
    while turns:
        try:
            with exclusive(path, "the folder", "wait"):
                owner.write_text(mine)
                time.sleep(0.0005)
                assert owner.read_text() == mine
                turns -= 1
        except InUseError:
            time.sleep(0.0001)
