"""Proof that exported networks say what their models say: every technique, in every runtime.

The weights are drawn, not trained, with batch normalisation set to the statistics of the input; images are noise.
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

from deepsquare._files import ensure_writable
from deepsquare.checkpoint import Preprocessing
from deepsquare.export import ExportError, export
from deepsquare.export.runtime import SUFFIXES, Runtime, require
from deepsquare.models import create_model
from deepsquare.results import Row, Store, key

MODELS = (
    "resnet18", "resnet50", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "timm/efficientnet_lite0", "timm/mobilenetv3_small_100",
)  # fmt: skip
SPECS = ("", "pooling", "softmin", "excitation", "encoding", "pooling+excitation")
BASELINE_SPECS = ("se", "ge_theta", "gsop", "isqrt_cov")
BASELINES_MODEL = "resnet18"
PARITY_IMAGES, SIDE = 8, 224


def run_parity(*, rows: Sequence[str] = (), results: Path = Path("out/results")) -> None:
    """Export each model with each spec for each runtime, and add a row to ``deploy.jsonl`` for each."""
    if wrong := set(rows) - {*MODELS}:
        raise ValueError(f"rows are models here; {', '.join(sorted(wrong))} is none of {', '.join(MODELS)}")
    for module in ("onnx", "onnxscript", "onnxruntime", "executorch.runtime"):
        require(module)
    ensure_writable(results)
    store = Store(results / "deploy.jsonl")
    done = {row.key for row in store.rows()}
    cases = [*product(MODELS, SPECS), *product((BASELINES_MODEL,), BASELINE_SPECS)]
    for (name, spec), runtime in product([case for case in cases if not rows or case[0] in rows], SUFFIXES):
        described = {"runtime": runtime, "precision": "float32", "images": PARITY_IMAGES, "size": SIDE}
        label = f"{name}+{spec}" if spec else name
        if key("parity", label, 0, described) in done:
            continue
        start = time.perf_counter()
        metrics = _metrics(name, spec, runtime)
        store.append(Row("parity", label, 0, described, metrics, round(time.perf_counter() - start, 1)))
        told = (
            metrics["refused"]
            or f"differs by {metrics['max_rel_error']:.1e}, agreement {metrics['top1_agreement']:.0%}"
        )
        print(f"{label}, {runtime}: {told}", flush=True)


def _metrics(name: str, spec: str, runtime: Runtime) -> dict[str, object]:
    images = torch.randn(PARITY_IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    model = random_init_model(name, spec, images)
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = export(model, Path(folder) / f"model{SUFFIXES[runtime]}", Preprocessing((), SIDE), images=images)
        except ExportError as error:
            return {"refused": str(error)}
    return {
        "refused": None, "max_rel_error": made.max_rel_error, "fp32_error": made.fp32_error, "top1_agreement": made.top1_agreement,
        "bytes": made.size, "undelegated_ops": made.undelegated_ops, "undelegated_muls": made.undelegated_muls,
    }  # fmt: skip


def random_init_model(name: str, spec: str, images: Tensor) -> nn.Module:
    """A model for the test phase with weights as drawn, batch normalisation having the statistics of ``images``."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*γ = 0")
        model = create_model(name, spec)
    return recalibrate_batchnorm(model, images)


def recalibrate_batchnorm(model: nn.Module, images: Tensor) -> nn.Module:
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
