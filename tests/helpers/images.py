"""Images for tests: gradients with shapes on them, in ImageNet's formats, and folders whose classes are colors."""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COLORS = {"blue": (40, 60, 220), "green": (50, 200, 60), "red": (220, 50, 40)}


def draw_image(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """A smooth background with a few discs and lines, as photographs have surfaces and edges."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [np.sin(a * x + b * y + c) for a, b, c in rng.uniform(1, 6, (3, 3))]
    image = Image.fromarray((127 + 90 * np.stack(waves, -1)).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        (a, b), (c, d) = rng.uniform(0, 1, (2, 2)) * (width, height)
        color = tuple(rng.integers(0, 256, 3).tolist())
        pen.ellipse((min(a, c), min(b, d), max(a, c), max(b, d)), fill=color)
        pen.line((a, b, d, c), fill=color[::-1], width=5)
    return np.asarray(image)


def encode(pixels: NDArray[np.uint8], mode: str = "RGB", form: str = "JPEG") -> bytes:
    out = io.BytesIO()
    image = Image.fromarray(pixels).convert(mode)
    image.save(out, form, **({"quality": 90} if form == "JPEG" else {}))
    return out.getvalue()


def make_class_folders(root: Path, split: str = "train", classes: int = 2, each: int = 3) -> Path:
    """A data set of class folders; the root again."""
    for label in range(classes):
        folder = root / split / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(each):
            seed = 100 * label + number
            (folder / f"p{number}.JPEG").write_bytes(encode(draw_image(120 + 10 * number, 100 + 20 * label, seed)))
    return root


def make_colored_folders(root: Path, *, train: int = 16, val: int = 7, side: int = 40, seed: int = 0) -> Path:
    """A data set with train and val whose classes are colors under noise; the root again."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        for name, color in COLORS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.array(color) + rng.normal(0, 60, (side, side + 8, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)
    return root
