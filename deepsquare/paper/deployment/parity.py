"""Proof that exported networks say what their models say: every technique, in every runtime.

The weights are drawn, not trained, with batch normalisation set to the statistics of the input; pictures are noise.
Nothing here depends on what a network has learnt.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepsquare._files import make_writable
from deepsquare.checkpoint import Pictures
from deepsquare.export import ExportError, export
from deepsquare.export.runtime import ENDINGS, Runtime, needed
from deepsquare.models import create_model
from deepsquare.results import Row, Store, key

MODELS = (
    "resnet18", "resnet50", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "timm/efficientnet_lite0", "timm/mobilenetv3_small_100",
)  # fmt: skip
SPECS = ("", "pooling", "softmin", "excitation", "encoding", "pooling+excitation")
PEERS = ("se", "ge_theta", "gsop", "isqrt_cov")
PEERS_OF = "resnet18"
COMPARED, SIDE = 8, 224


def run_parity(*, rows: Sequence[str] = (), results: Path = Path("out/results")) -> None:
    """Export each model with each spec for each runtime, and add a row to ``deploy.jsonl`` for each."""
    if wrong := set(rows) - {*MODELS}:
        raise ValueError(f"rows are models here; {', '.join(sorted(wrong))} is none of {', '.join(MODELS)}")
    for module in ("onnx", "onnxscript", "onnxruntime", "executorch.runtime"):
        needed(module)
    make_writable(results)
    store = Store(results / "deploy.jsonl")
    done = {row.key for row in store.rows()}
    cases = [*product(MODELS, SPECS), *product((PEERS_OF,), PEERS)]
    for (name, spec), runtime in product([case for case in cases if not rows or case[0] in rows], ENDINGS):
        described = {"runtime": runtime, "precision": "float32", "pictures": COMPARED, "size": SIDE}
        label = f"{name}+{spec}" if spec else name
        if key("parity", label, 0, described) in done:
            continue
        start = time.perf_counter()
        metrics = _metrics(name, spec, runtime)
        store.append(Row("parity", label, 0, described, metrics, round(time.perf_counter() - start, 1)))
        told = metrics["refused"] or f"differs by {metrics['difference']:.1e}, agreement {metrics['agreement']:.0%}"
        print(f"{label}, {runtime}: {told}", flush=True)


def _metrics(name: str, spec: str, runtime: Runtime) -> dict[str, object]:
    images = torch.randn(COMPARED, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    model = untrained(name, spec, images)
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = export(model, Path(folder) / f"model{ENDINGS[runtime]}", Pictures((), SIDE), images=images)
        except ExportError as error:
            return {"refused": str(error)}
    return {
        "refused": None, "difference": made.difference, "rounding": made.rounding, "agreement": made.agreement,
        "bytes": made.size, "outside": made.outside, "squares_outside": made.squares_outside,
    }  # fmt: skip


def untrained(name: str, spec: str, images: Tensor) -> nn.Module:
    """A model for the test phase with weights as drawn, batch normalisation having the statistics of ``images``."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*γ = 0")
        model = create_model(name, spec)
    return calibrated(model, images)


def calibrated(model: nn.Module, images: Tensor) -> nn.Module:
    """``model`` for the test phase, its batch normalisation having the statistics of ``images``."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        model.train()(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()
