"""WebDataset shards: tar files of ``key.jpg`` and ``key.cls``, read at random places and never extracted.

Members are listed once, when the source is opened; a image is then one read at its offset. Listing takes a whole
pass over the headers, and no member but a regular file is looked at.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deepsquare._files import atomic_write, ensure_writable
from deepsquare.data.source import IMAGE_SUFFIXES, FileNames, Source, some

CLASSES = "classes.txt"
KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # WebDataset's: up to the first dot of the last part
LABEL_LIMIT = 20  # bytes
BLOCK = 512  # of a tar file


class Sample(NamedTuple):
    """Where a image lies in its shard, and its class."""

    name: str
    offset: int
    size: int
    label: int


class ShardSource(Source):
    """Images in shards, in the order of the shards' names and of the samples in them."""

    def __init__(self, folder: Path, shards: Sequence[str]) -> None:
        self.folder, self.shards = folder, tuple(sorted(shards))
        self.classes = _classes(folder)
        listed = [list(_samples(folder / shard, len(self.classes))) for shard in self.shards]
        samples = [sample for shard in listed for sample in shard]
        if not samples:
            raise FileNotFoundError(
                f"{folder}: the shards {some(self.shards)} hold no image; expected key.jpg, key.cls"
            )
        self.labels = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
        self._names = FileNames(sample.name for sample in samples)
        self._shard = np.repeat(np.arange(len(listed)), [len(shard) for shard in listed])
        self._place = np.array([(sample.offset, sample.size) for sample in samples])

    def read(self, index: int) -> bytes:
        """The image's file, as it is."""
        offset, size = (int(value) for value in self._place[index])
        # Opened each time: it costs microseconds, a image milliseconds, and thousands of shards exceed open files.
        with open(self._path(index), "rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{self.name(index)} is cut: the shard has changed since it was listed; start again")
        return data

    def name(self, index: int) -> str:
        """As in ``…/000012.tar:00012345.jpeg``."""
        return f"{self._path(index)}:{self._names[index]}"

    def _path(self, index: int) -> str:
        return os.path.join(self.folder, self.shards[self._shard[index]])


def _classes(folder: Path) -> tuple[str, ...]:
    try:
        classes = tuple((folder / CLASSES).read_text(encoding="utf-8").splitlines())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} has shards but no {CLASSES}; write it, a class name a line in the order of the labels"
        ) from error
    doubled = sorted({name for name in classes if classes.count(name) > 1 or not name.strip()})
    if not classes or doubled:
        raise ValueError(f"{folder / CLASSES}: expected a class name a line, each once; found {some(doubled)}")
    return classes


def _samples(path: Path, classes: int) -> Iterator[Sample]:
    """The images of a shard with their labels; what is wrong is said with the shard's name."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    with path.open("rb") as file:
        for member in _members(path, file):
            matched = KEY.fullmatch(member.name)
            kind = matched[2].lower() if matched else ""
            if not matched or not (kind == "cls" or f".{kind}" in IMAGE_SUFFIXES):
                continue
            if matched[1] in (labels if kind == "cls" else images):
                raise ValueError(
                    f"{path}: two members for one sample, the second {member.name}; expected one of a kind"
                )
            if kind == "cls":
                labels[matched[1]] = _label(path, file.fileno(), member, classes)
            else:
                images[matched[1]] = member
    for one, other, what in ((images, labels, "label (key.cls)"), (labels, images, "image (key.jpg)")):
        if lacking := sorted(set(one) - set(other)):
            raise ValueError(f"{path}: no {what} for {some(lacking)}; make the shard again")
    for key, member in images.items():
        yield Sample(member.name, member.offset_data, member.size, labels[key])


def _members(path: Path, file: io.BufferedReader) -> Iterator[tarfile.TarInfo]:
    """The regular files of a whole tar file."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isreg() and not member.issparse():
                    yield member
            end = os.pread(file.fileno(), BLOCK, archive.offset)
    except tarfile.TarError as error:
        raise ValueError(f"{path} cannot be read as a tar file ({error}); copy or make it again") from error
    if end != bytes(BLOCK):  # tarfile takes a damaged header for the end
        raise ValueError(f"{path} is cut or damaged at byte {archive.offset:,}; copy or make it again")


def _label(path: Path, file: int, member: tarfile.TarInfo, classes: int) -> int:
    text = os.pread(file, min(member.size, LABEL_LIMIT), member.offset_data)
    if member.size > LABEL_LIMIT or not text.strip().isdigit() or int(text) >= classes:
        raise ValueError(
            f"{path}: the label {member.name} is {text!r}; expected a whole number below {classes}, the number of "
            f"lines in {CLASSES}"
        )
    return int(text)


def write_shards(source: Source, folder: str | Path, per_shard: int = 1000) -> None:
    """Write the images of a source into shards of ``per_shard``, in its order and as they are.

    The classes are written last: a folder in which they are missing was not finished.
    """
    folder = Path(folder)
    if per_shard < 1:
        raise ValueError(f"per_shard is {per_shard}; expected at least 1")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder, or remove what is in it")
    if odd := [name for name in source.classes if len(name.splitlines()) != 1]:
        raise ValueError(f"{CLASSES} has a class a line, which {odd[0]!r} does not suit; rename it")
    ensure_writable(folder)
    for number, first in enumerate(range(0, len(source), per_shard)):
        with atomic_write(folder / f"{number:06}.tar") as temporary, tarfile.open(temporary, "w") as archive:
            for index in range(first, min(first + per_shard, len(source))):
                ending = os.path.splitext(source.name(index))[1].lower()
                _add(archive, f"{index:08}{ending}", source.read(index))
                _add(archive, f"{index:08}.cls", str(int(source.labels[index])).encode())
    with atomic_write(folder / CLASSES) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in source.classes), encoding="utf-8")


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
