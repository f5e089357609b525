"""Where the tasks of a grid run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

from deepsquare._threads import cores
from deepsquare.results import Row

OnProgress = Callable[[str, Mapping[str, Any]], None]  # receives a run's key and the metrics of its last epoch
WorkerTask = Callable[[OnProgress], "Row | None"]
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Workers:
    """Where the runs of a grid are trained.

    Attributes:
        processes: How many runs in parallel; one per core when not given.
        ray: Address of a Ray cluster, or local to start one here.
    """

    processes: int | None = None
    ray: str | None = None

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"processes is {self.processes}; expected at least 1")

    def start(self, tasks: int) -> Backend:
        """The backend for so many tasks."""
        return LocalBackend(min(self.processes or cores(), tasks)) if self.ray is None else RayBackend(self.ray)


@dataclass(frozen=True)
class TaskResult:
    """How a task ended: with a row, with an error, or with neither if another grid has its run."""

    key: str
    row: Row | None = None
    error: BaseException | None = None


class Backend(Protocol):
    """Runs tasks in parallel and yields their results in the order they finish."""

    workers: int

    def results(self, tasks: Mapping[str, WorkerTask], on_progress: OnProgress) -> Iterator[TaskResult]: ...  # noqa: D102

    def stop(self) -> None: ...  # noqa: D102


_progress_queue: Any = None  # set in a worker process


class LocalBackend:
    """A pool of local processes. They exit when the grid that started them exits or is killed."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.workers = workers
        self._queue: Any = context.Queue()
        self._pool = ProcessPoolExecutor(workers, context, _start_worker, (self._queue, os.getpid()))

    def results(self, tasks: Mapping[str, WorkerTask], on_progress: OnProgress) -> Iterator[TaskResult]:
        """Run the tasks; ``on_progress`` is called in this thread."""
        pending: dict[Future[Row | None], str] = {
            self._pool.submit(_run_task, task): key for key, task in tasks.items()
        }
        while pending:
            finished, _ = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            while not self._queue.empty():
                on_progress(*self._queue.get())
            for future in finished:
                key, error = pending.pop(future), future.exception()
                if isinstance(error, BrokenProcessPool):
                    reason = "a worker process was killed, perhaps out of memory"
                    raise OSError(f"{reason}; run the same command to resume from the last epochs") from error
                yield TaskResult(key, None if error else future.result(), error)

    def stop(self) -> None:
        """Terminate the processes; unfinished runs have their checkpoints."""
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


def _start_worker(progress_queue: Any, parent: int) -> None:
    global _progress_queue  # a pool's initializer has no other way to pass it to the tasks
    _progress_queue = progress_queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_task(task: WorkerTask) -> Row | None:
    return task(lambda key, metrics: _progress_queue.put((key, metrics)))


class RayBackend:
    """One core per task on a Ray cluster; ``local`` starts one on this machine."""

    def __init__(self, address: str) -> None:
        try:
            import ray
            from ray.util.queue import Queue
        except ImportError as error:
            raise ValueError("--ray needs Ray: pip install 'deepsquare[ray]'") from error
        self._ray: Any = ray
        try:
            _require_listener(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except OSError as error:
            raise OSError(f"no Ray cluster at {address!r} ({error}); start one with 'ray start --head'") from error
        self.workers = int(self._ray.cluster_resources().get("CPU", 1))
        self._queue = Queue(actor_options={"num_cpus": 0})

    def results(self, tasks: Mapping[str, WorkerTask], on_progress: OnProgress) -> Iterator[TaskResult]:
        """Run the tasks; ``on_progress`` is called in this thread."""
        remote = self._ray.remote(num_cpus=1, max_retries=3)(_run_ray_task)
        pending = {remote.remote(task, self._queue): key for key, task in tasks.items()}
        while pending:
            finished, _ = self._ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
            try:
                while True:
                    on_progress(*self._queue.get(block=False))
            except queue.Empty:
                pass
            for reference in finished:
                key = pending.pop(reference)
                try:
                    yield TaskResult(key, self._ray.get(reference))
                except self._ray.exceptions.RayError as error:
                    yield TaskResult(key, error=error)

    def stop(self) -> None:
        """Disconnect from the cluster, which cancels the tasks of this grid."""
        self._ray.shutdown()


def _require_listener(address: str) -> None:
    """Fail early if nothing listens at ``host:port``: Ray itself would retry for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _run_ray_task(task: WorkerTask, progress_queue: Any) -> Row | None:
    return task(lambda key, metrics: progress_queue.put((key, metrics)))
