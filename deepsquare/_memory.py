"""Lack of memory, which libraries report in many ways, as one error that says what was tried and what to reduce."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

# Of torch on the CPU and on GPUs, its libraries, C++, onnxruntime, oneDNN (whose primitive has a valid descriptor by
# then), and ExecuTorch (0x21, 0x31: MemoryAllocationFailed).
ALLOCATION = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|failed to allocate|bad.?alloc|ALLOC_FAILED"
    r"|could not create a primitive$|error:? 0x:?[23]1\b",
    re.IGNORECASE,
)
KILLED_WORKER = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)")
SHARED_MEMORY = re.compile(
    r"unable to allocate shared memory|DataLoader worker \(pid.*\) is killed by signal: Bus error"
)


class OutOfMemoryError(MemoryError):
    """There is too little memory; the message says for what, and what to reduce."""


@contextmanager
def explain_memory(task: str, hint: str) -> Iterator[None]:
    """Raise OutOfMemoryError if the block fails for lack of memory; other errors stay as they are."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:
        if message := _explain(error, task, hint):
            raise OutOfMemoryError(message) from error
        raise


def _explain(error: BaseException | None, task: str, hint: str) -> str | None:
    """The message, if lack of memory is the error or its cause."""
    while error is not None:
        text = str(error)
        if isinstance(error, OutOfMemoryError):
            return text
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return f"not enough memory for {task}; {hint}"
        if isinstance(error, RuntimeError) or type(error).__module__.startswith("onnxruntime"):
            if KILLED_WORKER.search(text):
                return "a data worker was killed, probably for lack of memory; use fewer workers or a smaller batch"
            if SHARED_MEMORY.search(text):
                hint = "use fewer workers or a smaller batch, or enlarge it (docker run --shm-size 8g)"
                return f"not enough shared memory (/dev/shm) for the batches of the data workers; {hint}"
            if ALLOCATION.search(text):
                return f"not enough memory for {task}; {hint}"
        error = error.__cause__
    return None
