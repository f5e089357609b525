"""The number of threads."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Run torch's operations on this number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def one_thread() -> AbstractContextManager[None]:
    """Run small operations on one thread: on a busy machine, threads that wait for each other are far slower."""
    return use_threads(1)
