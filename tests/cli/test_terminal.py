"""What names contain does not reach the terminal as commands; ordinary Unicode does."""

import json
import logging
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.shell import Shell
from PIL import Image
from torch import nn

from deepsquare import cli
from deepsquare._terminal import printable, printable_lines
from deepsquare.checkpoint import save
from deepsquare.models import create_model
from deepsquare.preprocessing import Preprocessing

HOSTILE = "\x1b]0;title\x07\x1b[2J[bold]a\u202ebc\x9b31m\nd"
SHOWN = r"\x1b]0;title\x07\x1b[2J[bold]a\u202ebc\x9b31m\nd"


def test_unsafe_characters_are_escaped_and_others_stay() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("\t\r\x7f\x85\u2028\u2066\u200f\udcff") == r"\t\r\x7f\x85\u2028\u2066\u200f\udcff"
    assert printable_lines("a\nb\x1b") == "a\nb\\x1b"
    ordinary = "naïve é e\u0301 漢字 עברית العربية हिन्दी 👩\u200d👩\u200d👧 🇨🇭 \u00a0 n01440764 C:\\new"
    assert printable(ordinary) == ordinary


def test_every_unsafe_character_of_unicode_is_known() -> None:
    import unicodedata

    bidirectional = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in range(0x110000):
        letter = chr(code)
        unsafe = unicodedata.category(letter) in {"Cc", "Cs", "Zl", "Zp"}
        unsafe |= unicodedata.bidirectional(letter) in bidirectional or letter in "\u061c\u200e\u200f"
        assert (printable(letter) != letter) == unsafe, hex(code)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "a.safetensors", HOSTILE, "--to", "onnx"], "Unrecognized options: "),
        (["info", "resnet18", "pooling", "--" + HOSTILE], "Unrecognized options: --"),
        (["train", "--batch-size", HOSTILE], "Error parsing --batch-size: "),
        (["export", "a.safetensors", "--to", HOSTILE], "invalid choice "),
        (["predict"], "Missing from deepsquare predict: PATH"),
    ],
)
def test_refused_arguments_are_one_line(shell: Shell, arguments: list[str], said: str) -> None:
    code, error = shell(*arguments)
    assert code == 2
    assert error.startswith(f"deepsquare: error: {said}")
    assert error.endswith(" --help\n")
    assert error.count("\n") == 1
    assert error.removesuffix("\n").isprintable()


def test_predict_shows_names_escaped(shell: Shell, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classes = (HOSTILE, "漢字 [red]é[/red] 👩‍👧")
    model, file = create_model("vanilla_cnn", num_classes=2), tmp_path / "model.safetensors"
    save(model, file, Preprocessing(classes, 32, 32))
    image = tmp_path / os.fsdecode(b"\x1b[31m\xff.png")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(image)
    code, out = shell("predict", file, image)
    assert code == 0
    path, *lines = out.splitlines()
    assert path == rf"{tmp_path}/\x1b[31m\udcff.png"
    assert sorted(line.split("%  ")[1] for line in lines) == sorted([SHOWN, classes[1]])
    code, out = shell("predict", file, image, "--json")
    assert out.isascii()
    assert out.removesuffix("\n").isprintable()
    (result,) = json.loads(out)
    assert result["image"] == str(image)
    assert {each["class"] for each in result["predictions"]} == set(classes)
    image.write_bytes(b"no image")
    code, out = shell("predict", file, image)
    assert (code, len(out.splitlines())) == (2, 1)
    assert rf"error: {tmp_path}/\x1b[31m\udcff.png cannot be read as an image" in out


def test_errors_notes_and_logs_are_escaped(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        warnings.warn(f"a warning of {HOSTILE}", stacklevel=1)
        logging.getLogger("deepsquare").warning("%s cannot be decoded", HOSTILE)
        raise ValueError(f"an error of {HOSTILE}")

    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    shown = SHOWN.replace(r"\n", "\n")  # a message may have several lines
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = shell.run("info resnet18")
    assert (code, out) == (2, "")
    expected = ("deepsquare: note: a warning of {}", "{} cannot be decoded", "deepsquare: error: an error of {}")
    assert err == "".join(f"{line.format(shown)}\n" for line in expected)


def test_info_takes_brackets_for_brackets(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential()
    for name, module in (
        ("[red]conv", nn.Conv2d(3, 4, 3)),
        ("[bold]pool", nn.AdaptiveAvgPool2d(1)),
        ("flat", nn.Flatten()),
        ("[/link]fc", nn.Linear(4, 2)),
    ):
        model.add_module(name, module)
    monkeypatch.setattr("deepsquare.cli.info.create_model", lambda name: model)
    code, out, err = shell.run("info mine pooling --input-shape 3 8 8")
    assert (code, err) == (0, "")
    assert "input of [bold]pool " in out
    assert "output of [/link]fc " in out
