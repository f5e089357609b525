"""The results store: append-only rows, one JSON object per line, each with the conditions of its run.

A row is appended with one write under a lock and flushed to disk, so a killed process leaves at most a truncated
last line: readers skip it and the next writer removes it. Several writers can share a store.
"""

import base64
import errno
import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from deepsquare._files import atomic_write, lock
from deepsquare._terminal import printable


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: what was run, how, its metrics, and where."""

    experiment: str  # the group of runs: "cifar10"
    row: str  # the label within it: "DeepSquare3"
    seed: int
    recipe: Mapping[str, Any]
    metrics: Mapping[str, Any]  # final values, and lists with one value per epoch
    seconds: float
    versions: Mapping[str, Any] = msgspec.field(default_factory=dict)
    hardware: str = ""
    commit: str | None = None
    date: str = ""

    @property
    def key(self) -> str:
        """The identity of the run; see :func:`run_key`."""
        return run_key(self.experiment, self.row, self.seed, self.recipe)

    def to_json(self) -> bytes:
        return json.dumps(msgspec.structs.asdict(self), ensure_ascii=False, allow_nan=False).encode() + b"\n"


class MissingFieldError(ValueError, KeyError):
    """A row lacks a field that is read from it."""

    __str__ = Exception.__str__  # KeyError shows its message in quotes


class _Fields(dict[str, Any]):
    """A part of a stored row that knows its file and line, for the message about a field that it lacks."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        super().__init__(
            {key: _Fields(value, place) if isinstance(value, dict) else value for key, value in fields.items()}
        )
        self.place = place

    def __missing__(self, key: str) -> Any:
        raise MissingFieldError(f"{self.place}: the row has no {key!r} where it is read; remove that line to continue")


def run_key(experiment: str, row: str, seed: int, recipe: Mapping[str, Any]) -> str:
    """The identity of a run, known before it starts: everything that determines its result."""
    return json.dumps([experiment, row, seed, recipe], sort_keys=True)


class Store:
    """The rows in a file; a missing file is an empty store."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def rows(self) -> list[Row]:
        """All complete rows in the order they were written; a truncated last line is skipped with a warning."""
        return list(self.rows_by_line().values())

    def rows_by_line(self) -> dict[int, Row]:
        """The same with the number of each row's line."""
        if not self.path.exists():
            return {}
        if not self.path.is_file():
            raise ValueError(f"{self.path} is a folder; expected a file with one row per line")
        rows = {}
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    rows[number] = _decode(line, f"{self.path}, line {number}")
            except (ValueError, RecursionError) as error:
                if number < len(lines):
                    reason = (
                        f"{self.path}, line {number}: not a row ({printable(str(error))}); remove that line to continue"
                    )
                    raise ValueError(reason) from error
                # No newline after it: the writer was stopped.
                warnings.warn(f"{self.path}: the last line is truncated; its run will be repeated", stacklevel=2)
        return rows

    def append(self, row: Row) -> bool:
        """Add a row with the current conditions; False if the store already has a row with its key."""
        line = msgspec.structs.replace(row, **conditions()).to_json()
        msgspec.json.decode(line, type=Row)  # fail before writing if a field has the wrong type
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+", buffering=0) as file:
            lock(file)
            _repair_last_line(file)
            if any(present.key == row.key for present in self.rows()):
                return False
            start = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:  # leave no partial line
                file.truncate(start)
                reason = f"cannot write a row to {self.path} ({error.strerror}); free some space and run it again"
                raise OSError(reason) from error
        return True

    def replace(self, rows: Iterable[Row]) -> None:
        """Write ``rows`` as they are, instead of all present rows; the file is replaced atomically."""
        content = b"".join(row.to_json() for row in rows)
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(content)


def _decode(line: bytes, place: str) -> Row:
    row = msgspec.json.decode(line, type=Row)
    recipe, metrics = _Fields(row.recipe, place), _Fields(row.metrics, place)
    return msgspec.structs.replace(row, recipe=recipe, metrics=metrics)


def _repair_last_line(file: FileIO) -> None:
    """Add the missing newline if the last line is a complete row; else remove the line."""
    file.seek(0)
    content = file.read()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    try:
        msgspec.json.decode(content[end:], type=Row)
    except ValueError:
        file.truncate(end)
    else:
        file.write(b"\n")


def round_for_json(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Values with a few significant digits, None for those that are not finite: JSON has no infinity."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def pack_bits(values: Tensor) -> str:
    """Booleans (which test images a model classified correctly) as base64: eight per byte, the first in the highest."""
    return base64.b64encode(np.packbits(values.numpy()).tobytes()).decode()


def unpack_bits(text: str, count: int) -> Tensor:
    """The first ``count`` booleans of a text by :func:`pack_bits`."""
    packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if not 0 <= count <= 8 * len(packed):
        raise ValueError(f"count is {count}; expected at most the {8 * len(packed)} bits of the text")
    return torch.from_numpy(np.unpackbits(packed, count=count).astype(bool))


def conditions() -> dict[str, Any]:
    """Versions, hardware, commit and date, as stored in every row."""
    return {**_fixed_conditions(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def _fixed_conditions() -> dict[str, Any]:
    try:
        version = metadata.version("deepsquare")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        version = None
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512 …: the names of virtual CPUs do not tell
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
        output = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split("\n")
    except OSError:  # no git
        return None
    return output[1] if len(output) > 1 and Path(output[0]) == root.resolve() else None
