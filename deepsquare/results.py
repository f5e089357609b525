"""The results store: append-only rows, one JSON object a line, each with the conditions it was found under.

A row is appended with one write under a lock and flushed to the disk, so that a killed process leaves at
worst a cut last line; the next writer removes it, and readers pass over it. Two writers can share a store.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # not on Windows, where appends of two grids are not told apart
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Row:
    """One run: what was run, how, what came out, and where."""

    experiment: str  # which grid: "cifar10"
    row: str  # which row of it: "DeepSquare3"
    seed: int
    recipe: Mapping[str, Any]
    metrics: Mapping[str, Any]  # final values, and lists with one value per epoch
    seconds: float
    versions: Mapping[str, Any] = field(default_factory=dict)
    hardware: str = ""
    commit: str | None = None
    date: str = ""

    def __post_init__(self) -> None:
        for name, types, expected in (
            ("experiment", str, "a string"),
            ("row", str, "a string"),
            ("seed", int, "a whole number"),
            ("recipe", Mapping, "an object"),
            ("metrics", Mapping, "an object"),
            ("seconds", (int, float), "a number"),
            ("versions", Mapping, "an object"),
            ("hardware", str, "a string"),
            ("commit", (str, type(None)), "a string or null"),
            ("date", str, "a string"),
        ):
            if not isinstance(getattr(self, name), types):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def key(self) -> str:
        """What makes a run the same run: everything that decides its outcome."""
        return key(self.experiment, self.row, self.seed, self.recipe)


def key(experiment: str, row: str, seed: int, recipe: Mapping[str, Any]) -> str:
    """The identity of a run, known before it starts."""
    return json.dumps([experiment, row, seed, recipe], sort_keys=True)


class Store:
    """The rows in a file; a missing file is an empty store."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def rows(self) -> list[Row]:
        """Every whole row, in the order of writing; a cut last line is passed over with a warning."""
        if not self.path.exists():
            return []
        rows = []
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                rows.append(Row(**json.loads(line)))
            except (ValueError, TypeError) as error:
                if number == len(lines):  # no newline after it: the writer was stopped
                    warnings.warn(f"{self.path}: the last line is cut; that run will be done again", stacklevel=2)
                    continue
                reason = f"{self.path}, line {number}: not a row ({error}); remove that line to go on"
                raise ValueError(reason) from error
        return rows

    def append(self, row: Row) -> bool:
        """Add a row with its conditions, unless the store has one of its key; whether it was added."""
        complete = Row(**{**asdict(row), **conditions()})
        with self._locked() as file:
            _end_last_line(file)
            if any(present.key == row.key for present in self.rows()):
                return False
            start = file.seek(0, os.SEEK_END)
            line = json.dumps(asdict(complete), ensure_ascii=False, allow_nan=False).encode() + b"\n"
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:  # leave no half line
                file.truncate(start)
                reason = f"cannot write a row into {self.path} ({error.strerror}); make room and run the same command"
                raise OSError(reason) from error
        return True

    @contextmanager
    def _locked(self) -> Iterator[FileIO]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+", buffering=0) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file  # closing the file gives the lock back


def _end_last_line(file: FileIO) -> None:
    """End the last line if it is a whole row; remove it if it was cut."""
    file.seek(0)
    written = file.read()
    end = written.rfind(b"\n") + 1
    if end == len(written):
        return
    try:
        Row(**json.loads(written[end:]))
    except (ValueError, TypeError):
        file.truncate(end)
    else:
        file.write(b"\n")


def round_for_json(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Values with a few significant digits, None for those that are not finite: JSON has no infinity."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def conditions() -> dict[str, Any]:
    """Versions, hardware, commit and date, as every row carries them."""
    return {**_fixed_conditions(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def _fixed_conditions() -> dict[str, Any]:
    try:
        version = metadata.version("deepsquare")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = None
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512 …: names of virtual processors hide it
    return {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "deepsquare": version},
        "hardware": f"{models[0] if models else platform.machine()}, {os.cpu_count()} CPUs, {capability}",
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of this package's own repository, not of one that it happens to be installed in."""
    root = Path(__file__).parent.parent
    git = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        said = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split("\n")
    except OSError:  # no git
        return None
    return said[1] if len(said) > 1 and Path(said[0]) == root.resolve() else None
