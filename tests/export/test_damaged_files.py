"""Exported files that are damaged, or not what deepsquare writes: one line, and nothing of the machine in it."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepsquare as ds
from deepsquare.export import export, load_exported
from deepsquare.preprocessing import Preprocessing

onnx = pytest.importorskip("onnx", reason="needs the extra 'export'")
pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
SMALL = {"name": None, "spec": "", "precision": "float32", "preprocessing": {"size": 8, "resize": 8}}
IMAGES = ("images", onnx.TensorProto.FLOAT, ["N", 3, 8, 8])
LOGITS = ("logits", onnx.TensorProto.FLOAT, ["N", 3])


def write(
    path: Path,
    nodes: Sequence[tuple[Any, ...]],
    inputs: Sequence[tuple[Any, ...]] = (IMAGES,),
    outputs: Sequence[tuple[Any, ...]] = (LOGITS,),
    weights: Sequence[Any] = (),
    metadata: str | None = None,
) -> None:
    """An ONNX file of nodes (operator, inputs, outputs, domain)."""
    helper = onnx.helper
    made = [helper.make_node(kind, read, written, domain=domain) for kind, read, written, domain in nodes]
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("other", 1)]
    model = helper.make_model(helper.make_graph(made, "graph", *infos, list(weights)), opset_imports=versions)
    model.ir_version = 8
    helper.set_model_props(model, {"deepsquare": json.dumps(SMALL) if metadata is None else metadata})
    path.write_bytes(model.SerializeToString())


MEAN = [
    ("GlobalAveragePool", ["images"], ["pooled"], ""),
    ("Flatten", ["pooled"], ["logits"], ""),
]


def test_a_file_like_those_below_is_read(tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", MEAN)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(load_exported(tmp_path / "m.onnx")(images), images.mean((2, 3)))


INT64 = onnx.TensorProto.INT64
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "two inputs": ({"inputs": (IMAGES, ("x", 1, ["N"]))}, "has 2 inputs and 1 outputs .*expected images"),
    "two outputs": ({"outputs": (LOGITS, ("pooled", 1, ["N", 3, 1, 1]))}, "has 1 inputs and 2 outputs"),
    "a map": ({"nodes": MEAN[:1], "outputs": (("pooled", 1, ["N", 3, 1, 1]),)}, r"pooled: tensor\(float\)"),
    "integers": (
        {"nodes": [*MEAN, ("Shape", ["logits"], ["shape"], "")], "outputs": (("shape", INT64, [2]),)},
        r"shape: tensor\(int64\)",
    ),
    "an unknown operator": ({"nodes": [("Evil", ["images"], ["logits"], "other")]}, "is no ONNX file .*Evil"),
    "no object": ({"metadata": "5"}, "metadata of .* is damaged .Expected `object`"),
    "nested": ({"metadata": '{"name": ' + "[" * 100_000}, "metadata of .* is damaged .*recursion"),
    "a large size": (
        {"metadata": json.dumps({**SMALL, "preprocessing": {"size": 10**9, "resize": 10**9}})},
        "expected 1 ≤ size ≤ resize ≤ 8192",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_an_onnx_file_of_another_kind(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes, message = MISTAKES[case]
    write(tmp_path / "m.onnx", **{"nodes": MEAN, **changes})
    with pytest.raises(ValueError, match=message) as caught:
        load_exported(tmp_path / "m.onnx")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_an_onnx_file_that_is_not_what_it_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = onnx.numpy_helper.from_array(np.array([3, -1]), "sizes")
    write(tmp_path / "m.onnx", [("Reshape", ["images", "sizes"], ["logits"], "")], weights=[sizes])
    with pytest.raises(ValueError, match=r"gives \(3, 128\) float32 for 2 images; expected \(N, K\) float32"):
        load_exported(tmp_path / "m.onnx")(torch.zeros(2, 3, 8, 8))
    sizes = onnx.numpy_helper.from_array(np.array([7, -1]), "sizes")
    write(tmp_path / "m.onnx", [("Reshape", ["images", "sizes"], ["logits"], "")], weights=[sizes])
    with pytest.raises(ValueError, match=r"m\.onnx does not run on \(3, 3, 8, 8\): "):
        load_exported(tmp_path / "m.onnx")(torch.zeros(3, 3, 8, 8))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("location", ["secret.bin", "../secret.bin", "/etc/hostname"])
def test_an_onnx_file_reads_no_other(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "secret.bin").write_bytes(np.full(3, 7, np.float32).tobytes())
    weight = onnx.numpy_helper.from_array(np.zeros(3, np.float32), "weight")
    onnx.external_data_helper.set_external_data(weight, location, offset=0, length=12)
    weight.ClearField("raw_data")
    nodes = [MEAN[0], ("Flatten", ["pooled"], ["means"], ""), ("Add", ["means", "weight"], ["logits"], "")]
    write(folder / "m.onnx", nodes, weights=[weight])
    with pytest.raises(ValueError, match=r"m\.onnx is no ONNX file that onnxruntime can run"):
        load_exported(folder / "m.onnx")


def test_a_damaged_executorch_file_never_reaches_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("executorch.runtime", reason="needs the extra 'export'")
    path, image, rng = tmp_path / "model.pte", torch.randn(1, 3, 32, 32), random.Random(0)
    export(ds.create_model("vanilla_cnn", "pooling"), path, Preprocessing(size=32, resize=36))
    content, expected = path.read_bytes(), load_exported(path)(image)
    bare = tmp_path / "bare.pte"
    bare.write_bytes(content[:-49])
    for source in (path, path.read_bytes(), bare, bare.read_bytes()):  # the runtime skips the checksum at the end
        program = runtime.Runtime.get().load_program(source)
        assert torch.equal(program.load_method("forward").execute([image])[0], expected)
    with pytest.raises(ValueError, match=r"bare\.pte has no checksum at its end.*export it again"):
        load_exported(bare)
    reached: list[object] = []
    monkeypatch.setattr(runtime.Runtime, "load_program", lambda self, *args: reached.append(args))
    for position in rng.sample(range(6, len(content)), 40):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.pte (is damaged: its|has no) checksum"):
            load_exported(path)
    for length in (0, 5, 6, 100, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.pte (is no ExecuTorch program|has no checksum)"):
            load_exported(path)
    assert reached == []


def test_a_dimension_whose_name_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write(path, MEAN, inputs=(("images", onnx.TensorProto.FLOAT, ["batch_size", 3, 8, 8]),))
    path.write_bytes(path.read_bytes().replace(b"batch_size", b"batch\xc3(ize"))
    with pytest.raises(
        ValueError, match=r"model\.onnx is no ONNX file that onnxruntime can run: 'utf-8' codec"
    ) as caught:
        load_exported(path)
    assert type(caught.value) is ValueError
