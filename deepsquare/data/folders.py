"""The splits of a data set, each made of class folders, as torchvision's ImageFolder reads them, or of shards."""

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deepsquare.data.shards import ShardSource
from deepsquare.data.source import IMAGE_SUFFIXES, Source, is_image, read_file, some


class FolderSource(Source):
    """Images in class folders; classes and images are sorted by name."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.folder, self.classes = folder, tuple(sorted(classes))
        # Bytes that are not UTF-8 become surrogates, which could not be written into the checkpoint of the run.
        if odd := [name for name in self.classes if any("\ud800" <= letter <= "\udfff" for letter in name)]:
            raise ValueError(f"{folder}: the names of class folders are not in UTF-8: {some(odd)}; rename them")
        images, others = zip(*(_list_images(folder / name) for name in self.classes), strict=True)
        if empty := [
            f"{name} ({'only ' + ', '.join(rest) if rest else 'empty'})"
            for name, files, rest in zip(self.classes, images, others, strict=True)
            if not files
        ]:
            raise FileNotFoundError(
                f"{folder}: {len(empty)} of {len(classes)} class folders have no image: {some(empty)}. Expected files "
                f"with the suffix {', '.join(IMAGE_SUFFIXES)}; add them, or remove the folders that are not classes"
            )
        if skipped := sum(others, Counter[str]()):
            counts = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(skipped.items()))
            warnings.warn(f"{folder}: files that are not images are skipped ({counts})", stacklevel=3)
        self.labels = torch.from_numpy(np.repeat(np.arange(len(images)), [len(files) for files in images]))
        self._names = np.array([os.fsencode(name) for files in images for name in files])

    def read(self, index: int) -> bytes:
        return read_file(self.name(index))

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.classes[int(self.labels[index])], os.fsdecode(self._names[index]))


def open_source(path: str | Path, split: str) -> Source:
    """The images of a split.

    Args:
        path: a folder with one folder per split, which has class folders, or shards (``*.tar``) and ``classes.txt``.
        split: ``train`` or ``val``.
    """
    path = Path(path).expanduser()
    folder = path / split
    if not folder.is_dir():
        raise _no_split(path, split)
    folders, files = _listed(folder)
    shards = [name for name in files if name.lower().endswith(".tar")]
    if folders and shards:
        raise ValueError(
            f"{folder} has both folders ({some(folders)}) and shards ({some(shards)}); expected only one kind: move "
            "the other away"
        )
    if shards:
        return ShardSource(folder, shards)
    if folders:
        return FolderSource(folder, folders)
    images = [name for name in files if is_image(name)]
    present = f"{len(images):,} images directly in it ({some(images, 2)})" if images else some(files)
    raise FileNotFoundError(
        f"{folder} has no class folders and no shards: found {present}. Expected a folder for each class with its "
        "images in it, or *.tar files"
    )


def check_same_classes(train: Source, val: Source) -> None:
    """Raise ValueError unless a label means the same class in both splits."""
    if train.classes == val.classes:
        return
    extra = {"train": set(train.classes) - set(val.classes), "val": set(val.classes) - set(train.classes)}
    only = [f"only in {name}: {some(sorted(names))}" for name, names in extra.items() if names]
    raise ValueError(
        f"train has {len(train.classes)} classes and val {len(val.classes)}, and they are not the same: "
        f"{'; '.join(only) or 'their order differs'}. Give both splits the same classes in the same order"
    )


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """The sorted names of folders and of files, without hidden ones."""
    with os.scandir(folder) as entries:
        listed = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    return [name for name, is_folder in listed if is_folder], [name for name, is_folder in listed if not is_folder]


def _no_split(path: Path, split: str) -> OSError:
    if not path.exists():
        return FileNotFoundError(f"{path} does not exist; give the folder that holds train and val")
    if not path.is_dir():
        return NotADirectoryError(f"{path} is a file; give the folder that holds train and val, unpacked if necessary")
    folders, files = _listed(path)
    hint = ""
    if path.name in ("train", "val", split):
        hint = f". Give {path.parent}, which holds the splits, instead of one of them"
    elif inner := [name for name in folders[:100] if (path / name / split).is_dir()]:
        hint = f". Did you mean {path / inner[0]}?"
    present = some([*folders, *files])
    return FileNotFoundError(f"{path} has no folder {split}: found {present}; expected train and val{hint}")


def _list_images(folder: Path) -> tuple[list[str], Counter[str]]:
    """The sorted names of the images, and the suffixes of other files; hidden files are skipped."""
    images: list[str] = []
    others: Counter[str] = Counter()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                raise ValueError(
                    f"{folder} is a class folder but contains the folder {entry.name}; expected images. Class "
                    f"folders belong directly into {folder.parent}, and images directly into them"
                )
            if not is_image(entry.name):
                others[os.path.splitext(entry.name)[1].lower() or "no suffix"] += 1
            elif entry.is_file():
                images.append(entry.name)
            else:
                raise FileNotFoundError(f"{entry.path} is a broken link or no regular file; repair or remove it")
    return sorted(images), others
