"""The three pipelines yield the same images, and none fails on a damaged one."""

import io
import multiprocessing
import signal
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.images import draw_image, encode, make_class_folders
from PIL import Image
from torch import Tensor

from deepsquare.data import Batch, Source, TrainTransform, available, batches, loader, open_source, write_shards
from deepsquare.data.limits import MAX_SCANNED, check_cost, jpeg_size
from deepsquare.data.source import DecodeError
from deepsquare.data.transforms import Transform, random_crop
from deepsquare.preprocessing import Preprocessing

FULL_SIZE = Path(__file__).parents[3] / "shared" / "data" / "imagenet-fullsize.tar"
PIPELINES = ("torchvision", "fast", "dali")
# By how many of 255 levels the pixels of an image may differ from torchvision's: on average, and 99% of them.
TOLERANCE = {"torchvision": (0.0, 0.0), "fast": (0.25, 1.0), "dali": (0.25, 2.0)}
TOLERANCE_OF_LARGE = {
    **TOLERANCE,
    "fast": (1.0, 6.0),
}  # at least three times as large as the result: decoded at a smaller size


def needs(pipeline: str) -> None:
    if not available(pipeline):
        pytest.skip(f"the package of pipeline {pipeline!r} is not installed")


def grouped(source: Source, size: int = 4) -> list[list[int]]:
    return [list(range(first, min(first + size, len(source)))) for first in range(0, len(source), size)]


def joined(loaded: Sequence[Batch]) -> Tensor:
    return torch.cat([batch.images for batch in loaded])


def by_torchvision(source: Source, transform: Transform, epoch: int) -> Tensor:
    """Written with torchvision alone, up to the random numbers."""
    from torchvision.datasets.folder import pil_loader
    from torchvision.transforms.v2 import functional as F

    images = []
    for index in range(len(source)):
        image = pil_loader(source.name(index))
        if isinstance(transform, Preprocessing):
            image = F.center_crop(F.resize(image, [transform.resize]), [transform.size])
        else:
            crop = random_crop(transform, image.width, image.height, 5, epoch, index)
            size = [transform.size, transform.size]
            image = F.resized_crop(image, crop.top, crop.left, crop.height, crop.width, size)
            image = F.horizontal_flip(image) if crop.flip else image
        images.append(F.pil_to_tensor(image))
    return torch.stack(images)


def check_alike(source: Source, pipeline: str, transform: Transform, epochs: int) -> None:
    for epoch in range(epochs):
        loaded = list(batches(source, grouped(source), transform, seed=5, epoch=epoch, pipeline=pipeline))
        assert not [name for batch in loaded for name in batch.damaged]
        assert torch.equal(torch.cat([batch.labels for batch in loaded]), source.labels)
        images = joined(loaded)
        assert images.dtype == torch.uint8
        difference = (images.float() - by_torchvision(source, transform, epoch).float()).abs().flatten(1)
        for index in range(len(source)):
            large = max(jpeg_size(source.read(index)) or (0, 0)) >= 3 * transform.size
            mean, most = (TOLERANCE_OF_LARGE if large else TOLERANCE)[pipeline]
            assert difference[index].mean() <= mean, source.name(index)
            assert difference[index].quantile(0.99) <= most, source.name(index)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Images of several sizes and kinds; ImageNet has such as the last two, too."""
    folder = tmp_path_factory.mktemp("mixed") / "train" / "a"
    folder.mkdir(parents=True)
    sizes = ((500, 375), (375, 500), (64, 64), (40, 30), (700, 90), (1200, 900), (801, 603))
    kinds = (("L", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"), ("RGB", "PNG"))
    for number, (width, height) in enumerate(sizes):
        (folder / f"{number}.JPEG").write_bytes(encode(draw_image(width, height, number)))
    for number, (mode, form) in enumerate(kinds):
        (folder / f"{mode}_{form}.JPEG").write_bytes(encode(draw_image(300, 200, number), mode, form))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    Image.fromarray(draw_image(300, 200)).save(folder / "exif.jpg", exif=rotated)
    return open_source(folder.parents[1], "train")


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("transform", [TrainTransform(64), Preprocessing(size=64, resize=72)])
def test_pipelines_agree(mixed: Source, pipeline: str, transform: Transform) -> None:
    needs(pipeline)
    check_alike(mixed, pipeline, transform, epochs=3)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("transform", [TrainTransform(), Preprocessing()])
def test_pipelines_agree_on_photographs(tmp_path: Path, pipeline: str, transform: Transform) -> None:
    needs(pipeline)
    if not FULL_SIZE.exists():
        pytest.skip(f"{FULL_SIZE.name} is not here")
    with tarfile.open(FULL_SIZE) as archive:
        members = [member for member in archive if member.isreg() and "/val/" in member.name]
        archive.extractall(tmp_path, members[:24], filter="data")
    check_alike(open_source(tmp_path / "imagenet-fullsize", "val"), pipeline, transform, epochs=1)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_batches_do_not_depend_on_workers_or_on_where_they_start(mixed: Source, pipeline: str) -> None:
    needs(pipeline)
    batch_indices = [[3, 1, 4], [1], [], [5, 9, 2, 6]]
    options: dict[str, Any] = {"transform": TrainTransform(32), "seed": 1, "epoch": 2, "pipeline": pipeline}
    alone = list(batches(mixed, batch_indices, **options))
    assert [tuple(batch.images.shape) for batch in alone] == [(len(indices), 3, 32, 32) for indices in batch_indices]
    assert torch.equal(alone[0].images[1], alone[1].images[0])  # the same image in another batch
    state = torch.get_rng_state()
    for workers in (1, 2):
        others = list(batches(mixed, batch_indices, workers=workers, **options))
        assert torch.equal(joined(others), joined(alone))
        assert [batch.labels.tolist() for batch in others] == [batch.labels.tolist() for batch in alone]
    assert torch.equal(joined(list(batches(mixed, batch_indices[2:], **options))), joined(alone[2:]))
    assert not torch.equal(joined(list(batches(mixed, batch_indices, **{**options, "epoch": 3}))), joined(alone))
    assert torch.equal(torch.get_rng_state(), state), "the trainer's random numbers are untouched"


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_shards_yield_the_images_of_the_folder(mixed: Source, tmp_path: Path, pipeline: str) -> None:
    needs(pipeline)
    write_shards(mixed, tmp_path / "train", 5)
    shards = open_source(tmp_path, "train")
    one, other = (
        joined(list(batches(source, grouped(source), TrainTransform(48), pipeline=pipeline)))
        for source in (mixed, shards)
    )
    assert torch.equal(one, other)


def bomb() -> bytes:
    """A small PNG that claims 30,000 × 30,000 pixels."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return b"\x89PNG\r\n\x1a\n" + chunk


def large_jpeg() -> bytes:
    """A JPEG that claims 65,000 × 65,000 pixels."""
    data = bytearray(encode(draw_image(64, 64)))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", 65_000, 65_000)
    return bytes(data)


def progressive(scans: int) -> bytes:
    """A progressive JPEG of 400 × 400 pixels whose last scan, of a few bytes, is repeated."""
    out = io.BytesIO()
    Image.new("L", (400, 400), 128).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    repeated = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + repeated * (scans - data.count(b"\xff\xda")) + data[-2:]


def with_frames(form: str) -> bytes:
    """An animation of 200 frames."""
    out, frames = io.BytesIO(), [Image.new("RGB", (40, 40), (level, 0, 0)) for level in range(200)]
    frames[0].save(out, form, save_all=True, append_images=frames[1:])
    return out.getvalue()


def tile(side: int) -> bytes:
    """A TIFF of 16 × 16 black pixels in one tile of ``side`` × ``side``."""
    data = zlib.compress(bytes(side**2), 9)
    values = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(data)}
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(values)) + tags + bytes(4)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_an_image_costs_is_limited(tmp_path: Path, pipeline: str) -> None:
    needs(pipeline)
    (folder := tmp_path / "val" / "a").mkdir(parents=True)
    scans = MAX_SCANNED // 400**2
    files = {
        "a narrow": encode(np.full((3000, 1, 3), 90, np.uint8), form="PNG"),
        "b many scans": progressive(scans + 1),
        "c scans": progressive(scans),
        "d frames": with_frames("WEBP"),
        "e frames": with_frames("TIFF"),
        "f no width": b"BM" + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, 0, 1, 1, 24, 0, 0, 0, 0, 0, 0),
        "g tile": tile(10_000),
    }
    for name, data in files.items():
        (folder / f"{name}.jpg").write_bytes(data)
    with (folder / "h sparse.jpg").open("wb") as file:
        file.truncate(2**40)
    source = open_source(tmp_path, "val")
    (batch,) = batches(source, [range(len(source))], Preprocessing(size=16, resize=512), pipeline=pipeline)
    assert [Path(name).stem for name in batch.damaged] == ["b many scans", "f no width", "g tile", "h sparse"]
    levels = batch.images[:, 0].flatten(1).float().mean(1).tolist()
    assert [round(level) for level in levels] == [90, 128, 128, 0, 0, 128, 128, 128]


def test_the_scans_of_a_jpeg_are_counted_only_where_they_can_be_many() -> None:
    class NotCounted(bytes):
        def count(self, *_: Any) -> int:
            raise AssertionError("the whole file is read")

    check_cost(NotCounted(encode(draw_image(90, 90))), 90, 90)
    with pytest.raises(AssertionError, match="the whole file"):
        check_cost(NotCounted(progressive(10)), 400, 400)
    check_cost(progressive(23_860), 500, 375)
    with pytest.raises(DecodeError, match="23,861 scans of 500 × 375 pixels; expected at most 23,860"):
        check_cost(progressive(23_861), 500, 375)
    hidden = progressive(100_000).replace(b"\xff\xc2", b"\0\xff\xc2", 1)  # libjpeg skips a byte before a marker
    with pytest.raises(DecodeError, match=r"100,000 scans of 400 × 400 pixels; expected at most 27,962"):
        check_cost(hidden, 400, 400)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_images_are_grey_and_named(tmp_path: Path, pipeline: str, workers: int) -> None:
    needs(pipeline)
    good = encode(draw_image(200, 150))
    noise = np.random.default_rng(0).integers(0, 256, len(good), dtype=np.uint8).tobytes()
    files = {
        "a good": good,
        "b empty": b"",
        "c text": b"not an image",
        "d cut": good[: len(good) // 2],
        "e cut with an end": good[: len(good) // 2] + b"\xff\xd9",
        "f header": good[:200],
        "g noise": good[:700] + noise,
        "h bomb": bomb(),
        "i large": large_jpeg(),
        "j cut png": encode(draw_image(90, 90), form="PNG")[:-900],
        "k good": good,
        "l gif": encode(draw_image(90, 90), form="GIF"),
    }
    (tmp_path / "train" / "a").mkdir(parents=True)
    for name, data in files.items():
        (tmp_path / "train" / "a" / f"{name}.jpg").write_bytes(data)
    source = open_source(tmp_path, "train")
    loaded = list(batches(source, grouped(source, 5), TrainTransform(32), pipeline=pipeline, workers=workers))
    labels = torch.cat([batch.labels for batch in loaded]).tolist()
    damaged = [Path(name).stem for batch in loaded for name in batch.damaged]
    assert damaged == [name for name, label in zip(files, labels, strict=True) if label == -1]
    undecided = {"e cut with an end", "g noise"}  # libjpeg decodes what it can, and Pillow accepts it
    assert set(damaged) | undecided == set(files) - {"a good", "k good"} | undecided
    images = joined(loaded)
    for index, (name, label) in enumerate(zip(files, labels, strict=True)):
        assert (label == -1) == bool((images[index] == 128).all()) or name in undecided
    (reference,) = batches(source, [[0, 10]], TrainTransform(32), pipeline=pipeline)
    assert torch.equal(images[[0, 10]], reference.images), "a damaged image does not affect the others"


def test_an_image_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    source = open_source(make_class_folders(tmp_path), "train")
    Path(source.name(0)).unlink()
    for workers in (0, 1):
        with pytest.raises(FileNotFoundError, match=r"p0.JPEG"):
            list(batches(source, [[0]], TrainTransform(32), pipeline="torchvision", workers=workers))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_caller_may_stop_early(mixed: Source, pipeline: str) -> None:
    needs(pipeline)
    assert not multiprocessing.active_children()
    loaded = batches(mixed, grouped(mixed, 1) * 5, TrainTransform(32), pipeline=pipeline, workers=2)
    next(loaded)
    assert len(multiprocessing.active_children()) == (0 if pipeline == "dali" else 2)
    del loaded
    assert not multiprocessing.active_children()


def test_a_missing_extra_is_named(mixed: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for pipeline, needed in (("fast", "simplejpeg"), ("dali", "nvidia.dali")):
        with pytest.raises(ValueError, match=rf"needs {needed}: pip install 'deepsquare\[{pipeline}\]'; or choose"):
            batches(mixed, [[0]], TrainTransform(), pipeline=pipeline)


def test_bad_input(mixed: Source) -> None:
    with pytest.raises(ValueError, match="there is no pipeline 'gpu'; choose from torchvision, fast, dali"):
        batches(mixed, [[0]], TrainTransform(), pipeline="gpu")
    with pytest.raises(ValueError, match="workers is -1, seed 0 and epoch 0; expected none below 0"):
        batches(mixed, [[0]], TrainTransform(), pipeline="torchvision", workers=-1)
    with pytest.raises(ValueError, match="device_id is 0, but pipeline 'torchvision' decodes on the CPU"):
        batches(mixed, [[0]], TrainTransform(), pipeline="torchvision", device_id=0)
    for index in (-1, len(mixed)):
        with pytest.raises(
            IndexError, match=rf"there is no image {index}; expected an index from 0 to {len(mixed) - 1}"
        ):
            next(batches(mixed, [[index]], TrainTransform(), pipeline="torchvision"))


def test_pixels_stay_in_channels_last(mixed: Source) -> None:
    (batch,) = batches(mixed, [[0, 1]], Preprocessing(size=32, resize=40), pipeline="torchvision")
    assert batch.images.is_contiguous(memory_format=torch.channels_last)


def test_the_other_pipelines_work_without_simplejpeg() -> None:
    script = """
import sys
sys.modules["simplejpeg"] = None
from deepsquare.cli import train
from deepsquare.training import LoaderConfig
LoaderConfig("torchvision")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_worker_that_starts_is_not_ended_by_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(make_class_folders(tmp_path / "images"), "train")
    ignore_stop_signals = loader._ignore_stop_signals

    def init(worker: int) -> None:
        for number in loader.STOP_SIGNALS:
            signal.raise_signal(number)  # before the worker ignores it
        ignore_stop_signals(worker)
        (tmp_path / str(worker)).write_text(str(len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))))

    monkeypatch.setattr(loader, "_ignore_stop_signals", init)
    read = batches(source, [[0], [1]], TrainTransform(32), pipeline="torchvision", workers=2)
    assert len(list(read)) == 2
    assert [(tmp_path / worker).read_text() for worker in "01"] == ["0", "0"]  # none stays blocked
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
