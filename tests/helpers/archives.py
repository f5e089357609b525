"""Zip archives that torch reads, and torch.save does not write."""

import copy
import io
import zipfile
from collections.abc import Callable

import torch


def archive_of(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def deflated(archive: bytes) -> bytes:
    """The same entries, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


def overlapping(archive: bytes) -> bytes:
    """Its largest entry under a second name too, at the same place."""
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a") as new:
        again = copy.copy(max(new.infolist(), key=lambda entry: entry.file_size))
        new.comment = b"again"  # so that the directory is written anew
        again.filename = "archive/again"
        new.filelist.append(again)
    return buffer.getvalue()


def with_two_directories(archive: bytes) -> bytes:
    """Its last record names the place of the directory for torch; zipfile reads an empty one before that record."""
    record = bytearray(archive[archive.rfind(b"PK\5\6") :])
    record[12:16] = bytes(4)  # the length
    return archive[: archive.rfind(b"PK\5\6")] + bytes(record)


BOMBS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "deflated": (deflated, "has compressed entries, which torch.save does not write: 'archive/"),
    "overlapping": (overlapping, r"has entries of \d+ bytes in a file of \d+, which torch.save does not write"),
    "two directories": (with_two_directories, "is not a zip file as torch.save writes it, or is damaged"),
    "behind other bytes": (lambda archive: b"PK\3\4" + bytes(60) + archive, "is not a zip file as torch.save"),
    "cut": (lambda archive: archive[:-30], "is not a zip file as torch.save writes it, or is damaged"),
}
"""What makes each of an archive, and what is said of it."""
