"""Files that are whole or not there."""

from __future__ import annotations

import glob
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes the place of ``path`` when the block ends, not when it fails."""
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # the user's usual one; some writers set their own
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale_temps(path: Path) -> None:
    """Remove what writers of ``path`` that were killed left beside it; nobody may be writing it now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}*"):
        left.unlink(missing_ok=True)


def ensure_writable(folder: Path) -> None:
    """Make the folder, or stop before the work that would be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"cannot write into {folder} ({error.strerror}); give a folder that can be written"
        raise OSError(reason) from error
