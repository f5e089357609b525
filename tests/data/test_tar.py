"""Tar files: the members of ordinary ones, and those whose headers claim what is not so."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from deepsquare.data import open_source
from deepsquare.data.source import DecodeError
from deepsquare.data.tar import members


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_members_are_those_of_tarfile(tmp_path: Path, form: int) -> None:
    rng = np.random.default_rng(form)
    deep = "/".join(["f" * 40] * (3 if form == tarfile.USTAR_FORMAT else 9))
    target = "t" * (99 if form == tarfile.USTAR_FORMAT else 300)
    kinds = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.CONTTYPE)
    names = ["a.jpg", "ü 漢.jpg", os.fsdecode(b"\xff.jpg"), "c.tar.gz", f"{deep}/b.jpg", "odd\n\x1b.cls", "d/e.cls"]
    pax = {"SCHILY.xattr.user.x": "a=b\nc", "comment": "é" * 300} if form == tarfile.PAX_FORMAT else {}
    with tarfile.open(tmp_path / "x.tar", "w", format=form, pax_headers=pax and {"comment": "of all"}) as archive:
        for number in range(60):
            member = tarfile.TarInfo(f"{number}/{names[number % 7]}")
            member.mtime, member.pax_headers = 1e9 + 0.5 if pax else 1, pax
            if number % 4 == 3:
                member.type, member.linkname = kinds[number // 4 % 6], target
            if member.isreg():
                member.size = int(rng.integers(0, 3000))
            archive.addfile(member, io.BytesIO(rng.bytes(member.size)))
    with tarfile.open(tmp_path / "x.tar") as archive:
        expected = [(member.name, member.offset_data, member.size) for member in archive if member.isreg()]
    with (tmp_path / "x.tar").open("rb") as file:
        assert list(members(tmp_path / "x.tar", file)) == expected


def header(name: str, size: int, kind: bytes = b"0", more: bytes = b"\0") -> bytes:
    """One block of a tar file; a size below 0 or above 8 GB is in base 256, as GNU tar writes it."""
    field = b"%011o\0" % size if 0 <= size < 8**11 else (size % 256**12 | (size > 0) << 95).to_bytes(12, "big")
    block = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0"
    block = (block + b" " * 8 + kind).ljust(257, b"\0") + b"ustar\00000"
    block = (block.ljust(482, b"\0") + more).ljust(512, b"\0")  # whether an old sparse file has further blocks
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def extended(kind: bytes, data: bytes) -> bytes:
    return header("@", len(data), kind) + data + bytes(-len(data) % 512)


def record(key: str, value: str) -> bytes:
    """A record of a PAX header, which begins with its own length."""
    rest = f" {key}={value}\n".encode()
    length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
    return str(length).encode() + rest


def shard(folder: Path, data: bytes) -> Path:
    """A data set whose validation split is one shard; the path of the shard."""
    (folder / "val").mkdir()
    (folder / "val" / "classes.txt").write_text("cat\ndog\n")
    (folder / "val" / "x.tar").write_bytes(data)
    return folder / "val" / "x.tar"


IMAGE = header("a.jpg", 2) + b"ab".ljust(512, b"\0") + header("a.cls", 1) + b"0".ljust(512, b"\0")
END = bytes(1024)


@pytest.mark.parametrize(
    "before",
    [
        b"",
        extended(b"x", record("path", "b.txt")) + header("c.jpg", 512) + b"x" * 512,
        extended(b"x", record("size", "512")) + header("b.txt", 0) + b"x" * 512,
        extended(b"x", record("size", "9")) + header("b.jpg", 3, b"1"),  # a link, which has no data
        extended(b"x", record("GNU.sparse.major", "1")) + header("b.jpg", 512) + b"x" * 512,
        extended(b"L", b"b.txt\0") + extended(b"K", b"c") + header("c.jpg", 0),
        header("s.jpg", 512, b"S", b"\1") + bytes(504) + b"\1" + bytes(7 + 512) + b"x" * 512,
        header("volume", 512, b"V") + b"x" * 512,
        extended(b"g", record("comment", "c")),
    ],
)
def test_special_members(tmp_path: Path, before: bytes) -> None:
    path = shard(tmp_path, before + IMAGE + END)
    source = open_source(tmp_path, "val")
    assert (len(source), source.read(0), source.name(0)) == (1, b"ab", f"{path}:a.jpg")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (header("b.jpg", -1024), r"2,048 \(a member of -1,024 bytes, where 1,024 are left\); copy or create it again$"),
        (header("b.jpg", -1), "a member of -1 bytes"),
        (header("b.txt", 2**62), "a member of 4,611,686,018,427,387,904 bytes, where"),
        (header("@", -512, b"L"), "a member of -512 bytes"),
        (header("@", 2**62, b"x"), "a member of 4,611,"),
        (extended(b"x", b"1" * (2**20 + 1)), "a header of more than 1,048,576 bytes"),
        (extended(b"x", record("size", "-512")) + header("b.jpg", 0), "a member of b'-512' bytes; expected a number"),
        (extended(b"x", record("size", "many")) + header("b.jpg", 0), "a member of b'many' bytes"),
        (extended(b"x", record("size", "9" * 5000)) + header("b.jpg", 0), "a member of b'9{20}' bytes"),
        (extended(b"g", record("size", "9" * 19)) + header("b.jpg", 0), "a member of 9,999,"),
        (extended(b"x", b"9" * 2**20), "the PAX record b'9{20}'"),
        (extended(b"x", b"0 path=a\n"), "the PAX record b'0 path"),
        (extended(b"x", b"99 path=a\n"), "the PAX record b'99 path"),
        (extended(b"x", b"7 path\n"), "the PAX record b'7 path"),
        (extended(b"L", b"n" * 5000) + header("b.jpg", 0), "a name of 5,000 characters; expected at most 4,096"),
        (header("b.jpg", 0)[:-1] + b"\1", "bad checksum"),
    ],
)
def test_a_shard_is_not_believed(tmp_path: Path, data: bytes, error: str) -> None:
    shard(tmp_path, IMAGE + data + END)
    with pytest.raises(ValueError, match=rf"^\S+x.tar is truncated or damaged at byte .*{error}"):
        open_source(tmp_path, "val")


def test_a_sparse_shard_is_listed_but_not_read(tmp_path: Path) -> None:
    with shard(tmp_path, b"").open("wb") as file:
        file.write(header("a.jpg", 2**40))
        file.seek(2**40, os.SEEK_CUR)
        file.write(header("a.cls", 1) + b"0".ljust(1536, b"\0"))
    source = open_source(tmp_path, "val")
    with pytest.raises(DecodeError, match="1,099,511,627,776 bytes; expected at most 300,000,000"):
        source.read(0)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    (path := shard(tmp_path, b"")).unlink()
    os.mkfifo(path)
    with pytest.raises(FileNotFoundError, match=r"x.tar is a broken link or no regular file"):
        open_source(tmp_path, "val")
    (classes := path.with_name("classes.txt")).unlink()
    os.mkfifo(classes)
    with pytest.raises(FileNotFoundError, match=r"has shards but no classes\.txt"):
        open_source(tmp_path, "val")
