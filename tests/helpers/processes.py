"""Processes that start at once, to be killed, stopped and compared: forked from one that has imported torch already."""

import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepsquare.cli import main


def warm_context() -> ForkServerContext:
    """Takes the place of the context ``spawn``: a process has a state of its own too, but starts at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchvision", "deepsquare.training.run", "deepsquare.cli"])
    return context


def start(
    function: Callable[..., object], *arguments: Any, environment: Mapping[str, str] | None = None, stderr: Path
) -> BaseProcess:
    """``function(*arguments)`` in a process group of its own, with what it writes to stderr in a file."""
    process = warm_context().Process(target=_run, args=(function, arguments, environment or {}, stderr))
    process.start()
    return process


def start_ranks(function: Callable[..., object], *arguments: Any, stderr: Path) -> list[BaseProcess]:
    """Two processes that train together, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environments = [{**address, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [start(function, *arguments, environment=one, stderr=stderr) for one in environments]


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


def command_line_with_memory(extra: int, arguments: Sequence[str]) -> None:
    """The same with so many bytes more than the process has at the start."""
    import torchvision  # noqa: F401
    from torch import randn

    randn(8, 8) @ randn(8, 8)  # starts the threads
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    command_line(arguments)


def run_module(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Takes the place of ``subprocess.run`` for ``python -m module``, with its output as text."""
    python, option, module, *arguments = command
    assert (python, option) == (sys.executable, "-m")
    with TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        code = wait(start(_run_module, module, arguments, stdout, stderr=stderr))
        assert code is not None
        return subprocess.CompletedProcess(command, code, stdout.read_text(), stderr.read_text())


def _run_module(module: str, arguments: Sequence[str], stdout: Path) -> None:
    sys.argv = [module, *arguments]
    with stdout.open("w") as file, redirect_stdout(file):
        runpy.run_module(module, run_name="__main__")
