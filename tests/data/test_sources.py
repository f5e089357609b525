"""Sources of images and their crops: what is read, in which order, and which errors are raised."""

import io
import math
import os
import pickle
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.images import draw_image, encode, make_class_folders
from PIL import Image
from scipy import stats

from deepsquare.data import Source, TrainTransform, check_same_classes, open_source, pil, write_shards
from deepsquare.data.limits import jpeg_size
from deepsquare.data.loader import BatchDataset
from deepsquare.data.transforms import MAX_PIXELS, CropParams, center_crop, random_crop
from deepsquare.preprocessing import Preprocessing


def test_a_folder_is_read_as_by_imagefolder(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    make_class_folders(tmp_path, classes=3)
    (tmp_path / "train" / "B").mkdir()  # capital letters come first
    (tmp_path / "train" / "B" / "x.PNG").write_bytes(encode(draw_image(8, 8), form="PNG"))
    source, known = open_source(tmp_path, "train"), ImageFolder(str(tmp_path / "train"))
    assert source.classes == tuple(known.classes)
    assert [(source.name(index), int(source.labels[index])) for index in range(len(source))] == known.samples
    assert source.labels.dtype == torch.int64
    assert source.read(0) == Path(source.name(0)).read_bytes()


def test_hidden_files_and_folders_are_skipped(tmp_path: Path) -> None:
    touch(tmp_path, "val/a/1.jpg", "val/a/._1.jpg", "val/a/.DS_Store", "val/.cache/x.tar")
    source = open_source(tmp_path, "val")
    assert (source.classes, len(source)) == (("a",), 1)


def test_names_keep_every_file_name(tmp_path: Path) -> None:
    files = sorted(["a.jpg", "ü.jpg", os.fsdecode(b"\xff.jpg"), "b" * 250 + ".jpg"])
    touch(tmp_path, *(f"val/a/{file}" for file in files))
    source = open_source(tmp_path, "val")
    assert [source.name(index) for index in range(len(source))] == [f"{tmp_path}/val/a/{file}" for file in files]


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    source = open_source(make_class_folders(tmp_path / "a"), "train")
    write_shards(source, tmp_path / "b" / "train", 4)
    for one in (source, open_source(tmp_path / "b", "train")):
        other = pickle.loads(pickle.dumps(one))
        assert other.classes == one.classes
        assert [other.read(i) for i in range(len(one))] == [one.read(i) for i in range(len(one))]


def touch(root: Path, *files: str) -> Path:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith("/"):
            path.mkdir()
        else:
            path.touch()
    return root


@pytest.mark.parametrize(
    ("files", "given", "error"),
    [
        ((), "no", r"no does not exist; give the folder that holds train and val"),
        (("a.tar",), "a.tar", r"a.tar is a file; give the folder"),
        (("train/a/1.jpg", "test/a/1.jpg"), "", r"has no folder val: found test, train; expected train and val$"),
        (
            ("val/a/1.jpg", "val/b/1.jpg"),
            "val",
            r"val has no folder val: found a, b; .* Give \S+, which holds the splits",
        ),
        (("in/train/a/1.jpg", "in/val/a/1.jpg"), "", r"found in; expected train and val. Did you mean \S+in\?"),
        (
            ("val/1.jpg", "val/2.png"),
            "",
            r"val has no class folders and no shards: found 2 images directly in it \(1.jpg",
        ),
        (("val/",), "", r"no shards: found nothing. Expected a folder for each class"),
        (("val/a/b/1.jpg",), "", r"val/a is a class folder but contains the folder b; expected images"),
        (
            ("val/a/1.jpg", "val/b/"),
            "",
            r"1 of 2 class folders have no image: b \(empty\). Expected files with the suffix .jpg",
        ),
        (("val/a/1.gif", "val/b/"), "", r"2 of 2 class folders have no image: a \(only .gif\), b \(empty\)"),
        (("val/a/1.jpg", "val/x.tar"), "", r"has both folders \(a\) and shards \(x.tar\); expected only one kind"),
        (("val/x.tar",), "", r"val has shards but no classes.txt; write it"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, files: tuple[str, ...], given: str, error: str) -> None:
    touch(tmp_path, *files)
    with pytest.raises((OSError, ValueError), match=error):
        open_source(tmp_path / given, "val")


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "val/a/1.jpg")
    (tmp_path / "val/a/2.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(FileNotFoundError, match=r"2.jpg is a broken link"):
        open_source(tmp_path, "val")


def test_other_files_are_left_out_and_counted(tmp_path: Path) -> None:
    touch(tmp_path, "val/a/1.jpg", "val/a/notes.txt", "val/a/README", "val/b/2.webp")
    with pytest.warns(UserWarning, match=r"not images are skipped \(1 .txt, 1 no suffix\)"):
        assert len(open_source(tmp_path, "val")) == 2


def test_both_splits_need_the_same_classes(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/b/1.jpg", "val/c/1.jpg")
    train, val = open_source(tmp_path, "train"), open_source(tmp_path, "val")
    check_same_classes(train, train)
    with pytest.raises(
        ValueError, match=r"train has 2 classes and val 2, .*: only in train: a; only in val: c. Give both"
    ):
        check_same_classes(train, val)
    val.classes = ("b", "a")
    with pytest.raises(ValueError, match="their order differs"):
        check_same_classes(train, val)


def shard(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (path.parent / "classes.txt").write_text("cat\ndog\n")
    return path


def test_shards_hold_what_the_folder_holds(tmp_path: Path) -> None:
    source = open_source(make_class_folders(tmp_path / "a", each=5), "train")
    write_shards(source, tmp_path / "b" / "train", 4)
    again = open_source(tmp_path / "b", "train")
    assert sorted(path.name for path in (tmp_path / "b" / "train").iterdir()) == [
        "000000.tar", "000001.tar", "000002.tar", "classes.txt",
    ]  # fmt: skip
    assert again.classes == source.classes
    assert torch.equal(again.labels, source.labels)
    assert [again.read(i) for i in range(len(again))] == [source.read(i) for i in range(len(source))]
    assert again.name(5) == f"{tmp_path}/b/train/000001.tar:00000005.jpeg"


def test_stopped_writing_leaves_no_data_set(tmp_path: Path) -> None:
    source = open_source(make_class_folders(tmp_path / "a"), "train")
    Path(source.name(5)).unlink()
    with pytest.raises(FileNotFoundError):
        write_shards(source, tmp_path / "b" / "train", 2)
    assert sorted(path.name for path in (tmp_path / "b" / "train").iterdir()) == ["000000.tar", "000001.tar"]
    with pytest.raises(FileNotFoundError, match=r"has shards but no classes\.txt"):
        open_source(tmp_path / "b", "train")
    with pytest.raises(FileExistsError, match="is not empty; give a new folder"):
        write_shards(source, tmp_path / "b" / "train", 2)
    with pytest.raises(ValueError, match="per_shard is 0; expected at least 1"):
        write_shards(source, tmp_path / "c", 0)


def test_what_is_no_sample_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "val" / "x.tar"
    shard(path, {"a/k.v.JPG": b"", "a/k.JPG": b"one", "a/k.cls": b"1\n", "a/k.json": b"{}", "readme": b"", ".x": b""})
    with tarfile.open(path, "a") as archive:
        for kind, name in (
            (tarfile.SYMTYPE, "link.jpg"),
            (tarfile.DIRTYPE, "folder.jpg"),
            (tarfile.CHRTYPE, "../d.jpg"),
        ):
            odd = tarfile.TarInfo(name)
            odd.type, odd.linkname = kind, "/etc/passwd"
            archive.addfile(odd)
    source = open_source(tmp_path, "val")
    assert (len(source), source.read(0), source.labels.tolist()) == (1, b"one", [1])
    assert source.name(0).endswith("x.tar:a/k.JPG")


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"a.jpg": b"", "b.jpg": b"", "b.cls": b"0"}, r"no label \(key.cls\) for a; create the shard again"),
        ({"a.cls": b"0"}, r"no image \(key.jpg\) for a"),
        ({"a.jpg": b"", "a.png": b"", "a.cls": b"0"}, r"a second member a.png for one sample"),
        ({"a.jpg": b"", "a.cls": b"2"}, r"the label a.cls is b'2'; expected a whole number below 2"),
        ({"a.jpg": b"", "a.cls": b"-1"}, r"is b'-1'; expected"),
        ({"a.jpg": b"", "a.cls": b"1" * 99}, r"a.cls is b'1{20}'; expected"),
        ({"a.txt": b""}, r"the shards x.tar hold no image"),
    ],
)
def test_a_shard_that_does_not_fit_is_refused(tmp_path: Path, files: dict[str, bytes], error: str) -> None:
    shard(tmp_path / "val" / "x.tar", files)
    with pytest.raises((OSError, ValueError), match=error):
        open_source(tmp_path, "val")


@pytest.mark.parametrize("size", [0, 100, 512, 700, 512 * 3, 512 * 3 + 9, 512 * 5])  # of 7 blocks and the end
def test_a_truncated_shard_is_refused(tmp_path: Path, size: int) -> None:
    path = shard(tmp_path / "val" / "x.tar", {"a.jpg": bytes(600), "a.cls": b"0", "b.jpg": b"1", "b.cls": b"0"})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"x.tar (cannot be read as a tar file|is truncated or damaged at byte)"):
        open_source(tmp_path, "val")


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = shard(tmp_path / "val" / "x.tar", {"a.jpg": b"1", "a.cls": b"0", "b.jpg": b"1", "b.cls": b"0"})
    data = bytearray(path.read_bytes())
    data[512 * 4 + 150] ^= 0xFF  # in the checksum of b.jpg
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is truncated or damaged at byte 2,048"):
        open_source(tmp_path, "val")


def test_a_shard_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = shard(tmp_path / "val" / "x.tar", {"a.jpg": bytes(600), "a.cls": b"0"})
    source = open_source(tmp_path, "val")
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(OSError, match=r"x.tar:a.jpg is truncated: the shard has changed"):
        source.read(0)


def test_the_encoding_of_classes(tmp_path: Path) -> None:
    path = shard(tmp_path / "val" / "x.tar", {"a.jpg": b"", "a.cls": b"1"}).with_name("classes.txt")
    path.write_text("café\n漢字\n", encoding="utf-8-sig")
    assert open_source(tmp_path, "val").classes == ("café", "漢字")
    path.write_text("café\n", encoding="latin-1")
    with pytest.raises(
        ValueError, match=r"classes.txt is not in UTF-8 \(.* byte 0xe9 in position 3.*; save it in UTF-8"
    ):
        open_source(tmp_path, "val")
    path.write_text("a" * 2**24 + "\n")
    with pytest.raises(ValueError, match=r"classes.txt has more than 16,777,216 bytes; expected one class name"):
        open_source(tmp_path, "val")
    touch(tmp_path, os.fsdecode(b"train/caf\xe9/1.jpg"))
    with pytest.raises(ValueError, match="the names of class folders are not in UTF-8: caf\udce9; rename them"):
        open_source(tmp_path, "train")


def test_the_classes_are_looked_through_once(tmp_path: Path) -> None:
    path = shard(tmp_path / "val" / "x.tar", {"a.jpg": b"", "a.cls": b"1"}).with_name("classes.txt")
    names = [f"class{number}" for number in range(100_000)]  # a comparison of all pairs takes minutes
    path.write_text("\n".join(names))
    assert open_source(tmp_path, "val").classes == tuple(names)
    path.write_text("\n".join([*names, "class7"]))
    with pytest.raises(ValueError, match=r"each once; found class7$"):
        open_source(tmp_path, "val")


@pytest.mark.parametrize("name", ["a\u2028b", "\ufeffa", " "])
def test_classes_that_cannot_be_written_line_by_line(tmp_path: Path, name: str) -> None:
    touch(tmp_path / "a", f"train/{name}/1.jpg")
    with pytest.raises(ValueError, match=r"has one class per line, but .* is not one line; rename it"):
        write_shards(open_source(tmp_path / "a", "train"), tmp_path / "b" / "train")


@pytest.mark.parametrize("text", ["", "a\na\n", "a\n\nb\n"])
def test_classes_are_named_once(tmp_path: Path, text: str) -> None:
    shard(tmp_path / "val" / "x.tar", {"a.jpg": b"", "a.cls": b"0"})
    (tmp_path / "val" / "classes.txt").write_text(text)
    with pytest.raises(ValueError, match=r"classes.txt: expected one class name per line, each once"):
        open_source(tmp_path, "val")


def test_a_random_crop_depends_on_seed_epoch_and_index_only() -> None:
    transform = TrainTransform()
    crops = {key: random_crop(transform, 500, 375, *key) for key in np.ndindex(3, 3, 50)}
    assert crops == {key: random_crop(transform, 500, 375, *key) for key in reversed(list(np.ndindex(3, 3, 50)))}
    assert len(set(crops.values())) > 440  # of 450
    assert random_crop(transform, 500, 375, 1, 2, 3) == CropParams(
        34, 166, 133, 169, (224, 224), (0, 0), True
    )  # a later version must yield the same


def test_random_crops_are_distributed_as_torchvisions() -> None:
    from torchvision.transforms import v2

    torch.manual_seed(0)
    width, height, count = 500, 375, 2000
    image = torch.empty(3, height, width)
    crop = v2.RandomResizedCrop(224)
    theirs = [crop.make_params([image]) for _ in range(count)]
    ours = [random_crop(TrainTransform(), width, height, 0, 0, index) for index in range(count)]
    for name in ("left", "top", "width", "height"):
        test = stats.ks_2samp([box[name] for box in theirs], [getattr(box, name) for box in ours])
        assert test.pvalue > 0.01, name
    areas = np.array([box.width * box.height for box in ours]) / (width * height)
    ratios = np.array([box.width / box.height for box in ours])
    assert 0.079 < areas.min() < 0.09
    assert 0.95 < areas.max() <= 1
    assert 0.74 < ratios.min() < 0.76
    assert 1.32 < ratios.max() < 1.35
    assert abs(np.mean([box.flip for box in ours]) - 0.5) < 0.04
    assert not any(random_crop(TrainTransform(flip=False), width, height, 0, 0, index).flip for index in range(50))


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [(1000, 10, (493, 0, 13, 10)), (10, 1000, (0, 493, 10, 13)), (1, 1, (0, 0, 1, 1))],
)
def test_a_crop_that_never_fits_is_the_center(width: int, height: int, box: tuple[int, ...]) -> None:
    from torchvision.transforms import v2

    transform = TrainTransform(scale=(0.9, 1.0))
    assert random_crop(transform, width, height, 0, 0, 0)[:4] == box
    params = v2.RandomResizedCrop(224, scale=(0.9, 1.0)).make_params([torch.empty(3, height, width)])
    assert (params["left"], params["top"], params["width"], params["height"]) == box


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (333, 500), (256, 256), (50, 60), (999, 257)])
def test_the_center_crop_is_torchvisions(width: int, height: int) -> None:
    from torchvision.transforms.v2 import functional as F

    image = torch.arange(3 * width * height, dtype=torch.float32).view(3, height, width)
    crop = center_crop(Preprocessing(), width, height)
    assert crop[:4] == (0, 0, width, height)
    assert not crop.flip
    whole, (left, top) = F.resize(image, [256]), crop.corner
    assert crop.resized == (whole.shape[2], whole.shape[1])
    assert torch.equal(F.center_crop(whole, [224]), whole[:, top : top + 224, left : left + 224])


def whole_image_crop(resize: int, size: int, width: int, height: int) -> CropParams:
    """The center crop of the whole resized image, whatever it costs: images of ordinary shapes keep it bit by bit."""
    longer = int(resize * max(width, height) / min(width, height))
    resized = (resize, longer) if width <= height else (longer, resize)
    left, top = (round((side - size) / 2) for side in resized)
    return CropParams(0, 0, width, height, resized, (left, top))


def test_ordinary_images_are_resized_whole() -> None:
    rng = np.random.default_rng(0)
    for size, resize in ((224, 256), (32, 32), (288, 330), (1, 1), (64, 73)):
        shapes = [(1, 1365), (1365, 1), (40, 30), (1, 1), *(2 ** rng.uniform(0, 13, (2000, 2))).astype(int).tolist()]
        for width, height in shapes:
            if resize**2 * max(width, height) <= MAX_PIXELS * min(width, height):
                crop = center_crop(Preprocessing(size=size, resize=resize), width, height)
                assert crop == whole_image_crop(resize, size, width, height)


@pytest.mark.parametrize("shape", [(1, 65_000), (65_000, 1), (2, 20_000_001), (7, 12_000), (1, 3), (1, 4)])
@pytest.mark.parametrize("resize", [256, 1000, 8192])
def test_a_long_image_is_shortened_at_both_ends(shape: tuple[int, int], resize: int) -> None:
    crop = center_crop(Preprocessing(size=224, resize=resize), *shape)
    assert math.prod(crop.resized) <= max(MAX_PIXELS, 2 * resize**2)
    assert min(crop.resized) == resize
    for start, kept, side, resized, corner in zip(crop[:2], crop[2:4], shape, crop.resized, crop.corner, strict=True):
        assert 2 * start + kept == side, "its center is that of the image"
        assert 0 <= corner <= resized - 224
        assert resized * min(shape) == pytest.approx(resize * kept, abs=min(shape)), "it keeps its aspect ratio"


def test_a_long_image_shows_its_center() -> None:
    from torchvision.transforms.v2 import functional as F

    pixels = draw_image(3, 6000)
    preprocessing = Preprocessing(size=192, resize=256)
    image = F.resize(Image.fromarray(pixels), [256])  # 256 × 512,000 pixels
    expected = np.asarray(F.center_crop(image, [192])).astype(int)
    out = np.empty((192, 192, 3), np.uint8)
    assert center_crop(preprocessing, 3, 6000).height < 6000
    pil.decode(encode(pixels, form="PNG"), partial(center_crop, preprocessing), out)
    assert np.abs(out - expected).max() <= 1


def test_the_crop_of_either_transform(tmp_path: Path) -> None:
    source = open_source(touch(tmp_path, "val/a/1.jpg"), "val")
    center = BatchDataset(source, [], Preprocessing(), seed=0, epoch=0).crop_for(0)(512, 256)
    assert center == CropParams(0, 0, 512, 256, (512, 256), (144, 16))
    train = BatchDataset(source, [], TrainTransform(96), seed=1, epoch=2).crop_for(3)(512, 256)
    assert train == random_crop(TrainTransform(96), 512, 256, 1, 2, 3)
    assert (train.resized, train.corner) == ((96, 96), (0, 0))


def test_transforms_are_checked() -> None:
    with pytest.raises(ValueError, match="size is 0; expected at least 1 pixel"):
        TrainTransform(0)
    for scale in ((0.0, 1.0), (0.5, 0.2), (0.5, 1.5), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="expected two shares of the area"):
            TrainTransform(scale=scale)
    with pytest.raises(ValueError, match="expected two ratios of width to height"):
        TrainTransform(ratio=(2.0, 1.0))
    with pytest.raises(ValueError, match="size is 224 and resize 200; expected 1 ≤ size ≤ resize"):
        Preprocessing(size=224, resize=200)


def test_the_size_of_a_common_jpeg() -> None:
    pixels = draw_image(70, 40)
    for data in (encode(pixels), encode(pixels, "L")):
        assert jpeg_size(data) == (70, 40)
        assert jpeg_size(data[:2] + b"\xff\xff" + data[2:]) == (70, 40)  # with padding
    for data in (encode(pixels, "CMYK"), encode(pixels, form="PNG"), encode(pixels)[:-2], b"", b"\xff\xd8\xff\xd9"):
        assert jpeg_size(data) is None


def test_sources_have_one_interface(tmp_path: Path) -> None:
    assert isinstance(open_source(make_class_folders(tmp_path), "train"), Source)
