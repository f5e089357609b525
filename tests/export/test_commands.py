"""``deepsquare export`` and ``deepsquare predict``."""

import json
from pathlib import Path

import pytest
import torch
from helpers.exported import IMAGES, trained
from helpers.images import make_colored_folders
from helpers.shell import Shell

import deepsquare as ds

pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")


@pytest.mark.filterwarnings("default:.*does not say how images become its input")
@pytest.mark.slow
def test_export_and_predict(tmp_path: Path, shell: Shell) -> None:
    data = make_colored_folders(tmp_path / "data", train=1, val=2, side=80)
    model, _ = trained("vanilla_cnn", "pooling+softmin")
    ds.checkpoint.save(model, tmp_path / "run.safetensors", IMAGES)
    code, output = shell("export", tmp_path / "run.safetensors", "--to", "onnx", "--images", data)
    assert code == 0, output
    assert "On 9 images it differs from the model by" in output
    image = data / "val" / "red" / "0.jpg"
    predictions = []
    for name in ("run.safetensors", "run.onnx"):
        code, output = shell("predict", tmp_path / name, image, "--json")
        assert code == 0, output
        (prediction,) = json.loads(output)
        assert prediction["image"] == str(image)
        classes = {each["class"]: each["probability"] for each in prediction["predictions"]}
        assert classes.keys() == {"blue", "green", "red"}
        assert list(classes.values()) == sorted(classes.values(), reverse=True)
        predictions.append(classes)
    assert predictions[0] == pytest.approx(predictions[1], abs=1e-4)
    code, output = shell("predict", tmp_path / "run.onnx", image)
    assert code == 0
    assert output.splitlines()[0] == str(image)

    (broken := tmp_path / "broken.jpg").write_text("no image")
    for model_name, file, message in (
        ("run.onnx", broken, "; expected one of JPEG, PNG"),
        ("run.onnx", tmp_path / "none.jpg", "no image "),
        ("none.onnx", image, "no file "),
        ("broken.jpg", image, "is not a safetensors file, or is truncated"),
    ):
        code, output = shell("predict", tmp_path / model_name, file)
        assert code == 2
        assert message in output
    ds.save(model, tmp_path / "bare.safetensors")
    code, output = shell("predict", tmp_path / "bare.safetensors", image)
    assert code == 0
    assert "does not say how images become its input" in output
    assert "a center crop of 64 × 64" in output
    ds.checkpoint.save(model.half(), tmp_path / "odd.safetensors", IMAGES)
    code, output = shell("predict", tmp_path / "odd.safetensors", image)
    assert code == 0, output
    next(model.parameters()).data.fill_(torch.nan)
    ds.checkpoint.save(model, tmp_path / "odd.safetensors", IMAGES)
    code, output = shell("predict", tmp_path / "odd.safetensors", image)
    assert code == 2
    assert f"has no prediction for {image}: its logits are NaN" in output
    code, output = shell("eval", tmp_path / "run.onnx", "--data", data)
    assert code == 2
    assert "run.onnx is an exported file; give the checkpoint" in output
    (tmp_path / "random.pte").write_bytes(bytes(range(256)))
    code, output = shell("predict", tmp_path / "random.pte", image)
    assert code == 2
    assert "random.pte is no ExecuTorch program" in output
    broken.rename(tmp_path / "broken.onnx")
    code, output = shell("predict", tmp_path / "broken.onnx", image)
    assert code == 2
    assert "is no ONNX file that onnxruntime can run" in output


def test_a_wrong_suffix_is_an_error_before_any_note(tmp_path: Path, shell: Shell) -> None:
    ds.save(ds.create_model("vanilla_cnn"), tmp_path / "bare.safetensors")
    code, output = shell("export", tmp_path / "bare.safetensors", "--to", "onnx", "--output", tmp_path / "model.pte")
    expected = f"the output is {tmp_path / 'model.pte'}; expected the suffix .onnx for onnx"
    assert (code, output) == (2, f"deepsquare: error: {expected}\n")
