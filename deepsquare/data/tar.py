"""The members of a tar file, by their headers; nothing that a header claims is believed before it is checked.

``tarfile`` parses a single header. Its loop over a file is not used: at a negative size it goes back and never ends,
and a PAX header of one megabyte takes it minutes.
"""

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

BLOCK = 512
HEADER_LIMIT = 2**20  # bytes of a GNU or PAX header, which has the names and attributes of the next member
NAME_LIMIT = 4096  # as of a path on Linux; names are kept in an array as wide as the longest
PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
EXTENDED = (*PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
NUMBER = re.compile(rb"[0-9]{1,19}")
Records = dict[bytes, bytes]  # path, size and sparse of an extended header


class Member(NamedTuple):
    """A regular file in a tar file."""

    name: str
    offset: int
    size: int


def members(path: Path, file: BinaryIO) -> Iterator[Member]:
    """The regular files of a complete tar file; links, folders, devices and sparse files are ignored."""
    fd, offset = file.fileno(), 0
    shared, own = Records(), Records()  # for all further members, and for the next one
    try:
        end = os.fstat(fd).st_size
        while (block := os.pread(fd, BLOCK, offset)) != bytes(BLOCK):
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            records = Records() if header.type in EXTENDED else shared | own
            start = _data_offset(fd, block, offset, header.type)
            size = _data_size(header, records)
            if not 0 <= size <= end - start:
                raise ValueError(f"a member of {size:,} bytes, where {end - start:,} are left")
            if header.type in EXTENDED:
                found = _records(header.type, os.pread(fd, min(size, HEADER_LIMIT + 1), start))
                (shared if header.type == tarfile.XGLTYPE else own).update(found)
            else:
                own = Records()
                if header.isreg() and header.type != tarfile.GNUTYPE_SPARSE and b"sparse" not in records:
                    yield Member(_name(header, records), start, size)
            offset = start + -(-size // BLOCK) * BLOCK
    except (tarfile.HeaderError, ValueError) as error:
        raise ValueError(
            f"{path} is truncated or damaged at byte {offset:,} ({error}); copy or create it again"
        ) from error


def _data_offset(fd: int, block: bytes, offset: int, kind: bytes) -> int:
    """The end of a header, which has further blocks for an old GNU sparse file."""
    offset += BLOCK
    extended = kind == tarfile.GNUTYPE_SPARSE and block[482:483] != b"\0"
    while extended:
        extended = os.pread(fd, BLOCK, offset)[504:505] not in (b"\0", b"")
        offset += BLOCK
    return offset


def _data_size(header: tarfile.TarInfo, records: Records) -> int:
    if header.type in tarfile.SUPPORTED_TYPES and not header.isreg() and header.type not in EXTENDED:
        return 0  # a link or a folder has no data, whatever its size
    size = records.get(b"size")
    if size is None:
        return header.size
    if not NUMBER.fullmatch(size):
        raise ValueError(f"a member of {size[:20]!r} bytes; expected a number")
    return int(size)


def _name(header: tarfile.TarInfo, records: Records) -> str:
    path = records.get(b"path")
    name = header.name if path is None else path.decode("utf-8", "surrogateescape")
    if len(name) > NAME_LIMIT:
        raise ValueError(f"a name of {len(name):,} characters; expected at most {NAME_LIMIT:,}")
    return name


def _records(kind: bytes, data: bytes) -> Records:
    """What an extended header says about the next members; a PAX header has records like ``12 path=abc\\n``."""
    if len(data) > HEADER_LIMIT:
        raise ValueError(f"a header of more than {HEADER_LIMIT:,} bytes")
    if kind not in PAX:
        return {b"path": data.partition(b"\0")[0]} if kind == tarfile.GNUTYPE_LONGNAME else {}
    records, position = Records(), 0
    while position < len(data):
        length = NUMBER.match(data, position)
        stop = position + int(length[0]) if length else 0
        key, equals, value = data[length.end() if length else 0 : max(0, stop - 1)].partition(b"=")
        if data[stop - 1 : stop] != b"\n" or not key.startswith(b" ") or not equals:
            raise ValueError(f"the PAX record {data[position : position + 20]!r}")
        if key in (b" path", b" size"):
            records[key[1:]] = value
        elif key.startswith(b" GNU.sparse."):
            records[b"sparse"] = value
        position = stop
    return records
