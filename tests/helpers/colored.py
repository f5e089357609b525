"""Folders of small images, made for a test: a class is a colour."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 60, 220), "green": (50, 200, 60), "red": (220, 50, 40)}


def make_images(root: Path, *, train: int = 16, val: int = 7, side: int = 40, seed: int = 0) -> Path:
    """``root`` with train and val, so many images of each class in them: its colour under noise."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        for name, colour in COLOURS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.array(colour) + rng.normal(0, 60, (side, side + 8, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)
    return root
