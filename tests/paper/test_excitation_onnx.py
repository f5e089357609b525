"""The other forms of Square-Excitation in ONNX: each computes the same function, and its row has all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.exported import IMAGES, trained

from deepsquare.export import export, load_exported
from deepsquare.paper.bench import deployment
from deepsquare.paper.bench import excitation_onnx as bench
from deepsquare.results import Store

pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A file with four excitations with α of their own, an image, and the logits of the model in float64."""
    model, images = trained("timm/test_resnet", "excitation")
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("alpha"):
                parameter.fill_(0.5 + 0.01 * (i % 7))
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    export(model, path, IMAGES, images=images)
    with torch.no_grad():
        return path, images[:1], model.double()(images[:1].double())


@pytest.mark.parametrize("form", bench.FORMS)
def test_every_form_is_the_same_function(form: str, exported: Any, tmp_path: Path) -> None:
    import onnx

    path, image, expected = exported
    target = tmp_path / "model.onnx"
    assert bench.rewrite(path, target, bench.FORMS[form]) == 4
    before, after = ([node.op_type for node in onnx.load(file).graph.node] for file in (path, target))
    assert sorted(before) != sorted(after)
    error = (load_exported(target)(image) - expected).abs().max()
    assert float(error) <= 1e-4 * float(expected.abs().max())


def test_a_form_with_another_constant_differs(exported: Any, tmp_path: Path) -> None:
    path, image, expected = exported

    def doubled(block: bench.Block) -> str:
        block.offset = 2 * block.offset
        return bench.FORMS["maps"](block)

    bench.rewrite(path, tmp_path / "model.onnx", doubled)
    error = (load_exported(tmp_path / "model.onnx")(image) - expected).abs().max()
    assert float(error) > 1e-3 * float(expected.abs().max())


def test_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "SIZE", 64)
    monkeypatch.setattr(
        deployment,
        "measure_latency",
        lambda paths, threads, rounds: [[threads + i] * 6 for i in range(len(paths))],
    )
    bench.run(["timm/test_resnet"], ["maps", "softsign"], rounds=6, results=tmp_path)
    (row,) = Store(tmp_path / "bench.jsonl").rows()
    assert row.row == "excitation_onnx/timm/test_resnet"
    assert list(row.metrics) == ["", "exported", "maps", "softsign", "again"]
    assert row.metrics["maps"]["1"] == {"seconds": [3.0, 3.0, 3.0], "ratio": [1.0, 1.0, 1.0]}  # base: 1 and 5, mean 3


def test_an_unknown_form(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the form is 'fast'; expected one of maps, global_average"):
        bench.run(["resnet18"], ["fast"], results=tmp_path)
