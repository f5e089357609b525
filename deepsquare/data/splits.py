"""Opens a folder with ``train`` and ``val``, each of class folders or of shards."""

from __future__ import annotations

import os
from pathlib import Path

from deepsquare.data.folders import FolderSource
from deepsquare.data.shards import ShardSource, write_shards
from deepsquare.data.source import Source, is_image, some

__all__ = ["Source", "check_same_classes", "open_source", "write_shards"]

SPLITS = ("train", "val")
EXPECTED = "expected train and val"


def open_source(path: str | Path, split: str) -> Source:
    """The images of a split.

    Args:
        path: holds a folder for each split, with class folders in it, or with shards (``*.tar``) and ``classes.txt``.
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
            f"{folder} has both folders ({some(folders)}) and shards ({some(shards)}); expected one of them: move the "
            "others away"
        )
    if shards:
        return ShardSource(folder, shards)
    if folders:
        return FolderSource(folder, folders)
    images = [name for name in files if is_image(name)]
    found = f"{len(images):,} images directly in it ({some(images, 2)})" if images else some(files)
    raise FileNotFoundError(
        f"{folder} has no class folders and no shards: found {found}. Expected a folder for each class with its "
        "images in it, or *.tar files"
    )


def check_same_classes(train: Source, val: Source) -> None:
    """A label must mean the same class in both."""
    if train.classes == val.classes:
        return
    only = [
        f"only in {name}: {some(sorted(set(one.classes) - set(other.classes)))}"
        for name, one, other in (("train", train, val), ("val", val, train))
        if set(one.classes) - set(other.classes)
    ]
    raise ValueError(
        f"train has {len(train.classes)} classes and val {len(val.classes)}, and they are not the same: "
        f"{'; '.join(only) or 'their order differs'}. Give both splits the same classes in the same order"
    )


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """The names of folders and of files, sorted, without the hidden ones."""
    with os.scandir(folder) as entries:
        shown = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    return [name for name, is_folder in shown if is_folder], [name for name, is_folder in shown if not is_folder]


def _no_split(path: Path, split: str) -> OSError:
    if not path.exists():
        return FileNotFoundError(f"{path} does not exist; give the folder that holds train and val")
    if not path.is_dir():
        return NotADirectoryError(f"{path} is a file; give the folder that holds train and val, unpacked if need be")
    folders, files = _listed(path)
    hint = ""
    if path.name in (*SPLITS, split):
        hint = f". Give {path.parent}, which holds the splits, instead of one of them"
    elif inner := [name for name in folders[:100] if (path / name / split).is_dir()]:
        hint = f". Did you mean {path / inner[0]}?"
    return FileNotFoundError(f"{path} has no folder {split}: found {some([*folders, *files])}; {EXPECTED}{hint}")
