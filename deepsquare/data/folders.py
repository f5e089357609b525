"""A folder for each class, with its images in it, as torchvision's ImageFolder reads them."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deepsquare.data.source import IMAGE_SUFFIXES, FileNames, Source, is_image, some


class FolderSource(Source):
    """Images in class folders; classes and images are in the order of their names."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.folder, self.classes = folder, tuple(sorted(classes))
        found = _scan(folder, self.classes)
        self.labels = torch.from_numpy(np.repeat(np.arange(len(found)), [len(names) for names in found]))
        self._names = FileNames(name for names in found for name in names)

    def read(self, index: int) -> bytes:
        """The image's file, as it is."""
        with open(self.name(index), "rb", buffering=0) as file:
            return file.read()

    def name(self, index: int) -> str:
        """The image's path."""
        return os.path.join(self.folder, self.classes[int(self.labels[index])], self._names[index])


def _scan(folder: Path, classes: Sequence[str]) -> list[list[str]]:
    """The images of each class."""
    found, empty = [], []
    others: Counter[str] = Counter()  # by ending
    for name in classes:
        images, rest = _images(folder / name)
        found.append(images)
        if not images:
            empty.append(f"{name} (only {', '.join(rest)})" if rest else f"{name} (empty)")
        others += rest
    if empty:
        raise FileNotFoundError(
            f"{folder}: {len(empty)} of {len(classes)} class folders have no image: {some(empty)}. Expected files "
            f"ending in {', '.join(IMAGE_SUFFIXES)}; add them, or remove the folders that are no classes"
        )
    if others:
        kinds = ", ".join(f"{count:,} {ending}" for ending, count in sorted(others.items()))
        warnings.warn(f"{folder}: files that are no images are left out ({kinds})", stacklevel=4)
    return found


def _images(folder: Path) -> tuple[list[str], Counter[str]]:
    """The names of the images, sorted, and the endings of other files; hidden ones are passed over."""
    images: list[str] = []
    others: Counter[str] = Counter()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                raise ValueError(
                    f"{folder} is taken for a class but holds the folder {entry.name}; expected images. Class "
                    f"folders lie directly in {folder.parent}, and images directly in them"
                )
            if not is_image(entry.name):
                others[os.path.splitext(entry.name)[1].lower() or "no ending"] += 1
            elif entry.is_file():
                images.append(entry.name)
            else:
                raise FileNotFoundError(f"{entry.path} leads to no file; mend the link, or remove it")
    return sorted(images), others
