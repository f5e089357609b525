"""Where the tasks of a grid run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepsquare._threads import cores
from deepsquare.results import Row

OnProgress = Callable[[str, Mapping[str, Any]], None]  # receives a run's key and the metrics of its last epoch
WorkerTask = Callable[[OnProgress], "Row | None"]
Outcome = tuple[str, "Row | None", BaseException | None]  # key, row and error of a task; neither if another grid has it
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Workers:
    """Where to train.

    Attributes:
        processes: How many runs in parallel; one per core when not given.
        ray: Address of a Ray cluster, or local to start one here.
        low_priority: Train behind all other work of this machine (nice 19).
    """

    processes: int | None = None
    ray: str | None = None
    low_priority: bool = False

    def check(self) -> None:
        """Fail early if the values do not fit together."""
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"processes is {self.processes}; expected at least 1")
        if self.ray is not None and (self.processes is not None or self.low_priority):
            raise ValueError("--processes and --low-priority are for local processes; remove them, or --ray")

    def start(self, tasks: int) -> Backend:
        self.check()
        if self.ray is not None:
            return _ray_cluster(self.ray)
        return _local_processes(min(self.processes or cores(), tasks), self.low_priority)


LOCAL = Workers()


@dataclass(frozen=True)
class Backend:
    """Runs tasks in parallel.

    Attributes:
        workers: how many at once.
        queue: the keys and metrics that the workers report.
        submit: starts a task.
        stop: ends all tasks; unfinished runs have their checkpoints.
    """

    workers: int
    queue: Any
    submit: Callable[[WorkerTask], Future[Row | None]]
    stop: Callable[[], None]

    def results(self, tasks: Mapping[str, WorkerTask], on_progress: OnProgress) -> Iterator[Outcome]:
        """Run the tasks and yield the outcome of each when it ends; ``on_progress`` is called in this thread."""
        pending = {self.submit(task): key for key, task in tasks.items()}
        while pending:
            try:
                finished, _ = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            except RuntimeError as failure:
                if isinstance(failure.__context__, KeyboardInterrupt):  # Ctrl-C while a condition took back its lock
                    raise KeyboardInterrupt from failure
                raise
            while not self.queue.empty():
                on_progress(*self.queue.get())
            for future in finished:
                key, error = pending.pop(future), future.exception()
                if isinstance(error, BrokenProcessPool):
                    reason = "a worker process was killed, perhaps out of memory"
                    raise OSError(f"{reason}; run the same command to resume from the last epochs") from error
                yield key, None if error else future.result(), error


_progress_queue: Any = None  # set in a worker process


def _local_processes(workers: int, low_priority: bool) -> Backend:
    """A pool of local processes. They exit when the grid that started them exits or is killed."""
    context = multiprocessing.get_context("spawn")
    progress_queue = context.Queue()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (progress_queue, os.getpid(), low_priority))

    def stop() -> None:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(cancel_futures=True)

    return Backend(workers, progress_queue, lambda task: pool.submit(_run_task, task), stop)


def _start_worker(progress_queue: Any, parent: int, low_priority: bool) -> None:
    global _progress_queue  # a pool's initializer has no other way to pass it to the tasks
    _progress_queue = progress_queue
    if low_priority:
        os.nice(19)
        with suppress(OSError):  # Linux shares the cores between sessions first: nice acts within one
            os.setsid()
            Path("/proc/self/autogroup").write_text("19")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_task(task: WorkerTask, progress_queue: Any = None) -> Row | None:
    destination = _progress_queue if progress_queue is None else progress_queue
    return task(lambda key, metrics: destination.put((key, metrics)))


def _ray_cluster(address: str) -> Backend:
    """One core per task on a Ray cluster; ``local`` starts one on this machine, and stopping disconnects from it."""
    try:
        import ray
        from ray.util.queue import Queue
    except ImportError as error:
        raise ValueError("--ray needs Ray: pip install 'deepsquare[ray]'") from error
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # fail early if nothing listens: Ray itself would retry for many minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except OSError as error:
        raise OSError(f"no Ray cluster at {address!r} ({error}); start one with 'ray start --head'") from error
    progress_queue = Queue(actor_options={"num_cpus": 0})
    remote: Any = ray.remote(num_cpus=1, max_retries=3)(_run_task)
    workers = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    return Backend(workers, progress_queue, lambda task: remote.remote(task, progress_queue).future(), ray.shutdown)
