"""Pretrained weights: files of every form start a model, also one with other classes."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.archives import BOMBS, archive_of
from safetensors.torch import save_file
from torch import nn

import deepsquare as ds
from deepsquare._archive import check_archive
from deepsquare.checkpoint import load_pretrained


@pytest.fixture(scope="module")
def base() -> nn.Module:
    """A trained base model with five classes."""
    torch.manual_seed(0)
    model = ds.create_model("resnet18", num_classes=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model


def equipped(spec: str, classes: int) -> nn.Module:
    torch.manual_seed(7)
    return ds.create_model("resnet18", spec, init="identity", num_classes=classes)


@pytest.mark.parametrize("form", ["safetensors", "deepsquare", "pth", "in a checkpoint", "of DDP", "old"])
def test_pretrained_weights_of_every_form_start_a_model_of_other_classes(
    form: str, base: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, state = tmp_path / "base", base.state_dict()
    if form == "safetensors":
        save_file(state, path)
    elif form == "deepsquare":
        ds.save(base, path)
    else:
        old = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
        stored = {"pth": state, "in a checkpoint": {"model": state, "epoch": 3}, "old": old}
        torch.save(stored.get(form, {f"module.{key}": value for key, value in state.items()}), path)
    for classes in (3, 5):
        caplog.clear()
        model, before = equipped("pooling+softmin(scale='channel')", classes), equipped("softmin", classes)
        load_pretrained(model, path)
        for key, value in model.state_dict().items():
            if "deepsquare" not in key and (form != "old" or not key.endswith("num_batches_tracked")):
                expected = before.state_dict()[key] if key.startswith("fc") and classes == 3 else state[key]
                assert torch.equal(value, expected), key
        logged = "another classifier; initialized anew: fc.bias, fc.weight"
        assert (logged in caplog.text) == (classes == 3)


def test_of_pretrained_weights_only_the_classifier_may_differ(
    base: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, state = tmp_path / "base.pth", base.state_dict()
    torch.save({key: value for key, value in state.items() if not key.startswith("fc")}, path)
    load_pretrained(equipped("pooling", 3), path)  # without its head, as timm's num_classes=0
    torch.save({**state, "conv1.weight": torch.zeros(64, 1, 7, 7)}, path)
    with pytest.raises(ValueError, match=r"does not fit ResNet.*conv1.weight is \(64, 1, 7, 7\) in the file"):
        load_pretrained(equipped("pooling", 3), path)
    channelwise = equipped("softmin(scale='channel')", 5)
    ds.save(channelwise, tmp_path / "channelwise")
    model = equipped("softmin(scale='channel')", 3)
    load_pretrained(model, tmp_path / "channelwise")  # √s has one value per class
    assert torch.equal(model.get_parameter("layer1.0.conv1.weight"), channelwise.get_parameter("layer1.0.conv1.weight"))
    assert "holds a model with spec" not in caplog.text
    ds.save(equipped("pooling", 3), tmp_path / "pooling")
    load_pretrained(equipped("pooling+softmin", 3), tmp_path / "pooling")
    assert "holds a model with spec 'pooling'; this one has spec 'pooling+softmin'" in caplog.text


def test_auxiliary_classifiers_of_pretrained_weights_are_left_out(tmp_path: Path) -> None:
    whole = ds.create_model("googlenet", num_classes=4, init_weights=False)
    torch.save(whole.state_dict(), tmp_path / "whole.pth")
    model = ds.create_model("googlenet", num_classes=3, init_weights=False, aux_logits=False)
    load_pretrained(model, tmp_path / "whole.pth")
    assert torch.equal(model.get_parameter("conv1.conv.weight"), whole.get_parameter("conv1.conv.weight"))


def test_an_unsafe_or_other_pickle_is_refused(tmp_path: Path) -> None:
    class Unsafe:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"model": Unsafe()}, tmp_path / "unsafe.pth")
    with pytest.raises(ValueError, match=r"unsafe.pth cannot be read as a state_dict without running code"):
        load_pretrained(nn.Linear(1, 1), tmp_path / "unsafe.pth")
    assert not (tmp_path / "ran").exists()
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other.pth holds no state_dict"):
        load_pretrained(nn.Linear(1, 1), tmp_path / "other.pth")


@pytest.mark.parametrize(
    "state",
    [
        {1: torch.zeros(1)}, {"weight": torch.zeros(1, 1, device="meta")}, {"weight": torch.zeros(1, 1).to_sparse()},
        {"weight": torch.zeros(1, 1), "bias": 3}, [torch.zeros(1)],
    ],
    ids=["a number as key", "meta", "sparse", "no tensor", "a list"],
)  # fmt: skip
def test_a_pickle_of_something_like_a_state_dict_is_refused(state: object, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match=r"odd.pth holds no state_dict"):
        load_pretrained(nn.Linear(1, 1), tmp_path / "odd.pth")


def test_keys_from_a_file_stay_on_one_short_line(tmp_path: Path) -> None:
    model = ds.vanilla_cnn()
    torch.save({**model.state_dict(), "a\nb": torch.zeros(1), "x" * 10_000: torch.zeros(1)}, tmp_path / "odd.pth")
    with pytest.raises(
        ValueError, match=r"does not fit VanillaCNN: 'a\\nb' is not part of the model; x+ is not"
    ) as caught:
        load_pretrained(model, tmp_path / "odd.pth")
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("case", BOMBS)
def test_an_archive_that_expands_is_refused_before_it_is_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = nn.Linear(100, 100), tmp_path / "bomb.pth"
    make, message = BOMBS[case]
    path.write_bytes(make(archive_of(model.state_dict())))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch reads it"))
    with pytest.raises(ValueError, match=f"^{path} {message}"):
        load_pretrained(model, path)


def test_an_archive_above_4_gigabytes_has_larger_records(tmp_path: Path) -> None:
    """Written sparsely; its records are those of zip64."""
    path = tmp_path / "large.pth"
    with zipfile.ZipFile(path, "w") as archive:
        large = zipfile.ZipInfo("archive/data/0")
        with archive.open(large, "w", force_zip64=True):
            pass
        large.file_size = large.compress_size = 2**32 + 5
        assert archive.fp is not None
        archive.fp.seek(2**32 + 5, os.SEEK_CUR)
        archive.start_dir = archive.fp.tell()
        archive.writestr("archive/data/1", b"1")
    check_archive(path)
    with path.open("r+b") as file:
        file.seek(-22 - 20 + 8, os.SEEK_END)
        file.write(b"\1")  # another place of the larger record
    with pytest.raises(ValueError, match=r"is not a zip file as torch.save writes it"):
        check_archive(path)
