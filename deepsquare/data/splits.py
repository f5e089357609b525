"""Opens the splits of a data set, each made of class folders or of shards."""

import os
from pathlib import Path

from deepsquare.data.folders import FolderSource
from deepsquare.data.shards import ShardSource
from deepsquare.data.source import Source, is_image, some


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
