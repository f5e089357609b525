"""Deployment: a file that says what the model says, in onnxruntime and in ExecuTorch, and describes itself."""

import errno
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.colored import make_images
from PIL import Image
from torch import Tensor, nn

import deepsquare as ds
from deepsquare.checkpoint import Preprocessing
from deepsquare.export import ExportError, export, load_exported
from deepsquare.export.images import load_images, sample_files, split_calibration
from deepsquare.export.lowering import Excitation
from deepsquare.export.quantize import quantize_program
from deepsquare.paper.deployment import int8, parity
from deepsquare.paper.deployment.parity import recalibrate_batchnorm
from deepsquare.results import Store

pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")
COSTS: dict[str, dict[str, int]] = {  # operations in ShuffleNetV2's graph other than its layers and shuffles
    "": {"ReduceMean": 1},
    "pooling": {"ReduceMean": 2, "Mul": 1},
    "softmin": {"ReduceMean": 1, "Mul": 1, "Neg": 1},  # its scale is in the last layer
    "excitation": {"ReduceMean": 17, "Mul": 32, "Add": 16, "Div": 16},
    "encoding": {"ReduceMean": 1, "Mul": 16},
    "pooling+excitation": {"ReduceMean": 18, "Mul": 33, "Add": 16, "Div": 16},
}
LAYERS = {"Conv", "Gemm", "MaxPool", "Relu", "Concat", "Reshape", "Split", "Transpose"}
IMAGES = Preprocessing(("blue", "green", "red"), 64, 72)
EXPORTING = sys.modules["deepsquare.export.exporter"]


def trained(name: str, spec: str, size: int = 64) -> tuple[nn.Module, Tensor]:
    """A model with statistics of its own input, as training leaves them."""
    torch.manual_seed(0)
    model = ds.create_model(name, spec, num_classes=3, input_shape=(3, size, size))
    images = torch.randn(64, 3, size, size)
    return recalibrate_batchnorm(model, images), images[:6]


def near(said: Tensor, expected: Tensor) -> bool:
    return float((said - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def operations(path: Path) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("spec", COSTS)
def test_onnx_says_what_the_model_says(spec: str, tmp_path: Path) -> None:
    model, images = trained("shufflenet_v2_x0_5", spec)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = export(model, tmp_path / "model.onnx", IMAGES, images=images)
    assert made.max_rel_error <= 1e-4
    assert (made.top1_agreement, made.num_images, made.undelegated_ops) == (1.0, 6, {})
    assert made.size == (tmp_path / "model.onnx").stat().st_size
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    program = load_exported(tmp_path / "model.onnx")
    assert program.metadata.preprocessing == IMAGES
    assert (program.metadata.name, program.metadata.spec) == ("torchvision/shufflenet_v2_x0_5", spec)
    with torch.inference_mode():
        assert near(program(images[:1]), model(images[:1]))  # any number at once
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert str(Path(ds.__file__).parent).encode() not in (tmp_path / "model.onnx").read_bytes()
    found = operations(tmp_path / "model.onnx")
    assert {op: count for op, count in found.items() if op not in LAYERS} == COSTS[spec]
    assert found["Reshape"] == 32 * (1 + ("excitation" in spec))  # around each shuffle, and around each excitation


@pytest.mark.parametrize(("name", "spec"), [("shufflenet_v2_x0_5", "pooling+excitation"), ("resnet18", "encoding")])
def test_executorch_says_what_the_model_says(name: str, spec: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="needs deepsquare[export]")
    model, images = trained(name, spec)
    made = export(model, tmp_path / "model.pte", IMAGES, images=images)
    assert made.max_rel_error <= 1e-4
    assert made.top1_agreement == 1.0
    assert made.undelegated_ops == {}
    assert made.undelegated_muls == 0
    program = load_exported(tmp_path / "model.pte")
    assert program.metadata.preprocessing == IMAGES
    with torch.inference_mode():
        assert near(program(images), model(images))


def test_any_size(tmp_path: Path) -> None:
    model, images = trained("resnet18", "pooling+excitation")
    export(model, tmp_path / "model.onnx", IMAGES, images=images, any_size=True)
    larger = torch.randn(2, 3, 96, 128)
    with torch.inference_mode():
        assert near(load_exported(tmp_path / "model.onnx")(larger), model(larger))
    with pytest.raises(ValueError, match="any size is for ONNX"):
        export(model, tmp_path / "model.pte", IMAGES, any_size=True)


@pytest.mark.parametrize(("runtime", "spec"), [("onnx", ""), ("onnx", "encoding"), ("executorch", "pooling")])
def test_int8(runtime: str, spec: str, tmp_path: Path) -> None:
    model, images = trained("shufflenet_v2_x0_5", spec)
    place = tmp_path / ("model.onnx" if runtime == "onnx" else "model.pte")
    made = export(model, place, IMAGES, images=images, calibration=torch.randn(40, 3, 64, 64))
    assert (made.precision, load_exported(place).metadata.precision) == ("int8", "int8")
    if spec != "encoding":  # an untrained network with 16 squares in a row knows no int8; a trained one is measured
        assert 1e-4 < made.max_rel_error < 0.5
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert made.size < (0.6 if runtime == "onnx" else 0.5) * whole
    assert made.undelegated_muls == 0
    if runtime == "onnx":
        found = operations(place)
        floats = 16 if spec == "encoding" else 0  # convolutions that read a square
        assert found["QuantizeLinear"] >= 56 - floats
        assert found["Mul"] == floats


def test_a_image_on_which_the_network_explodes_sets_no_range(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.rand(20, 3) + 1
    images = torch.arange(20.0)
    assert torch.equal(EXPORTING._usual(images, logits), images)
    assert not caplog.text
    logits[7] = 1e6
    assert EXPORTING._usual(images, logits).tolist() == [place for place in range(20) if place != 7]
    assert "leave out 1 images on which the network explodes" in caplog.text


def test_in_xnnpack_layers_are_integers_and_what_squares_make_is_not() -> None:
    pytest.importorskip("executorch", reason="needs deepsquare[export]")

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.encoding = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
            self.excitation, self.last = Excitation(torch.ones(1)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = self.excitation(self.encoding(x * x)) + self.first(x[:, :3])
            return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]

    images = torch.randn(4, 3, 16, 16)
    with EXPORTING._silent():
        quantised = quantize_program(Small().eval(), images, images[:1])
    reads = [
        (node.target.__name__.partition(".")[0], "dequantize" in str(node.args[0]))
        for node in quantised.graph.nodes  # type: ignore[union-attr]
        if node.op == "call_function" and isinstance(node.args[0], torch.fx.Node)
    ]
    layers = [read for name, read in reads if name in ("conv2d", "linear")]
    assert layers == [True, False, True, True]  # the second reads a square
    assert [read for name, read in reads if name == "add"] == [False, True]  # G + α², and the residual
    assert not [read for name, read in reads if name == "div" and read]


@pytest.mark.parametrize("spec", ["se", "ge_theta", "gsop", "isqrt_cov"])
def test_peers_in_onnx(spec: str, tmp_path: Path) -> None:
    model, images = trained("resnet18", spec)
    made = export(model, tmp_path / "model.onnx", Preprocessing((), 64, 64), images=images)
    assert made.max_rel_error < 1e-4


def test_what_does_not_fit_is_told_before_the_work(tmp_path: Path) -> None:
    model, images = trained("shufflenet_v2_x0_5", "")
    path = tmp_path / "model.onnx"
    for wrong in (images.double(), images[:0], images[:, :1], images[..., :32]):
        with pytest.raises(ValueError, match=r"images is .*; expected \(N, 3, 64, 64\) float32, as images says"):
            export(model, path, IMAGES, images=wrong)
    with pytest.raises(ValueError, match=r"calibration is \(2, 3, 32, 32\) float32"):
        export(model, path, IMAGES, images=images, calibration=torch.randn(2, 3, 32, 32))
    with pytest.raises(ValueError, match="images names 2 classes; expected 3"):
        export(model, path, Preprocessing(("cat", "dog"), 64, 72), images=images)
    with pytest.raises(ValueError, match=r"expected a classifier"):
        export(nn.Conv2d(3, 3, 3), path, IMAGES, images=images)
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match=r"folder.onnx is a folder"):
        export(model, tmp_path / "folder.onnx", IMAGES)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.onnx"]


def test_a_model_that_always_says_the_same_proves_little(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x.mean((2, 3))

    left = tmp_path / f".model.onnx.{'0' * 32}.onnx"  # by a killed export
    left.touch()
    made = export(Deaf(), tmp_path / "model.onnx", IMAGES)
    assert made.max_rel_error == 0
    assert "says the same of every image" in caplog.text
    assert not left.exists()


def test_what_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = trained("shufflenet_v2_x0_5", "")
    for name in ("TOLERANCE", "ROUNDINGS"):
        monkeypatch.setattr(EXPORTING, name, 0)
    with pytest.raises(ValueError, match=r"differs by .* of the largest logit.* Nothing was written"):
        export(model, tmp_path / "model.onnx", IMAGES, images=images)
    assert not list(tmp_path.iterdir())


def test_a_model_that_amplifies_rounding_is_written(tmp_path: Path) -> None:
    class Cancels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)) + 1e4 - 1e4

    made = export(Cancels(), tmp_path / "model.onnx", IMAGES)
    assert 1e-4 < made.max_rel_error <= 4 * made.fp32_error


def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    monkeypatch.setattr(onnx, "save", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    (tmp_path / "model.onnx").write_text("old")
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(OSError, match=r"cannot write .*model.onnx \(No space left on device\); make room"):
        export(model, tmp_path / "model.onnx", IMAGES)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_mistakes_in_exporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = trained("shufflenet_v2_x0_5", "")
    with pytest.raises(ValueError, match=r"model.txt; expected the ending .onnx for onnx or .pte for executorch"):
        export(model, tmp_path / "model.txt", IMAGES)
    with pytest.raises(ValueError, match="own logits are not finite"):
        export(model, tmp_path / "model.onnx", IMAGES, images=images * torch.inf)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"needs onnx, which is not installed: pip install 'deepsquare\[export\]'"):
        export(model, tmp_path / "model.onnx", IMAGES)
    assert not list(tmp_path.iterdir())


def test_an_onnx_file_of_another_make_is_refused(tmp_path: Path) -> None:
    import onnx

    model, images = trained("shufflenet_v2_x0_5", "")
    export(model, place := tmp_path / "model.onnx", IMAGES, images=images)
    foreign = onnx.load(place)
    del foreign.metadata_props[:]
    onnx.save(foreign, place)
    with pytest.raises(ValueError, match="does not say how images become its input"):
        load_exported(place)
    entry = foreign.metadata_props.add()
    entry.key, entry.value = "deepsquare", json.dumps({"name": None, "spec": "", "precision": "float32"})
    onnx.save(foreign, place)
    with pytest.raises(ValueError, match="says of itself is damaged"):
        load_exported(place)


def test_images_are_shown_as_in_the_evaluation(tmp_path: Path) -> None:
    from deepsquare.data import EvalTransform, batches, open_source
    from deepsquare.training.image_folder import Normalize

    data = make_images(tmp_path / "data", train=1, val=2, side=80)
    source = open_source(data, "val")
    (batch,) = batches(source, [range(6)], EvalTransform(64, 72), pipeline="torchvision")
    files = [Path(source.name(index)) for index in range(6)]
    assert sample_files(data / "val", 99) == files
    assert sample_files(data / "val", 3) == files[::2]
    torch.testing.assert_close(load_images(files, IMAGES), Normalize(torch.device("cpu"))(batch.images))


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


def test_a_model_for_other_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the model does not take images of \(3, 64, 64\): .*channels"):
        export(nn.Conv2d(1, 3, 3), tmp_path / "model.onnx", IMAGES)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"classes": (1, 2)}, r"classes is \(1, 2\); expected a tuple of names"),
        ({"size": 288}, "size is 288 and resize 256; expected a centre within the shorter side"),
        ({"mean": (0.5, 0.5)}, r"mean is \(0.5, 0.5\); expected three numbers"),
        ({"std": (0.0, 1.0, 1.0)}, "expected numbers above 0"),
    ],
)
def test_what_images_cannot_be_is_told_at_once(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"classes": (), **wrong})


def test_ranges_and_proof_are_of_different_images() -> None:
    images = torch.arange(20.0)
    calibration, compared = split_calibration(images)
    assert compared.tolist() == [0, 9, 18]
    assert sorted([*calibration.tolist(), *compared.tolist()]) == images.tolist()
    assert [part.tolist() for part in split_calibration(images[:1])] == [[0], [0]]


# ---- the commands ----


@pytest.mark.filterwarnings("default:.*does not say how images become its input")
def test_export_and_predict(tmp_path: Path, deepsquare: Callable[..., tuple[int, str]]) -> None:
    data = make_images(tmp_path / "data", train=1, val=2, side=80)
    model, _ = trained("shufflenet_v2_x0_5", "pooling+softmin")
    ds.checkpoint.save(model, tmp_path / "run.safetensors", IMAGES)
    code, said = deepsquare("export", tmp_path / "run.safetensors", "--to", "onnx", "--images", data)
    assert code == 0, said
    assert "On 9 images it differs from the model by" in said
    image = data / "val" / "red" / "0.jpg"
    answers = []
    for name in ("run.safetensors", "run.onnx"):
        code, said = deepsquare("predict", tmp_path / name, image, "--json")
        assert code == 0, said
        (one,) = json.loads(said)
        assert one["image"] == str(image)
        found = {answer["class"]: answer["chance"] for answer in one["answers"]}
        assert found.keys() == {"blue", "green", "red"}
        assert list(found.values()) == sorted(found.values(), reverse=True)
        answers.append(found)
    assert answers[0] == pytest.approx(answers[1], abs=1e-4)
    code, said = deepsquare("predict", tmp_path / "run.onnx", image)
    assert code == 0
    assert said.splitlines()[0] == str(image)

    (broken := tmp_path / "broken.jpg").write_text("no image")
    for model_name, file, message in (
        ("run.onnx", broken, "; expected one of JPEG, PNG"),
        ("run.onnx", tmp_path / "none.jpg", "no image "),
        ("none.onnx", image, "no file "),
        ("broken.jpg", image, "is no complete safetensors file"),
    ):
        code, said = deepsquare("predict", tmp_path / model_name, file)
        assert code == 2
        assert message in said
    ds.save(model, tmp_path / "bare.safetensors")
    code, said = deepsquare("predict", tmp_path / "bare.safetensors", image)
    assert code == 0
    assert "does not say how images become its input" in said
    assert "taken as the centre, 64 × 64" in said
    ds.checkpoint.save(model.half(), tmp_path / "odd.safetensors", IMAGES)
    code, said = deepsquare("predict", tmp_path / "odd.safetensors", image)
    assert code == 0, said
    next(model.parameters()).data.fill_(torch.nan)
    ds.checkpoint.save(model, tmp_path / "odd.safetensors", IMAGES)
    code, said = deepsquare("predict", tmp_path / "odd.safetensors", image)
    assert code == 2
    assert f"has no answer for {image}: its logits are not numbers" in said
    code, said = deepsquare("eval", tmp_path / "run.onnx", "--data", data)
    assert code == 2
    assert "run.onnx is an exported file; give the checkpoint" in said
    (tmp_path / "random.pte").write_bytes(bytes(range(256)))
    code, said = deepsquare("predict", tmp_path / "random.pte", image)
    assert code == 2
    assert "random.pte is no ExecuTorch program" in said
    broken.rename(tmp_path / "broken.onnx")
    code, said = deepsquare("predict", tmp_path / "broken.onnx", image)
    assert code == 2
    assert "is no ONNX file that onnxruntime can run" in said


# ---- the experiment ----


def test_parity_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MODELS": ("shufflenet_v2_x0_5",), "SPECS": ("pooling",), "PEERS": (), "SIDE": 64}.items():
        monkeypatch.setattr(parity, name, value)
    monkeypatch.setattr(parity, "ENDINGS", {"onnx": ".onnx"})
    parity.run_parity(results=tmp_path)
    assert capsys.readouterr().out.startswith("shufflenet_v2_x0_5+pooling, onnx: differs by")
    (row,) = Store(tmp_path / "deploy.jsonl").rows()
    assert row.metrics["max_rel_error"] < 1e-4
    parity.run_parity(results=tmp_path)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="rows are models here; alexnet is none of shufflenet_v2_x0_5"):
        parity.run_parity(rows=["alexnet"], results=tmp_path)
    monkeypatch.setattr(parity, "export", Mock(side_effect=ExportError("it cannot be")))
    monkeypatch.setattr(parity, "SPECS", ("softmin",))
    parity.run_parity(results=tmp_path)
    assert "shufflenet_v2_x0_5+softmin, onnx: it cannot be" in capsys.readouterr().out


def test_int8_of_the_proxies_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(int8, "ENDINGS", {"onnx": ".onnx"})
    data = make_images(tmp_path / "data", train=8, val=4, side=40)
    with pytest.raises(FileNotFoundError, match=r"holds no network; first deepsquare reproduce proxy"):
        int8.run_int8(data, results=tmp_path)
    torch.manual_seed(0)
    model = recalibrate_batchnorm(ds.create_model("vanilla_cnn", "pooling", num_classes=3), torch.randn(8, 3, 32, 32))
    shown = Preprocessing(IMAGES.classes, 32, 36)
    ds.checkpoint.save(model, tmp_path / ".runs" / "vanilla_cnn+pooling-seed4.safetensors", shown)
    with pytest.raises(FileNotFoundError, match="holds no network of vanilla_cnn; "):
        int8.run_int8(data, rows=["vanilla_cnn"], results=tmp_path)
    int8.run_int8(data, results=tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == 2
    plain, quantised = Store(tmp_path / "deploy.jsonl").rows()
    assert (plain.row, plain.seed, plain.recipe["precision"]) == ("vanilla_cnn+pooling", 4, "float32")
    assert (quantised.recipe["precision"], quantised.recipe["calibration"]) == ("int8", 24)
    files = [(label, file) for label, name in enumerate(shown.classes) for file in (data / "val" / name).iterdir()]
    with torch.inference_mode():
        said = model(load_images([file for _, file in files], shown)).argmax(1)
    assert plain.metrics["accuracy"] == pytest.approx(sum(a == b for a, (b, _) in zip(said, files, strict=True)) / 12)
    assert quantised.metrics["bytes"] < plain.metrics["bytes"]
    assert quantised.metrics["max_rel_error"] > plain.metrics["max_rel_error"]
    next(model.parameters()).data.fill_(torch.nan)
    ds.checkpoint.save(model, tmp_path / ".runs" / "diverged-seed0.safetensors", shown)
    int8.run_int8(data, results=tmp_path)
    said = capsys.readouterr().out
    assert said.count("diverged, seed 0, onnx") == said.count("left out: the model's own logits are not finite") == 2
    assert len(Store(tmp_path / "deploy.jsonl").rows()) == 2
