"""The experiments on exported networks: parity, and the accuracy of int8."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.exported import IMAGES
from helpers.images import make_colored_folders

import deepsquare as ds
from deepsquare.checkpoint import RunInfo
from deepsquare.export import ExportError
from deepsquare.export.images import load_images
from deepsquare.export.runtimes import RUNTIMES
from deepsquare.paper.deployment import int8, parity
from deepsquare.paper.options import OutputFolders
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import Store

pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")


def test_parity_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"MODELS": ("vanilla_cnn",), "SPECS": ("pooling",), "BASELINE_SPECS": (), "SIZE": 64}
    for name, value in small.items():
        monkeypatch.setattr(parity, name, value)
    monkeypatch.setattr(parity, "RUNTIMES", {"onnx": RUNTIMES["onnx"]})
    output = OutputFolders(tmp_path)
    parity.run_parity(output=output)
    assert capsys.readouterr().out.startswith("vanilla_cnn+pooling, onnx: relative error")
    (row,) = Store(tmp_path / "deploy.jsonl").rows()
    assert row.metrics["max_rel_error"] < 1e-4
    parity.run_parity(output=output)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="rows are models here; alexnet is none of vanilla_cnn"):
        parity.run_parity(rows=("alexnet",), output=output)
    monkeypatch.setattr(parity, "export", Mock(side_effect=ExportError("it cannot be")))
    monkeypatch.setattr(parity, "SPECS", ("softmin",))
    parity.run_parity(output=output)
    assert "vanilla_cnn+softmin, onnx: it cannot be" in capsys.readouterr().out


def test_int8_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(int8, "RUNTIMES", {"onnx": RUNTIMES["onnx"]})
    data = make_colored_folders(tmp_path / "data", train=8, val=4, side=40)
    output = OutputFolders(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no network; first run deepsquare reproduce proxy"):
        int8.run_int8(data=data, output=output)
    torch.manual_seed(0)
    model = ds.create_model("vanilla_cnn", "pooling", num_classes=3)
    ds.recalibrate_batchnorm(model, [torch.randn(8, 3, 32, 32)]).eval()
    preprocessing = Preprocessing(IMAGES.class_names, 32, 36)
    runs = tmp_path / ".runs"
    ds.save(model, runs / "no-run.safetensors", preprocessing)
    continued = RunInfo("vanilla_cnn+pooling", 4, init_from="vanilla_cnn")
    ds.save(model, runs / "a.safetensors", preprocessing, run=continued)
    with pytest.raises(FileNotFoundError, match="holds no network of vanilla_cnn; "):
        int8.run_int8(data=data, rows=("vanilla_cnn",), output=output)
    int8.run_int8(data=data, output=output)
    assert len(capsys.readouterr().out.splitlines()) == 2
    float32, quantized = Store(tmp_path / "deploy.jsonl").rows()
    assert (float32.row, float32.seed, float32.recipe["precision"]) == ("vanilla_cnn+pooling-continued", 4, "float32")
    assert (quantized.recipe["precision"], quantized.recipe["calibration"]) == ("int8", 24)
    files = sorted((data / "val").rglob("*.jpg"))
    labels = torch.tensor([preprocessing.class_names.index(file.parent.name) for file in files])
    with torch.inference_mode():
        predicted = model(load_images(files, preprocessing)).argmax(1)
    assert float32.metrics["accuracy"] == pytest.approx((predicted == labels).float().mean().item())
    assert quantized.metrics["bytes"] < float32.metrics["bytes"]
    assert quantized.metrics["max_rel_error"] > float32.metrics["max_rel_error"]
    next(model.parameters()).data.fill_(torch.nan)
    ds.save(model, runs / "b.safetensors", preprocessing, run=RunInfo("diverged", 0))
    int8.run_int8(data=data, output=output)
    printed = capsys.readouterr().out
    assert printed.count("diverged, seed 0, onnx") == 2
    assert printed.count("left out: the model's own logits are not finite") == 2
    assert len(Store(tmp_path / "deploy.jsonl").rows()) == 2
