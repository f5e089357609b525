"""The zip archives of ``torch.save``: their entries are stored as they are, so that none expands when it is read."""

import struct
from pathlib import Path
from typing import IO
from zipfile import ZIP_STORED, ZipFile

START, END, LOCATOR_64 = b"PK\3\4", b"PK\5\6", b"PK\6\7"
END_SIZE, LOCATOR_64_SIZE, END_64_SIZE = 22, 20, 56  # of the records behind the directory, in bytes
MAX_COMMENT = 2**16  # behind the last record


def check_archive(path: Path) -> None:
    """Raise a ValueError unless torch can read a zip archive in the memory of its size; other files are not looked at.

    torch reads an entry into memory before it compares its size with anything, and a deflated one has up to a thousand
    times its size in the file.
    """
    with path.open("rb") as file:
        if file.read(len(START)) != START:
            return
        try:
            _check_directory(file)
            entries = ZipFile(file).infolist()
        except Exception as error:  # zipfile and struct fail in many ways
            raise ValueError(f"{path} is not a zip file as torch.save writes it, or is damaged") from error
        size = file.seek(0, 2)
    refusal = "which torch.save does not write"
    for entry in entries:
        if entry.compress_type != ZIP_STORED:
            raise ValueError(f"{path} has compressed entries, {refusal}: {entry.filename!r:.100}")
    if (total := sum(entry.file_size for entry in entries)) > size:
        raise ValueError(f"{path} has entries of {total} bytes in a file of {size}, {refusal}")


def _check_directory(file: IO[bytes]) -> None:
    """Require the directory directly before the last records, where each reader of zip files finds the same one.

    zipfile looks for it there, torch at the offset that the last record names.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - MAX_COMMENT - END_SIZE))
    tail = file.read()
    at = tail.rfind(END)
    end = size - len(tail) + at
    numbers: tuple[int, ...] = struct.unpack("<HLL", tail[at + 10 : at + 20])  # count, length and offset
    if tail[at - LOCATOR_64_SIZE :].startswith(LOCATOR_64):  # of a file above 4 GiB
        end -= LOCATOR_64_SIZE + END_64_SIZE
        file.seek(end)
        large = struct.unpack("<QQQ", file.read(END_64_SIZE)[32:])
        (located,) = struct.unpack("<Q", tail[at - LOCATOR_64_SIZE + 8 : at - LOCATOR_64_SIZE + 16])
        limits = (2**16 - 1, 2**32 - 1, 2**32 - 1)
        saturated = all(number in pair for number, *pair in zip(numbers, large, limits, strict=True))
        if located != end or not saturated:
            raise ValueError("its records of the directory differ")
        numbers = large
    _, length, offset = numbers
    if at < 0 or offset + length != end:
        raise ValueError("its directory is elsewhere")
