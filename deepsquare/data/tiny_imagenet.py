"""Tiny ImageNet (Stanford CS231N, 2015): 200 classes of ImageNet, 500 training and 50 validation images each, 64 × 64.

It is read from a folder, as distributed or as class folders, and never downloaded. The names of all files with their
classes are checked against a known hash, so that an image that is missing or in the wrong class is noticed before a
run starts. The decoded images are kept in a cache file that processes map into memory, so that they share one copy.
"""

import hashlib
import logging
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepsquare._files import atomic_write, lock
from deepsquare._threads import cores
from deepsquare.data.cifar10 import cache_folder
from deepsquare.data.in_memory import LabeledImages
from deepsquare.data.source import some
from deepsquare.preprocessing import Preprocessing

logger = logging.getLogger("deepsquare")
CLASSES, SIZE = 200, 64
IMAGES = {"train": 100_000, "val": 10_000}
NAMES_SHA256 = "69d3c3dd86e76295299815a52e24c93591950f73e127999490baa8f86896e45d"
ANNOTATIONS, ANNOTATIONS_LIMIT = "val_annotations.txt", 2**22  # bytes; as distributed it has 347,377
FORMAT = "2"  # of the cache


@dataclass(frozen=True)
class TinyImageNet:
    """The training and validation images, with the 200 classes (WordNet synsets) in the order of their labels."""

    train: LabeledImages
    val: LabeledImages
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ImageFile:
    """An image of a split; ``path`` is where it is, ``name`` says the same in both layouts: train/n01443537/x.JPEG."""

    name: str
    path: Path


def load_tiny_imagenet(folder: str | Path, size: int = SIZE, *, cache: str | Path | None = None) -> TinyImageNet:
    """Tiny ImageNet from a folder with ``train`` and ``val``.

    Args:
        folder: as distributed (``train/SYNSET/images``, ``val/images`` and ``val/val_annotations.txt``), or with class
            folders in both splits.
        size: 64, or 32 for the means of 2 × 2 pixels.
        cache: the folder of the cache, which needs 1.8 GB (450 MB for 32 pixels); cifar10.cache_folder by default.
    """
    if size not in (SIZE, SIZE // 2):
        raise ValueError(f"size is {size}; expected {SIZE} or {SIZE // 2}")
    files = list_files(Path(folder).expanduser())
    cache = cache_folder() if cache is None else Path(cache)
    path = cache / f"tiny_imagenet_{size}.safetensors"
    identity = {
        "format": FORMAT,
        "names": NAMES_SHA256,
        "bytes": str(sum(os.stat(file.path).st_size for file in files)),
    }
    classes = tuple(sorted({file.name.split("/")[1] for file in files}))
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that cannot be locked can be read; at worst two processes decode
            cache.mkdir(parents=True, exist_ok=True)
            lock(stack.enter_context(path.with_suffix(".lock").open("w")))  # one process decodes, the others wait
        if (tensors := _read_cache(path, identity, size)) is None:
            tensors = _decode(files, classes, size)
            try:
                with atomic_write(path) as temporary:
                    save_file(tensors, temporary, metadata={**identity, "crc32": _checksum(tensors)})
            except (OSError, SafetensorError) as error:
                needed = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
                reason = f"Tiny ImageNet could not be cached in {path} ({error})"
                hint = f"free {needed:.1f} GB there, or set DEEPSQUARE_CACHE to another folder"
                raise OSError(f"{reason}; {hint}") from error
            tensors = load_file(path)  # mapped, instead of a copy per process
    parts = [LabeledImages.from_words(tensors[f"{split}_words"], tensors[f"{split}_labels"].long()) for split in IMAGES]
    return TinyImageNet(parts[0], parts[1], classes)


def preprocessing(size: int = SIZE) -> Preprocessing:
    """ImageNet's mean and std."""
    return Preprocessing(size=size, resize=size)


def list_files(folder: Path) -> list[ImageFile]:
    """All images, sorted by split, class and name; fails unless they are exactly those of the data set."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; expected the folder of Tiny ImageNet, with train and val")
    files: list[ImageFile] = []
    for split, count in IMAGES.items():
        listed = _list_split(folder, split)
        if len(listed) != count:
            per_class = Counter(file.name.split("/")[1] for file in listed)
            short = [
                f"{name} ({present})" for name, present in sorted(per_class.items()) if present != count // CLASSES
            ]
            hint = f"; not {count // CLASSES} images: {some(short)}" if short else ""
            raise ValueError(
                f"{folder / split} has {len(listed):,} images in {len(per_class)} classes; expected {count:,} in "
                f"{CLASSES}{hint}. Unpack Tiny ImageNet again"
            )
        files += sorted(listed, key=lambda file: file.name)
    names = "\n".join(file.name for file in files)
    digest = hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()  # names need not be in UTF-8
    if digest != NAMES_SHA256:
        raise ValueError(
            f"{folder} has as many images as Tiny ImageNet, but other names or classes (sha256 {digest[:12]}…; "
            f"expected {NAMES_SHA256[:12]}…). Unpack Tiny ImageNet again"
        )
    return files


def _list_split(folder: Path, split: str) -> list[ImageFile]:
    root = folder / split
    if not root.is_dir():
        inner = next((entry for entry in sorted(folder.glob("*/")) if (entry / split).is_dir()), None)
        hint = f"; did you mean {inner}?" if inner else ""
        raise FileNotFoundError(f"{folder} has no folder {split}; expected Tiny ImageNet, with train and val{hint}")
    annotations = root / ANNOTATIONS
    if split == "val" and (root / "images").is_dir():  # as distributed: one folder, with the classes in a file
        if not annotations.is_file():
            raise FileNotFoundError(f"{annotations} is missing; it has the classes of the images in {root / 'images'}")
        present = set(_images(root / "images"))
        labeled = _read_annotations(annotations)
        if missing := sorted(present ^ labeled.keys()):
            raise ValueError(f"{root}: in only one of images and {ANNOTATIONS}: {some(missing)}. Unpack it again")
        return [ImageFile(f"val/{synset}/{name}", root / "images" / name) for name, synset in labeled.items()]
    files = []
    for synset in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
        inner = root / synset / "images"
        inner = inner if inner.is_dir() else root / synset
        files += [ImageFile(f"{split}/{synset}/{name}", inner / name) for name in _images(inner)]
    return files


def _images(folder: Path) -> list[str]:
    return [entry.name for entry in os.scandir(folder) if entry.name.endswith(".JPEG") and entry.is_file()]


def _read_annotations(path: Path) -> dict[str, str]:
    """The synset of each image: tab-separated lines with the image, its synset and a bounding box."""
    if path.stat().st_size > ANNOTATIONS_LIMIT:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; expected at most {ANNOTATIONS_LIMIT:,}")
    labeled: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error}). Unpack Tiny ImageNet again") from error
    for number, line in enumerate(lines, 1):
        fields = line.split("\t")
        if len(fields) != 6:
            raise ValueError(f"{path}, line {number}: {len(fields)} fields; expected image, synset and four numbers")
        labeled[fields[0]] = fields[1]
    return labeled


def _read_cache(path: Path, identity: dict[str, str], size: int) -> dict[str, Tensor] | None:
    """The mapped tensors; None if there is no cache for these files."""
    if not path.exists():
        return None
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        f"{split}_words": (torch.uint8, (count, size, size, 4)) for split, count in IMAGES.items()
    }
    expected |= {f"{split}_labels": (torch.uint8, (count,)) for split, count in IMAGES.items()}
    with suppress(OSError, SafetensorError):
        with safe_open(path, "pt") as file:
            stored = file.metadata()
        tensors = load_file(path)
        shapes = {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()}
        if shapes == expected and stored == {**identity, "crc32": _checksum(tensors)}:
            return tensors
    warnings.warn(f"the cache {path} is damaged or of other files; it will be created again", stacklevel=3)
    return None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of all bytes; it notices damage to the file, and takes about a second."""
    checksum = 0
    for _, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    return f"{checksum:08x}"


def _decode(files: Sequence[ImageFile], classes: Sequence[str], size: int) -> dict[str, Tensor]:
    """All images as pixels of four bytes (red, green, blue, 0), with their labels."""
    logger.info("decoding Tiny ImageNet (%d images)", len(files))
    numbers = {synset: number for number, synset in enumerate(classes)}
    tensors = {}
    with ThreadPoolExecutor(cores()) as pool:
        for split, count in IMAGES.items():
            part = [file for file in files if file.name.startswith(split)]
            words = np.zeros((count, size, size, 4), dtype=np.uint8)
            for number, image in enumerate(pool.map(_decode_image, part, chunksize=64)):
                words[number, :, :, :3] = image if size == SIZE else _halve(image)
            tensors[f"{split}_words"] = torch.from_numpy(words)
            labels = [numbers[file.name.split("/")[1]] for file in part]
            tensors[f"{split}_labels"] = torch.tensor(labels, dtype=torch.uint8)
    return tensors


def _decode_image(file: ImageFile) -> NDArray[np.uint8]:
    try:
        with Image.open(file.path, formats=["JPEG"]) as image:
            if image.size != (SIZE, SIZE):
                raise ValueError(f"it has {image.width} × {image.height} pixels; expected {SIZE} × {SIZE}")
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file.path} cannot be decoded ({error}); unpack Tiny ImageNet again") from error


def _halve(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The rounded means of 2 × 2 pixels."""
    blocks = image.reshape(SIZE // 2, 2, SIZE // 2, 2, 3).astype(np.uint16)
    means: NDArray[np.uint8] = ((blocks.sum((1, 3), dtype=np.uint16) + 2) // 4).astype(np.uint8)
    return means
