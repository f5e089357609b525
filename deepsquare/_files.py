"""Writing files atomically, checksums at their ends, and locking them."""

import glob
import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

CHECKSUM = b"deepsquare SHA256"  # before the digest, at the end of a file; readers of zip and flatbuffers ignore both


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it replaces ``path`` when the block ends without an error."""
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; give the path of a file, such as a file in it")
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask says; some writers set another
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale_temps(path: Path) -> None:
    """Remove temporary files of killed writers of ``path``; no process may be writing it now."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}*"):
        temporary.unlink(missing_ok=True)


def append_checksum(buffer: io.BytesIO) -> None:
    """Add the checksum of the content at its end."""
    footer = CHECKSUM + hashlib.sha256(buffer.getbuffer()).digest()
    buffer.seek(0, os.SEEK_END)
    buffer.write(footer)


def verify_checksum(path: Path) -> bool | None:
    """Whether a file has the checksum of its content at its end; None if it has none.

    It tells damage, not malice: whoever changes a file can write the checksum of what it is then.
    """
    length = len(CHECKSUM) + hashlib.sha256().digest_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - length
        if left < 0:
            return None
        file.seek(left)
        footer = file.read(length)
        if not footer.startswith(CHECKSUM):
            return None
        file.seek(0)
        while left and (chunk := file.read(min(left, 2**20))):
            digest.update(chunk)
            left -= len(chunk)
    return footer == CHECKSUM + digest.digest()


def lock(file: IO[Any], *, wait: bool = True) -> bool:
    """Lock a file until it is closed; False if another process has, unless ``wait``. Windows has no such locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except BlockingIOError:
        return False
    return True


def ensure_writable(folder: Path) -> None:
    """Create the folder; fail early if files cannot be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"cannot write into {folder} ({error.strerror}); choose a writable folder"
        raise OSError(reason) from error
