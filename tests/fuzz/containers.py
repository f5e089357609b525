"""File formats with lengths and checksums, taken apart and put together again, so that a mutation gets past them."""

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepsquare._files import CHECKSUM, append_checksum

TAR_BLOCK, TAR_CHECKSUM = 512, slice(148, 156)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Container(NamedTuple):
    """``pack(unpack(data))`` reads as ``data``; a part may be changed in between. ``unpack`` raises ValueError."""

    unpack: Callable[[bytes], list[bytes]]
    pack: Callable[[Sequence[bytes]], bytes]


def _unpack_safetensors(data: bytes) -> list[bytes]:
    """The header, in JSON, and the tensors."""
    if len(data) < 8 or (length := struct.unpack("<Q", data[:8])[0]) > len(data) - 8:
        raise ValueError("no header")
    return [data[8 : 8 + length], data[8 + length :]]


def _pack_safetensors(parts: Sequence[bytes]) -> bytes:
    return struct.pack("<Q", len(parts[0])) + b"".join(parts)


def _unpack_zip(data: bytes) -> list[bytes]:
    """Names and contents in turn, as in files of torch.save."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [part for info in archive.infolist() for part in (info.filename.encode(), archive.read(info))]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, zlib.error) as error:
        raise ValueError("no zip file") from error


def _pack_zip(parts: Sequence[bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in zip(parts[::2], parts[1::2], strict=True):
            archive.writestr(zipfile.ZipInfo(name.decode(errors="replace") or "empty"), content)
    return written.getvalue()


def _unpack_checked_zip(data: bytes) -> list[bytes]:
    """A zip file with our checksum behind it."""
    return _unpack_zip(data.rpartition(CHECKSUM)[0] or data)


def _pack_checked_zip(parts: Sequence[bytes]) -> bytes:
    buffer = io.BytesIO(_pack_zip(parts))
    append_checksum(buffer)
    return buffer.getvalue()


def _unpack_tar(data: bytes) -> list[bytes]:
    """Blocks, headers without their checksum."""
    if len(data) < TAR_BLOCK:
        raise ValueError("no tar file")
    blocks = [data[start : start + TAR_BLOCK] for start in range(0, len(data), TAR_BLOCK)]
    return [
        block[: TAR_CHECKSUM.start] + block[TAR_CHECKSUM.stop :] if _is_header(block) else block for block in blocks
    ]


def _is_header(block: bytes) -> bool:
    try:
        return len(block) == TAR_BLOCK and any(block) and bool(tarfile.TarInfo.frombuf(block, "utf-8", "replace"))
    except tarfile.TarError:
        return False


def _pack_tar(parts: Sequence[bytes]) -> bytes:
    """A part that is as long as a header without a checksum gets one."""
    blocks = []
    for part in parts:
        if len(part) == TAR_BLOCK - 8:
            total = sum(part) + 8 * ord(" ")
            part = part[: TAR_CHECKSUM.start] + b"%06o\0 " % total + part[TAR_CHECKSUM.start :]
        blocks.append(part)
    return b"".join(blocks)


def _unpack_png(data: bytes) -> list[bytes]:
    """The chunks, each with its type and without length and checksum."""
    if not data.startswith(PNG_SIGNATURE):
        raise ValueError("no PNG")
    chunks, at = [], len(PNG_SIGNATURE)
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        chunks.append(data[at + 4 : at + 8 + length])
        at += 12 + length
    return chunks


def _pack_png(parts: Sequence[bytes]) -> bytes:
    chunks = (struct.pack(">I", max(0, len(part) - 4)) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return PNG_SIGNATURE + b"".join(chunks)


CONTAINERS = {
    "safetensors": Container(_unpack_safetensors, _pack_safetensors),
    "zip": Container(_unpack_zip, _pack_zip),
    "checked zip": Container(_unpack_checked_zip, _pack_checked_zip),
    "tar": Container(_unpack_tar, _pack_tar),
    "png": Container(_unpack_png, _pack_png),
}
