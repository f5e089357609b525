"""Writing files atomically, checksums at their ends, and locking them."""

import errno
import glob
import hashlib
import io
import os
import platform
import re
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile
from typing import IO, Any

CHECKSUM = b"deepsquare SHA256"  # before the digest, at the end of a file; readers of zip and flatbuffers ignore both
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from file systems that cannot lock files


class FullError(OSError):
    """A file cannot be written for lack of space."""

    def __str__(self) -> str:
        return f"cannot write {self.filename} ({self.strerror}); free some space, or choose another folder"


@contextmanager
def explain_full(path: str | Path) -> Iterator[None]:
    """Name the file, and what to do, if the block cannot write to it for lack of space."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FullError) or error.errno not in FULL:
            raise
        raise FullError(error.errno, error.strerror, str(path)) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to; the file replaces ``path`` when the block ends without an error.

    It is in a folder of its own beside ``path``, with what else the writer creates there.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; give the path of a file, such as a file in it")
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary = folder / path.name
    try:
        with explain_full(path):
            folder.mkdir()
            temporary.touch()
            mode = temporary.stat().st_mode  # as the umask says; some writers set another
            yield temporary
            temporary.chmod(mode)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        rmtree(folder, ignore_errors=True)


def remove_stale_temps(path: Path) -> None:
    """Remove the temporary folders of killed writers of ``path``; no process may be writing it now."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}"):
        rmtree(folder, ignore_errors=True)


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
    """Lock a file until it is closed; False if another process has, unless ``wait``.

    Where there are no such locks (on Windows, and on some network file systems, which warn) it is True.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        hint = "start one process at a time there"
        warnings.warn(f"{file.name} cannot be locked on its file system ({error.strerror}); {hint}", stacklevel=2)
    return True


class InUseError(OSError):
    """Another process holds a lock; the message says which, if that is known."""


_held: set[FileIO] = set()


def _close_held() -> None:
    for file in _held:
        file.close()


if hasattr(os, "register_at_fork"):
    # A forked process, such as a DataLoader's worker, shares the locks, and would keep them when its parent is killed.
    os.register_at_fork(after_in_child=_close_held)


@contextmanager
def exclusive(path: Path, subject: str, hint: str) -> Iterator[None]:
    """Hold the lock file ``path`` during the block, for ``subject``; InUseError if another process holds it.

    The lock ends with its process, however that ends: a file that a killed process left does not count.
    """
    file = _open_and_lock(path)
    if isinstance(file, str):
        raise InUseError(f"{subject} is in use by {file}; {hint}")
    try:
        with suppress(OSError):  # on a full disk the holder stays unknown
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        _held.discard(file)
        with suppress(OSError):
            if not file.closed and _is_at(file, path):  # it is closed in a forked process, which has no lock
                path.unlink()
        file.close()


def _open_and_lock(path: Path) -> FileIO | str:
    """The locked file, created if it is missing; or the process that holds it."""
    while True:
        file = FileIO(path, "a+", opener=_open_no_link)
        _held.add(file)  # before it is locked: a thread may fork at any time
        locked = False
        try:
            if not (locked := lock(file, wait=False)):
                file.seek(0)
                holder = re.fullmatch(r"process \d+ on [\w.-]+", file.read(200).decode(errors="replace"))
                return holder[0] if holder else "another process"
            if locked := _is_at(file, path):
                return file
            # Between opening and locking, its holder has removed it.
        finally:
            if not locked:
                _held.discard(file)
                file.close()


def _open_no_link(path: str, flags: int) -> int:
    """The holder writes its name into the file: a link to another file, in a folder from elsewhere, is an error."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def ensure_writable(folder: Path) -> None:
    """Create the folder; fail early if files cannot be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"cannot write into {folder} ({error.strerror}); choose a writable folder"
        raise OSError(reason) from error
