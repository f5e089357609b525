"""Export: the same logits in onnxruntime and ExecuTorch as in PyTorch, and metadata in the file."""

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.exported import IMAGES, trained
from torch import Tensor, nn

import deepsquare as ds
from deepsquare._files import InUseError, exclusive
from deepsquare.export import export, load_exported
from deepsquare.export.base import Runtime, quiet
from deepsquare.export.executorch import ExecuTorch
from deepsquare.export.lowering import Excitation
from deepsquare.export.runtimes import RUNTIMES, runtime_for
from deepsquare.preprocessing import Preprocessing

pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")
EXPORTER = sys.modules["deepsquare.export.exporter"]
NETWORK = "timm/test_resnet"  # four residual blocks, small enough to be exported in seconds
EVERYTHING = "pooling+excitation+encoding+softmin"
OPERATIONS: dict[tuple[str, str], dict[str, int]] = {  # in the graph, other than the layers
    (NETWORK, ""): {"ReduceMean": 1, "Add": 4, "Reshape": 1},
    (NETWORK, EVERYTHING): {
        "ReduceMean": 1 + 4 + 1,
        "Mul": 4 + 2 * 4 + 1 + 1,  # encoding; excitation; pooling; softmin, whose scale is in the last layer
        "Add": 4 + 4,
        "Div": 4,
        "Reshape": 1 + 2 * 4,
        "Neg": 1,
    },
    ("small shufflenet", "pooling+excitation"): {
        "ReduceMean": 4 + 2,
        "Mul": 2 * 4 + 1,
        "Add": 4,
        "Div": 4,
        "Reshape": 2 * 4,  # around each mean
        "Slice": 2 + 2,  # the second unit of a stage reads halves of two maps and leaves the other halves: no shuffles
    },
}
LAYERS = {"Conv", "Gemm", "MaxPool", "AveragePool", "Relu", "Concat"}


def near(logits: Tensor, expected: Tensor) -> bool:
    return float((logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def operations(path: Path) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(("name", "spec"), OPERATIONS)
def test_onnx_parity(name: str, spec: str, tmp_path: Path) -> None:
    model, images = trained(name, spec)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exported = export(model, tmp_path / "model.onnx", IMAGES, images=images)
    assert exported.max_rel_error <= 1e-4
    assert (exported.top1_agreement, exported.num_images, exported.undelegated_ops) == (1.0, 6, {})
    assert exported.size == (tmp_path / "model.onnx").stat().st_size
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loaded = load_exported(tmp_path / "model.onnx")
    assert loaded.metadata.preprocessing == IMAGES
    assert (loaded.metadata.name, loaded.metadata.spec) == (name if "/" in name else None, spec)
    with torch.inference_mode():
        assert near(loaded(images[:1]), model(images[:1]))  # any number at once
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert str(Path(ds.__file__).parent).encode() not in (tmp_path / "model.onnx").read_bytes()
    counts = operations(tmp_path / "model.onnx")
    assert {op: count for op, count in counts.items() if op not in LAYERS} == OPERATIONS[name, spec]


@pytest.mark.parametrize(
    ("name", "spec", "undelegated"),
    [("small shufflenet", "pooling+excitation", {}), (NETWORK, EVERYTHING, {"avg_pool2d": 3})],  # of its shortcuts
)
@pytest.mark.slow
def test_executorch_parity(name: str, spec: str, undelegated: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="needs deepsquare[export]")
    model, images = trained(name, spec)
    exported = export(model, tmp_path / "model.pte", IMAGES, images=images)
    assert exported.max_rel_error <= 1e-4
    assert exported.top1_agreement == 1.0
    assert exported.undelegated_ops == undelegated
    assert exported.undelegated_muls == 0
    loaded = load_exported(tmp_path / "model.pte")
    assert loaded.metadata.preprocessing == IMAGES
    with torch.inference_mode():
        assert near(loaded(images), model(images))


def test_any_size(tmp_path: Path) -> None:
    model, images = trained(NETWORK, "pooling+excitation")
    export(model, tmp_path / "model.onnx", IMAGES, images=images, any_size=True)
    larger = torch.randn(2, 3, 96, 128)
    with torch.inference_mode():
        assert near(load_exported(tmp_path / "model.onnx")(larger), model(larger))
    with pytest.raises(ValueError, match=r"a file for ExecuTorch has one input size; .*or use onnx"):
        export(model, tmp_path / "model.pte", IMAGES, any_size=True)


@pytest.mark.parametrize(
    ("runtime", "name", "spec"),
    [("onnx", NETWORK, ""), ("onnx", NETWORK, "encoding"), ("executorch", "vanilla_cnn", "pooling")],
)
@pytest.mark.slow
def test_int8(runtime: str, name: str, spec: str, tmp_path: Path) -> None:
    model, images = trained(name, spec)
    path = tmp_path / f"model{RUNTIMES[runtime].suffix}"
    exported = export(model, path, IMAGES, images=images, calibration=torch.randn(40, 3, 64, 64))
    assert (exported.precision, load_exported(path).metadata.precision) == ("int8", "int8")
    assert 1e-4 < exported.max_rel_error < 0.5
    assert exported.size < 0.6 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert exported.undelegated_muls == 0
    if runtime == "onnx":
        counts = operations(path)
        floats = 4 if spec == "encoding" else 0  # convolutions that read a square
        assert counts["QuantizeLinear"] == 32 - 2 * floats
        assert counts["Mul"] == floats


def test_images_on_which_the_network_explodes_set_no_range(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.rand(20, 3) + 1
    images = torch.arange(20.0)
    assert torch.equal(EXPORTER._without_outliers(images, logits), images)
    assert not caplog.text
    logits[7] = 1e6
    assert EXPORTER._without_outliers(images, logits).tolist() == [index for index in range(20) if index != 7]
    assert "leave out 1 images on which the network explodes" in caplog.text


def test_xnnpack_runs_layers_in_int8_and_squares_in_float32() -> None:
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
    with quiet():
        quantized = ExecuTorch().quantize(Small().eval(), images)
    reads = [
        (node.target.__name__.partition(".")[0], "dequantize" in str(node.args[0]))
        for node in quantized.graph.nodes  # type: ignore[union-attr]
        if node.op == "call_function" and isinstance(node.args[0], torch.fx.Node)
    ]
    layers = [read for name, read in reads if name in ("conv2d", "linear")]
    assert layers == [True, False, True, True]  # the second reads a square
    assert [read for name, read in reads if name == "add"] == [False, True]  # G + α², and the residual
    assert not [read for name, read in reads if name == "div" and read]


@pytest.mark.parametrize("spec", ["se+isqrt_cov(size=8, dense=False)", "ge_theta", "gsop(size=8)"])
def test_baselines_in_onnx(spec: str, tmp_path: Path) -> None:
    model, images = trained(NETWORK, spec)
    exported = export(model, tmp_path / "model.onnx", Preprocessing((), 64, 64), images=images)
    assert exported.max_rel_error < 1e-4


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("spec", ["se", "gem", "pooling", "ge_theta_minus", EVERYTHING])
def test_beta_is_a_constant_in_onnx(spec: str, beta: float, tmp_path: Path) -> None:
    base, images = trained(NETWORK, "")
    model = ds.equip(base, spec, init="identity")
    betas = [value for name, value in model.named_parameters() if name.endswith(".beta")]
    with torch.no_grad():
        for value in betas:
            value.fill_(beta)
    exported = export(model, tmp_path / "model.onnx", IMAGES, images=images)
    assert exported.max_rel_error < 1e-4
    counts = operations(tmp_path / "model.onnx")
    assert not {"IsNaN", "IsInf", "Where"} & set(counts)
    if beta == 0:
        assert {op: count for op, count in counts.items() if op not in LAYERS} == OPERATIONS[NETWORK, ""]
    elif spec == "ge_theta_minus":  # a mean, a sigmoid and a product; (1 − β) · x + β · y
        assert {op: counts[op] for op in ("Mul", "Add")} == {"Mul": 4 * (1 + 2), "Add": 4 + 4}


def test_wrong_arguments_fail_early(tmp_path: Path) -> None:
    model, images = trained("vanilla_cnn", "")
    path = tmp_path / "model.onnx"
    for wrong in (images.double(), images[:0], images[:, :1], images[..., :32]):
        with pytest.raises(ValueError, match=r"images is .*; expected \(N, 3, 64, 64\) float32, as preprocessing says"):
            export(model, path, IMAGES, images=wrong)
    with pytest.raises(ValueError, match=r"calibration is \(2, 3, 32, 32\) float32"):
        export(model, path, IMAGES, images=images, calibration=torch.randn(2, 3, 32, 32))
    with pytest.raises(ValueError, match="preprocessing has 2 class names; expected 3"):
        export(model, path, Preprocessing(("cat", "dog"), 64, 72), images=images)
    with pytest.raises(ValueError, match=r"expected a classifier"):
        export(nn.Conv2d(3, 3, 3), path, IMAGES, images=images)
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match=r"folder.onnx is a folder"):
        export(model, tmp_path / "folder.onnx", IMAGES)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.onnx"]


def test_constant_logits_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x.mean((2, 3))

    stale = tmp_path / f".model.onnx.{'0' * 32}"  # of a killed export
    stale.mkdir()
    exported = export(Constant(), tmp_path / "model.onnx", IMAGES)
    assert exported.max_rel_error == 0
    assert "gives all images the same logits" in caplog.text
    assert not stale.exists()


def test_a_file_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = trained("vanilla_cnn", "")
    for name in ("TOLERANCE", "FP32_FACTOR"):
        monkeypatch.setattr(EXPORTER, name, 0)
    with pytest.raises(ValueError, match=r"differs by .* of the largest logit.* Nothing was written"):
        export(model, tmp_path / "model.onnx", IMAGES, images=images)
    assert not list(tmp_path.iterdir())


def test_a_model_that_amplifies_rounding_is_written(tmp_path: Path) -> None:
    class Cancels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)) + 1e4 - 1e4

    exported = export(Cancels(), tmp_path / "model.onnx", IMAGES)
    assert 1e-4 < exported.max_rel_error <= 4 * exported.fp32_error


def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").write_text("old")
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(OSError, match=r"cannot write .*model.onnx \(No space left on device\); make room"):
        export(model, tmp_path / "model.onnx", IMAGES)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_two_exports_to_one_file_are_refused(tmp_path: Path) -> None:
    model, path = ds.create_model("vanilla_cnn").eval(), tmp_path / "model.onnx"
    with exclusive(tmp_path / ".model.onnx.lock", "the test", ""):
        (other := tmp_path / f".model.onnx.{'0' * 32}").mkdir()  # what the other export writes
        with pytest.raises(InUseError, match=rf"{path} is in use by process {os.getpid()} on .*; wait until that expo"):
            export(model, path, IMAGES)
        assert other.exists()


def test_mistakes_in_exporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = trained("vanilla_cnn", "")
    with pytest.raises(ValueError, match=r"model.txt; expected the suffix .onnx for onnx or .pte for executorch"):
        export(model, tmp_path / "model.txt", IMAGES)
    with pytest.raises(ValueError, match="own logits are not finite"):
        export(model, tmp_path / "model.onnx", IMAGES, images=images * torch.inf)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"needs onnx, which is not installed: pip install 'deepsquare\[export\]'"):
        export(model, tmp_path / "model.onnx", IMAGES)
    assert not list(tmp_path.iterdir())


def test_a_file_without_valid_metadata_is_refused(tmp_path: Path) -> None:
    import onnx

    model, images = trained("vanilla_cnn", "")
    export(model, path := tmp_path / "model.onnx", IMAGES, images=images)
    foreign = onnx.load(path)
    del foreign.metadata_props[:]
    onnx.save(foreign, path)
    with pytest.raises(ValueError, match="has no metadata of deepsquare; expected a file that deepsquare export wrote"):
        load_exported(path)
    entry = foreign.metadata_props.add()
    entry.key, entry.value = "deepsquare", json.dumps({"name": None, "spec": "", "precision": "float32"})
    onnx.save(foreign, path)
    with pytest.raises(ValueError, match=r"metadata of .*model.onnx is damaged \(.*`preprocessing`.*export it again"):
        load_exported(path)
    old = {"classes": ["a", "b", "c"], "size": 64, "resize": 72, "mean": [0.4, 0.4, 0.4], "std": [0.2, 0.3, 0.2]}
    entry.value = json.dumps({"name": None, "spec": "", "precision": "float32", "pictures": old})  # the old names
    onnx.save(foreign, path)
    loaded = load_exported(path)
    assert loaded.metadata.preprocessing == Preprocessing(("a", "b", "c"), 64, 72, (0.4, 0.4, 0.4), (0.2, 0.3, 0.2))
    with torch.inference_mode():
        assert near(loaded(images), model(images))


def test_a_model_for_other_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the model does not take images of \(3, 64, 64\): .*channels"):
        export(nn.Conv2d(1, 3, 3), tmp_path / "model.onnx", IMAGES)


def test_a_runtime_knows_its_files() -> None:
    assert [runtime_for(Path(f"model{runtime.suffix}")) for runtime in RUNTIMES.values()] == [*RUNTIMES.values()]
    assert [*RUNTIMES] == [runtime.name for runtime in RUNTIMES.values()]
    assert all(isinstance(runtime, Runtime) and runtime.label and runtime.modules for runtime in RUNTIMES.values())


def test_the_registry_imports_no_runtime() -> None:
    code = """
import sys, deepsquare.export, deepsquare.cli.export
print([name for name in ("onnx", "onnxscript", "onnxruntime", "executorch", "torchao") if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.strip() == "[]"


def test_a_single_image_leaves_the_batch_size_dynamic(tmp_path: Path) -> None:
    model, images = trained("vanilla_cnn", "")
    export(model, tmp_path / "model.onnx", IMAGES, images=images[:1])
    with torch.inference_mode():
        assert near(load_exported(tmp_path / "model.onnx")(images), model(images))
