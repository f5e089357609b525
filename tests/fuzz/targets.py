"""The targets of the search: each reads one kind of file, or calls the functions, on given bytes.

What breaks is a finding: any error but ValueError and OSError, an error that another library raised and that ours let
through, a message of many lines, and of course an abort, a hang, or much memory.
"""

import io
import os
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.images import draw_image, encode
from PIL import Image
from torch import Tensor, nn

import deepsquare as ds
from deepsquare.checkpoint import load_pretrained
from deepsquare.data.folders import open_source
from deepsquare.data.loader import batches
from deepsquare.export import export, load_exported
from deepsquare.export.images import load_images
from deepsquare.paper.rows import check_row
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import Row, Store
from deepsquare.surgery import TECHNIQUES
from deepsquare.training import Recipe, fit
from fuzz.functions import check_functions

LONGEST = 1500  # characters of a message
SMALL = Preprocessing(("a", "b"), 16, 18)
PACKAGE = os.path.dirname(ds.__file__) + os.sep


class FindingError(AssertionError):
    """An error that a user should not meet."""


@dataclass(frozen=True)
class Target:
    """``read`` gets the bytes of a case and an empty folder; ``seeds`` are valid cases."""

    read: Callable[[bytes, Path], object]
    seeds: Callable[[], Iterable[bytes]]
    container: str = ""  # one of CONTAINERS, whose parts are mutated as well as the whole
    words: tuple[str, ...] = ()  # that a mutation may insert


def check(name: str, data: bytes) -> str:
    """Run a case: "read", or the message with which it was refused; raises FindingError or what is unexpected."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", SyntaxWarning)  # of ast.parse: printed as if our code had a mistake
        try:
            TARGETS[name].read(data, Path(folder))
        except (ValueError, OSError) as error:
            message = str(error)
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            if isinstance(error, UnicodeError) or not (isinstance(error, OSError) or raised_in.startswith(PACKAGE)):
                raise FindingError(f"{type(error).__name__} of {raised_in}: {message}") from error
            if not message or "\n" in message.strip() or len(message) > LONGEST:
                raise FindingError(f"not one clear line: {message[:LONGEST]!r}") from error
            return message
    return "read"


class Net(nn.Module):
    """One residual block: a site of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv1, self.conv2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn, self.pool, self.fc = nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.bn(self.conv2(torch.relu(self.conv1(x)))))
        return self.fc(self.pool(x).flatten(1))  # type: ignore[no-any-return]


def network(spec: str = "pooling+softmin") -> nn.Module:
    torch.manual_seed(0)
    return ds.equip(Net().eval(), spec, input_shape=(3, 16, 16))


def written(name: str, write: Callable[[Path], object]) -> bytes:
    """What ``write`` writes into a file called ``name``."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def read_checkpoint(data: bytes, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(data)
    refused: list[ValueError] = []
    readers = (partial(ds.load_weights, network()), partial(load_pretrained, network("pooling")), ds.load)
    for read in readers:  # each case goes through all of them
        try:
            result = read(file)
        except ValueError as error:
            refused.append(error)
        else:
            if isinstance(result, nn.Module):
                result.eval()(torch.zeros(1, 3, 32, 32))
    if len(refused) == len(readers):
        raise refused[-1]


def checkpoints() -> Iterable[bytes]:
    yield written("model.safetensors", lambda path: ds.save(network(), path, SMALL))
    yield written(
        "model.safetensors", lambda path: ds.save(ds.fold(ds.create_model("vanilla_cnn", "pooling").eval()), path)
    )
    named = ds.create_model("vanilla_cnn", "pooling+softmin(scale='channel')", num_classes=3)
    yield written("model.safetensors", lambda path: ds.save(named, path, SMALL))


def read_state_dict(data: bytes, folder: Path) -> None:
    (folder / "model.pt").write_bytes(data)
    load_pretrained(network("pooling"), folder / "model.pt")


def state_dicts() -> Iterable[bytes]:
    states: list[Any] = [Net().state_dict(), {"state_dict": Net().state_dict(), "epoch": 3, "args": {"lr": 0.1}}]
    for state in states:
        yield written("model.pt", partial(torch.save, state))
        yield written("m.pt", partial(torch.save, state, _use_new_zipfile_serialization=False))


RECIPE = Recipe(epochs=1, batch_size=4, lr=0.1)


class FewBatches:
    def __len__(self) -> int:
        return 2

    def epoch(self, number: int, start: int = 0) -> Any:
        generator = torch.Generator().manual_seed(number)
        for _ in range(start, 2):
            yield torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([0, 1, 0, 1])


def train_from(path: Path) -> None:
    evaluation = [(torch.zeros(2, 3, 16, 16), torch.tensor([0, 1]))]
    fit(network(), FewBatches(), RECIPE, lambda: evaluation, checkpoint=path, judge_end=False)


def read_training_checkpoint(data: bytes, folder: Path) -> None:
    (folder / "last.pt").write_bytes(data)
    train_from(folder / "last.pt")


def read_exported(suffix: str, data: bytes, folder: Path) -> None:
    file = folder / f"model{suffix}"
    file.write_bytes(data)
    model = load_exported(file)
    model(torch.zeros(1, *(side if isinstance(side, int) else 16 for side in model.shape[1:])))


def exported(suffix: str) -> Iterable[bytes]:
    for spec in ("", "pooling+softmin"):
        model = network(spec)
        yield written(f"model{suffix}", partial(export, model, preprocessing=SMALL))


def read_image(data: bytes, folder: Path) -> None:
    """By prediction, and by both loaders of training."""
    place = folder / "val" / "a"
    place.mkdir(parents=True)
    (place / "image.png").write_bytes(data)
    for pipeline in ("torchvision", "fast"):
        (batch,) = batches(open_source(folder, "val"), [[0]], SMALL, pipeline=pipeline)
        assert batch.images.shape == (1, 3, 16, 16)
    load_images([place / "image.png"], SMALL, upright=True)


def images() -> Iterable[bytes]:
    pixels = draw_image(40, 30)
    for form, mode in (("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGB"), ("PNG", "P"), ("PNG", "I;16")):
        yield encode(pixels, mode, form) if mode != "I;16" else encode_16_bits(pixels)
    for form, options in (("WEBP", {"lossless": True}), ("JPEG", {"progressive": True}), ("JPEG", {"exif": ROTATED})):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, form, **options)
        yield out.getvalue()


ROTATED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"


def encode_16_bits(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 256).save(out, "PNG")
    return out.getvalue()


def read_shard(data: bytes, folder: Path) -> None:
    split = folder / "val"
    split.mkdir()
    (split / "000.tar").write_bytes(data)
    (split / "classes.txt").write_bytes(b"a\nb\n")
    source = open_source(folder, "val")
    for index in range(min(len(source), 3)):
        source.read(index)
        source.name(index)


def shards() -> Iterable[bytes]:
    import tarfile

    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as archive:
            for number in range(3):
                for suffix, content in ((".jpg", b"image" * number), (".cls", b"%d" % (number % 2))):
                    member = tarfile.TarInfo(f"{'long' * 40 * (number == 2)}{number}é{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        yield out.getvalue()


def read_classes(data: bytes, folder: Path) -> None:
    split = folder / "val"
    split.mkdir()
    (split / "000.tar").write_bytes(next(iter(shards())))
    (split / "classes.txt").write_bytes(data)
    assert all(name.strip() and len(name.splitlines()) == 1 for name in open_source(folder, "val").classes)


def read_rows(data: bytes, folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(data)
    for row in Store(folder / "rows.jsonl").rows():
        check_row(row)


def rows() -> Iterable[bytes]:
    recipe = {"model": "vanilla_cnn", "spec": "pooling", "schedule": "short", "epochs": 10}
    metrics = {"accuracy": 0.5, "diverged": None, "test_accuracy": [0.4, 0.5]}
    yield Row("cifar10", "DeepSquare1", 0, recipe, metrics, 12.5).to_json() * 2


def read_spec(data: bytes, folder: Path) -> None:
    model = network(data.decode(errors="replace"))
    model(torch.zeros(1, 3, 16, 16))


def specs() -> Iterable[bytes]:
    for name, technique in TECHNIQUES.items():
        given = technique.options | ({"after": "conv1"} if technique.kind is None else {})
        given |= {name: value for name, value in {"dense": False, "size": 4}.items() if name in given}
        options = ", ".join(f"{key}={value!r}" for key, value in given.items() if value != "")
        yield f"{name}({options})".encode() if options else name.encode()
    yield b"pooling+softmin(scale='channel')+excitation(alpha=0.5)"


def numbers() -> Iterable[bytes]:
    return (random.Random(seed).randbytes(8) for seed in range(8))


@cache
def _words() -> tuple[str, ...]:
    options = {f"{name}=" for technique in TECHNIQUES.values() for name in technique.options}
    return (*TECHNIQUES, *sorted(options), "after='conv'", "1e308", "inf", "True", "-1", "+")


TARGETS: dict[str, Target] = {
    "checkpoint": Target(
        read_checkpoint,
        checkpoints,
        "safetensors",
        ('"shape":[', '"dtype":"I64"', '"spec"', "1e999", "\\u0000", "null"),
    ),
    "state_dict": Target(read_state_dict, state_dicts, "zip"),
    "training": Target(read_training_checkpoint, lambda: [written("last.pt", train_from)], "checked zip"),
    "onnx": Target(partial(read_exported, ".onnx"), lambda: exported(".onnx")),
    "executorch": Target(partial(read_exported, ".pte"), lambda: exported(".pte")),
    "image": Target(read_image, images, "png"),
    "shard": Target(read_shard, shards, "tar", ("path=", "size=", "30 ", "\x80")),
    "classes": Target(read_classes, lambda: [b"a\nb\n", "é\n漢字\n".encode(), b"\xef\xbb\xbfa\nb"]),
    "rows": Target(read_rows, rows, words=('"seed"', "null", "1e400", "NaN", "[[[[", '"correct": "AAAA"')),
    "spec": Target(read_spec, specs, words=_words()),
    "functions": Target(lambda data, folder: check_functions(data), numbers),
}
