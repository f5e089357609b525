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

from deepsquare.results import Row

Report = Callable[[str, Mapping[str, Any]], None]
WorkerTask = Callable[[Report], "Row | None"]
POLL = 0.3  # seconds


@dataclass(frozen=True)
class Done:
    """A task that ended: with a row, with an error, or with neither where it was not ours to do."""

    key: str
    row: Row | None = None
    error: BaseException | None = None


class Backend(Protocol):
    """Runs tasks side by side and hands over what they report and return, as it comes."""

    workers: int

    def results(self, tasks: Mapping[str, WorkerTask], on_report: Report) -> Iterator[Done]: ...  # noqa: D102

    def stop(self) -> None: ...  # noqa: D102


_reports: Any = None  # in a worker process: the queue to the grid


class LocalBackend:
    """One process per core. A process ends with the grid that started it, however that ends."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.workers = workers
        self._queue: Any = context.Queue()
        self._pool = ProcessPoolExecutor(workers, context, _start_worker, (self._queue, os.getpid()))

    def results(self, tasks: Mapping[str, WorkerTask], on_report: Report) -> Iterator[Done]:
        """Run the tasks and yield each as it ends; reports are passed on from this thread."""
        pending: dict[Future[Row | None], str] = {self._pool.submit(_work, task): key for key, task in tasks.items()}
        while pending:
            ended, _ = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
            while not self._queue.empty():
                on_report(*self._queue.get())
            for future in ended:
                key, error = pending.pop(future), future.exception()
                if isinstance(error, BrokenProcessPool):
                    reason = "a process of the grid was killed, perhaps for want of memory"
                    raise OSError(f"{reason}; the same command goes on from the last epochs") from error
                yield Done(key, None if error else future.result(), error)

    def stop(self) -> None:
        """End the processes, whatever they do: their work is in their checkpoints."""
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


def _start_worker(reports: Any, parent: int) -> None:
    global _reports  # the one thing a pool can give to its processes
    _reports = reports
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the grid's to handle

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(task: WorkerTask) -> Row | None:
    return task(lambda key, seen: _reports.put((key, seen)))


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

    def results(self, tasks: Mapping[str, WorkerTask], on_report: Report) -> Iterator[Done]:
        """Run the tasks and yield each as it ends; reports are passed on from this thread."""
        remote = self._ray.remote(num_cpus=1, max_retries=3)(_work_on_ray)
        pending = {remote.remote(task, self._queue): key for key, task in tasks.items()}
        while pending:
            ended, _ = self._ray.wait(list(pending), num_returns=1, timeout=POLL)
            try:
                while True:
                    on_report(*self._queue.get(block=False))
            except queue.Empty:
                pass
            for reference in ended:
                key = pending.pop(reference)
                try:
                    yield Done(key, self._ray.get(reference))
                except self._ray.exceptions.RayError as error:
                    yield Done(key, error=error)

    def stop(self) -> None:
        """Leave the cluster; its tasks of this grid end with it."""
        self._ray.shutdown()


def _require_listener(address: str) -> None:
    """Fail at once where nothing answers at ``host:port``: Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _work_on_ray(task: WorkerTask, reports: Any) -> Row | None:
    return task(lambda key, seen: reports.put((key, seen)))
