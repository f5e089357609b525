"""One folder of images per class, as torchvision's ImageFolder reads them."""

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deepsquare.data.source import IMAGE_SUFFIXES, Source, is_image, some


class FolderSource(Source):
    """Images in class folders; classes and images are sorted by name."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.folder, self.classes = folder, tuple(sorted(classes))
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
        """The bytes of the image's file."""
        with open(self.name(index), "rb", buffering=0) as file:
            return file.read()

    def name(self, index: int) -> str:
        """The image's path."""
        return os.path.join(self.folder, self.classes[int(self.labels[index])], os.fsdecode(self._names[index]))


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
                raise FileNotFoundError(f"{entry.path} is a broken link; repair or remove it")
    return sorted(images), others
