"""Tiny ImageNet: both layouts give the same images, the cache is mapped, and an incomplete folder is refused early."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepsquare.data import tiny_imagenet
from deepsquare.data.in_memory import InMemoryBatches, LabeledImages, eval_batches
from deepsquare.data.tiny_imagenet import TinyImageNet, load_tiny_imagenet, preprocessing

SYNSETS = ("n02", "n01")  # not in the order of their labels
TRAIN, VAL = 3, 2  # images per class


def colored(number: int) -> Image.Image:
    """One color per image, which JPEG keeps to within a few values."""
    return Image.new("RGB", (64, 64), (20 * number, 100, 250 - 20 * number))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of two classes, as distributed."""
    root, lines, names, number = tmp_path / "tiny", [], [], 0
    for synset in SYNSETS:
        for split, count in (("train", TRAIN), ("val", VAL)):
            images = root / split / synset / "images" if split == "train" else root / "val" / "images"
            images.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                name = f"{synset}_{index}.JPEG" if split == "train" else f"val_{number}.JPEG"
                colored(number).save(images / name)
                names.append(f"{split}/{synset}/{name}")
                lines += [f"{name}\t{synset}\t0\t0\t62\t62"] if split == "val" else []
                number += 1
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(tiny_imagenet, "CLASSES", 2)
    monkeypatch.setattr(tiny_imagenet, "IMAGES", {"train": 2 * TRAIN, "val": 2 * VAL})
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
    monkeypatch.setattr(tiny_imagenet, "NAMES_SHA256", digest)
    return root


def to_class_folders(folder: Path) -> None:
    for synset in SYNSETS:
        for image in (folder / "train" / synset / "images").iterdir():
            image.rename(folder / "train" / synset / image.name)
        (folder / "train" / synset / "images").rmdir()
        (folder / "val" / synset).mkdir()
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        name, synset = line.split("\t")[:2]
        (folder / "val" / "images" / name).rename(folder / "val" / synset / name)
    shutil.rmtree(folder / "val" / "images")


def test_images_have_their_colors_and_labels_in_the_order_of_the_synsets(folder: Path, tmp_path: Path) -> None:
    data = load_tiny_imagenet(folder, cache=tmp_path)
    assert data.classes == ("n01", "n02")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.val.labels.tolist() == [0, 0, 1, 1]
    numbers = [5, 6, 7, 0, 1, 2]  # n02 was written first
    for image, number in zip(data.train.images, numbers, strict=True):
        expected = torch.from_numpy(np.asarray(colored(number)).copy()).permute(2, 0, 1)
        assert (image.int() - expected.int()).abs().max() <= 3


@pytest.mark.parametrize("size", [64, 32])
def test_both_layouts_give_the_same_images(folder: Path, tmp_path: Path, size: int) -> None:
    distributed = load_tiny_imagenet(folder, size, cache=tmp_path / "first")
    to_class_folders(folder)
    assert_equal(load_tiny_imagenet(folder, size, cache=tmp_path / "second"), distributed)


def assert_equal(data: TinyImageNet, other: TinyImageNet) -> None:
    assert data.classes == other.classes
    for part, same in ((data.train, other.train), (data.val, other.val)):
        assert torch.equal(part.images, same.images)
        assert torch.equal(part.labels, same.labels)


def test_32_pixels_are_the_means_of_2_by_2(folder: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = folder / "train" / "n01" / "images" / "n01_0.JPEG"
    Image.fromarray(noise).save(path)
    pixels = np.asarray(Image.open(path)).astype(float)
    means = torch.from_numpy(np.floor(pixels.reshape(32, 2, 32, 2, 3).mean((1, 3)) + 0.5)).permute(2, 0, 1)
    assert torch.equal(load_tiny_imagenet(folder, 32, cache=tmp_path).train.images[0].double(), means)


def test_a_gray_image_becomes_rgb(folder: Path, tmp_path: Path) -> None:
    Image.new("L", (64, 64), 77).save(folder / "train" / "n01" / "images" / "n01_0.JPEG")
    assert load_tiny_imagenet(folder, cache=tmp_path).train.images[0].flatten().tolist() == [77] * 3 * 64 * 64


def test_batches_use_the_mapped_cache_without_a_copy(folder: Path, tmp_path: Path) -> None:
    data = load_tiny_imagenet(folder, cache=tmp_path)
    batches = InMemoryBatches(data.train, 6, pad=4, preprocessing=preprocessing())
    assert batches.words.data_ptr() == data.train.images.data_ptr()
    copied = LabeledImages(data.train.images.contiguous(), data.train.labels)
    same = InMemoryBatches(copied, 6, pad=4, preprocessing=preprocessing())
    assert same.words.data_ptr() != batches.words.data_ptr()
    for (images, labels), (expected, expected_labels) in zip(batches.epoch(0), same.epoch(0), strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(labels, expected_labels)
    ((images, _),) = eval_batches(data.val, preprocessing=preprocessing())
    assert torch.equal(images, preprocessing().normalize(data.val.images))


def test_the_cache_follows_the_files(folder: Path, tmp_path: Path) -> None:
    before = load_tiny_imagenet(folder, cache=tmp_path)
    written = (tmp_path / "tiny_imagenet_64.safetensors").stat().st_mtime_ns
    assert_equal(load_tiny_imagenet(folder, cache=tmp_path), before)
    assert (tmp_path / "tiny_imagenet_64.safetensors").stat().st_mtime_ns == written
    Image.new("RGB", (64, 64), (1, 255, 1)).save(folder / "train" / "n01" / "images" / "n01_0.JPEG", quality=100)
    with pytest.warns(UserWarning, match="is damaged or of other files; it will be created again"):
        after = load_tiny_imagenet(folder, cache=tmp_path)
    assert after.train.images[0, 1].min() > 250


def test_a_damaged_cache_is_created_again(folder: Path, tmp_path: Path) -> None:
    before = load_tiny_imagenet(folder, cache=tmp_path)
    parts = [LabeledImages(part.images.clone(), part.labels) for part in (before.train, before.val)]  # not mapped
    expected = TinyImageNet(parts[0], parts[1], before.classes)
    path = tmp_path / "tiny_imagenet_64.safetensors"
    content = path.read_bytes()
    for damaged in (b"no cache", content[:-1] + bytes([content[-1] ^ 1]), content[:-100] + bytes(100)):
        path.unlink()  # what is mapped stays as it is
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="is damaged"):
            assert_equal(load_tiny_imagenet(folder, cache=tmp_path), expected)


def test_a_cache_folder_that_cannot_be_made(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match=r"could not be cached in .*; free .* GB there, or set DEEPSQUARE_CACHE"):
        load_tiny_imagenet(folder, cache=tmp_path / "file")


def break_nothing_there(folder: Path) -> None:
    shutil.rmtree(folder)


def break_no_val(folder: Path) -> None:
    shutil.rmtree(folder / "val")


def break_no_annotations(folder: Path) -> None:
    (folder / "val" / "val_annotations.txt").unlink()


def break_annotations(folder: Path) -> None:
    path = folder / "val" / "val_annotations.txt"
    path.write_text(path.read_text().replace("\tn01\t0\t0", "\tn01\t0", 1))


def break_missing_image(folder: Path) -> None:
    (folder / "train" / "n01" / "images" / "n01_1.JPEG").unlink()


def break_missing_val_image(folder: Path) -> None:
    (folder / "val" / "images" / "val_3.JPEG").unlink()


def break_wrong_class(folder: Path) -> None:
    path = folder / "val" / "val_annotations.txt"
    path.write_text(path.read_text().replace("n01", "n03").replace("n02", "n01").replace("n03", "n02"))


def break_truncated(folder: Path) -> None:
    path = folder / "train" / "n01" / "images" / "n01_1.JPEG"
    path.write_bytes(path.read_bytes()[:300])


def break_other_size(folder: Path) -> None:
    Image.new("RGB", (32, 64)).save(folder / "train" / "n01" / "images" / "n01_1.JPEG")


def break_latin_name(folder: Path) -> None:
    path = folder / "train" / "n01" / "images" / "n01_1.JPEG"
    path.rename(path.with_name(os.fsdecode(b"caf\xe9.JPEG")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_nothing_there, "tiny is not a folder; expected the folder of Tiny ImageNet"),
        (break_no_val, "has no folder val"),
        (break_no_annotations, "val_annotations.txt is missing"),
        (break_annotations, "val_annotations.txt, line 3: 5 fields"),
        (break_missing_image, r"has 5 images in 2 classes; expected 6 in 2; not 3 images: n01 \(2\)"),
        (break_missing_val_image, "in only one of images and val_annotations.txt: val_3.JPEG"),
        (break_wrong_class, "other names or classes"),
        (break_truncated, "n01_1.JPEG cannot be decoded .* unpack Tiny ImageNet again"),
        (break_latin_name, "other names or classes"),
        (break_other_size, "it has 32 × 64 pixels; expected 64 × 64"),
    ],
)
def test_an_incomplete_folder_is_refused(folder: Path, tmp_path: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(folder)
    with pytest.raises((OSError, ValueError), match=message):
        load_tiny_imagenet(folder, cache=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*.safetensors"))


def test_the_folder_above_is_refused_with_the_one_that_was_meant(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"has no folder train; .*; did you mean {folder}"):
        load_tiny_imagenet(folder.parent, cache=tmp_path / "cache")


def test_other_sizes_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size is 48; expected 64 or 32"):
        load_tiny_imagenet(folder, 48, cache=tmp_path)
