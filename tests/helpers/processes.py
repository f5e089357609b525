"""Processes that start at once, to be killed, stopped and compared: forked from one that has imported torch already."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from deepsquare.cli import main


def start(
    function: Callable[..., object], *arguments: Any, environment: Mapping[str, str] | None = None, stderr: Path
) -> BaseProcess:
    """``function(*arguments)`` in a process group of its own, with what it writes to stderr in a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchvision", "deepsquare.training.run", "deepsquare.cli"])
    process = context.Process(target=_run, args=(function, arguments, environment or {}, stderr))
    process.start()
    return process


def _run(
    function: Callable[..., object], arguments: tuple[Any, ...], environment: Mapping[str, str], stderr: Path
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    os.environ.update(environment)
    with stderr.open("a") as file:
        os.dup2(file.fileno(), 2)
    function(*arguments)


def wait(process: BaseProcess, seconds: float = 240) -> int | None:
    """The exit code; a process that takes longer is killed."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def command_line(arguments: Sequence[str]) -> None:
    """``deepsquare`` with these arguments."""
    sys.argv = ["deepsquare", *arguments]
    main()
