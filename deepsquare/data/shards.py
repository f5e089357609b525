"""WebDataset shards: tar files of ``key.jpg`` and ``key.cls``, with random access and without extraction.

All headers are read once, when the source is opened; reading an image is then one read at its offset.
"""

import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deepsquare._files import atomic_write, ensure_writable
from deepsquare.data.source import IMAGE_SUFFIXES, Source, read_file, some
from deepsquare.data.tar import Member, members

CLASSES, CLASSES_LIMIT = "classes.txt", 2**24  # bytes
KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # WebDataset's: up to the first dot of the last part
LABEL_LIMIT = 20  # bytes


class Sample(NamedTuple):
    """The position of an image in its shard, and its label."""

    name: str
    offset: int
    size: int
    label: int


class ShardSource(Source):
    """Images in shards, sorted by shard name, then in the order of the samples."""

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
        self._names = np.array([os.fsencode(sample.name) for sample in samples])
        self._shard = np.repeat(np.arange(len(listed)), [len(shard) for shard in listed])
        self._position = np.array([(sample.offset, sample.size) for sample in samples])

    def read(self, index: int) -> bytes:
        offset, size = (int(value) for value in self._position[index])
        # Opened each time, which costs microseconds: thousands of shards would exceed the limit of open files.
        data = read_file(self._path(index), offset, size)
        if len(data) != size:
            raise OSError(f"{self.name(index)} is truncated: the shard has changed since it was listed; start again")
        return data

    def name(self, index: int) -> str:
        """As in ``…/000012.tar:00012345.jpeg``."""
        return f"{self._path(index)}:{os.fsdecode(self._names[index])}"

    def _path(self, index: int) -> str:
        return os.path.join(self.folder, self.shards[self._shard[index]])


def _classes(folder: Path) -> tuple[str, ...]:
    path = folder / CLASSES
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has shards but no {CLASSES}; write it, one class name per line in the order of the labels"
        )
    with path.open("rb") as file:
        data = file.read(CLASSES_LIMIT + 1)
    if len(data) > CLASSES_LIMIT:
        raise ValueError(f"{path} has more than {CLASSES_LIMIT:,} bytes; expected one class name per line")
    try:
        classes = tuple(data.decode("utf-8-sig").splitlines())  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}); save it in UTF-8") from error
    invalid = sorted(name for name, count in Counter(classes).items() if count > 1 or not name.strip())
    if not classes or invalid:
        raise ValueError(f"{path}: expected one class name per line, each once; found {some(invalid)}")
    return classes


def _samples(path: Path, classes: int) -> Iterator[Sample]:
    """The images of a shard with their labels; errors name the shard."""
    images: dict[str, Member] = {}
    labels: dict[str, Member] = {}
    if not path.is_file():  # opening a named pipe would wait for ever
        raise FileNotFoundError(f"{path} is a broken link or no regular file; repair or remove it")
    with path.open("rb") as file:
        for member in members(path, file):
            matched = KEY.fullmatch(member.name)
            suffix = f".{matched[2].lower()}" if matched else ""
            if not matched or suffix not in (".cls", *IMAGE_SUFFIXES):
                continue
            group = labels if suffix == ".cls" else images
            if matched[1] in group:
                raise ValueError(
                    f"{path}: a second member {member.name} for one sample; expected one image and one label"
                )
            group[matched[1]] = member
        for missing, kind in (
            (images.keys() - labels.keys(), "label (key.cls)"),
            (labels.keys() - images.keys(), "image (key.jpg)"),
        ):
            if missing:
                raise ValueError(f"{path}: no {kind} for {some(sorted(missing))}; create the shard again")
        for key, member in images.items():
            label = labels[key]
            text = os.pread(file.fileno(), min(label.size, LABEL_LIMIT), label.offset)
            if label.size > LABEL_LIMIT or not text.strip().isdigit() or int(text) >= classes:
                raise ValueError(
                    f"{path}: the label {label.name} is {text!r}; expected a whole number below {classes}, the number "
                    f"of lines in {CLASSES}"
                )
            yield Sample(*member, int(text))


def write_shards(source: Source, folder: str | Path, per_shard: int = 1000) -> None:
    """Write the images of a source into shards of ``per_shard``, in its order and with their bytes unchanged.

    The classes are written last: a folder without them is incomplete.
    """
    folder = Path(folder)
    if per_shard < 1:
        raise ValueError(f"per_shard is {per_shard}; expected at least 1")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder, or remove what is in it")
    if odd := [name for name in source.classes if name.lstrip("\ufeff").splitlines() != [name] or not name.strip()]:
        raise ValueError(f"{CLASSES} has one class per line, but {odd[0]!r} is not one line; rename it")
    ensure_writable(folder)
    for number, first in enumerate(range(0, len(source), per_shard)):
        with atomic_write(folder / f"{number:06}.tar") as temporary, tarfile.open(temporary, "w") as archive:
            for index in range(first, min(first + per_shard, len(source))):
                suffix, label = os.path.splitext(source.name(index))[1].lower(), int(source.labels[index])
                for kind, data in ((suffix, source.read(index)), (".cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{index:08}{kind}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    with atomic_write(folder / CLASSES) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in source.classes), encoding="utf-8")
