"""Image files as the input of a model: preprocessing, orientation, calibration."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.exported import IMAGES, trained
from helpers.images import draw_image, make_colored_folders
from helpers.shell import Shell
from PIL import Image, ImageOps
from torchvision.transforms import v2

from deepsquare.checkpoint import save
from deepsquare.export.images import load_images, sample_files, split_calibration
from deepsquare.preprocessing import Preprocessing


def test_images_are_preprocessed_as_by_torchvision(tmp_path: Path) -> None:
    data = make_colored_folders(tmp_path / "data", train=1, val=2, side=80)
    files = sorted((data / "val").rglob("*.jpg"))
    assert sample_files(data / "val", 99) == files
    assert sample_files(data / "val", 3) == files[::2]
    preprocessing = Preprocessing(IMAGES.class_names, 64, 72, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    transform = v2.Compose([
        v2.Resize(72), v2.CenterCrop(64), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(preprocessing.mean, preprocessing.std),
    ])  # fmt: skip
    expected = torch.stack([transform(Image.open(file)) for file in files])
    torch.testing.assert_close(load_images(files, preprocessing), expected)


def test_cameras_and_scanners(tmp_path: Path) -> None:
    across = Image.linear_gradient("L").rotate(90).convert("RGB")  # dark to the left
    exif = Image.Exif()
    exif[0x0112] = 6  # turned clockwise to be upright
    across.rotate(90).save(tmp_path / "turned.png", exif=exif)
    across.save(tmp_path / "plain.png")
    Image.fromarray(np.asarray(across.convert("L")).astype(np.uint16) << 8).save(tmp_path / "deep.png")
    names = ("plain.png", "turned.png", "deep.png")
    plain, turned, deep = load_images([tmp_path / name for name in names], Preprocessing((), 64, 64), upright=True)
    assert torch.equal(turned, plain)
    assert torch.equal(deep, plain)
    (as_stored,) = load_images([tmp_path / "turned.png"], Preprocessing((), 64, 64))
    assert not torch.equal(as_stored, plain)
    with pytest.raises(FileNotFoundError, match="is a folder; give images"):
        load_images([tmp_path], IMAGES)


@pytest.mark.parametrize("orientation", range(1, 10))
def test_images_are_turned_as_by_pillow(tmp_path: Path, orientation: int) -> None:
    image = Image.fromarray(draw_image(30, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "turned.png", exif=exif)
    ImageOps.exif_transpose(Image.open(tmp_path / "turned.png")).save(tmp_path / "upright.png")
    preprocessing = Preprocessing((), 16, 20)
    (turned,) = load_images([tmp_path / "turned.png"], preprocessing, upright=True)
    assert torch.equal(turned, load_images([tmp_path / "upright.png"], preprocessing)[0])


def test_damaged_exif_data_does_not_cost_the_image(tmp_path: Path) -> None:
    image = Image.fromarray(draw_image(30, 20))
    orientation, description = (0x0112, 3, 1, 6, 0), (0x010E, 11, 1, 0, 0)  # a description that is a float
    damaged = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + b"".join(
        struct.pack("<HHIHH", *entry) for entry in (description, orientation)
    )
    image.save(tmp_path / "damaged.png", exif=damaged + bytes(4))
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    files = [tmp_path / "damaged.png", tmp_path / "upright.png"]
    turned, upright = load_images(files, Preprocessing((), 16, 20), upright=True)
    assert torch.equal(turned, upright)


def test_folders_are_predicted_as_their_images_in_batches(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_colored_folders(tmp_path / "data", train=1, val=2, side=80)
    (data / "val" / "notes.txt").write_text("no image")
    (data / "val" / "._0.jpg").write_text("what macOS leaves")
    model, _ = trained("vanilla_cnn", "pooling")
    save(model, tmp_path / "run.safetensors", IMAGES)
    files = sorted((data / "val").glob("*/*.jpg"))
    single = data / "train" / "red" / "0.jpg"
    images = load_images([single, *files], IMAGES, upright=True)
    with torch.inference_mode():
        expected = model.eval()(images).softmax(1)
    monkeypatch.setattr("deepsquare.cli.predict.BATCH_SIZE", 3)
    code, out, err = shell.run(f"predict {tmp_path}/run.safetensors {single} {data}/val --json")
    assert (code, err) == (0, "")
    results = json.loads(out)
    assert [result["image"] for result in results] == [str(single), *map(str, files)]
    for result, probabilities in zip(results, expected.tolist(), strict=True):
        predicted = {each["class"]: each["probability"] for each in result["predictions"]}
        assert predicted == pytest.approx(dict(zip(IMAGES.class_names, probabilities, strict=True)), abs=1e-5)
    (empty := tmp_path / "empty").mkdir()
    code, out, err = shell.run(f"predict {tmp_path}/run.safetensors {empty} --json")
    assert (code, out, err) == (2, "", f"deepsquare: error: {empty} has no images in it, at any depth\n")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"class_names": (1, 2)}, r"class_names is \(1, 2\); expected a tuple of names"),
        ({"size": 288}, "size is 288 and resize 256; expected 1 ≤ size ≤ resize"),
        ({"mean": (0.5, 0.5)}, r"mean is \(0.5, 0.5\); expected three numbers"),
        ({"std": (0.0, 1.0, 1.0)}, "expected numbers above 0"),
    ],
)
def test_invalid_preprocessing(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing(**wrong)


def test_calibration_and_parity_use_different_images() -> None:
    images = torch.arange(20.0)
    calibration, compared = split_calibration(images)
    assert compared.tolist() == [0, 9, 18]
    assert sorted([*calibration.tolist(), *compared.tolist()]) == images.tolist()
    assert [part.tolist() for part in split_calibration(images[:1])] == [[0], [0]]
