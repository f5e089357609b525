"""Parity of exported networks with their models: every technique, in every runtime.

The weights are random, with batch normalization set to the statistics of the input; images are noise. Parity does not
depend on training.
"""

import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare._files import ensure_writable
from deepsquare.batchnorm import recalibrate_batchnorm
from deepsquare.export import ExportError, export
from deepsquare.export.base import Runtime
from deepsquare.export.runtimes import RUNTIMES
from deepsquare.models import create_model
from deepsquare.paper.options import OUT, OutputFolders, Rows
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import Row, Store, run_key

MODELS = (
    "resnet18", "resnet50", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "timm/efficientnet_lite0", "timm/mobilenetv3_small_100",
)  # fmt: skip
SPECS = ("", "pooling", "softmin", "excitation", "encoding", "pooling+excitation")
BASELINE_SPECS = ("se", "ge_theta", "gsop", "isqrt_cov")
BASELINES_MODEL = "resnet18"
PARITY_IMAGES, SIZE = 8, 224


def run_parity(*, rows: Rows = (), output: OutputFolders = OUT) -> None:
    """Compare exported networks with their models: every technique in every runtime.

    Args:
        rows: Only these models.
    """
    if unknown := set(rows) - {*MODELS}:
        raise ValueError(f"rows are models here; {', '.join(sorted(unknown))} is none of {', '.join(MODELS)}")
    for runtime in RUNTIMES.values():
        runtime.require_modules()
    ensure_writable(output.results)
    store = Store(output.results / "deploy.jsonl")
    done = {row.key for row in store.rows()}
    cases = [*product(MODELS, SPECS), *product((BASELINES_MODEL,), BASELINE_SPECS)]
    cases = [(model, spec) for model, spec in cases if not rows or model in rows]
    for (name, spec), runtime in product(cases, RUNTIMES.values()):
        recipe = {"runtime": runtime.name, "precision": "float32", "images": PARITY_IMAGES, "size": SIZE}
        label = f"{name}+{spec}" if spec else name
        if run_key("parity", label, 0, recipe) in done:
            continue
        start = time.perf_counter()
        metrics = _measure(name, spec, runtime)
        store.append(Row("parity", label, 0, recipe, metrics, round(time.perf_counter() - start, 1)))
        outcome = metrics["refused"] or (
            f"relative error {metrics['max_rel_error']:.1e}, top-1 agreement {metrics['top1_agreement']:.0%}"
        )
        print(f"{label}, {runtime.name}: {outcome}", flush=True)


def _measure(name: str, spec: str, runtime: Runtime) -> dict[str, Any]:
    images = torch.randn(PARITY_IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    model = random_init_model(name, spec, images)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{runtime.suffix}"
        try:
            exported = export(model, path, Preprocessing(size=SIZE), images=images)
        except ExportError as error:
            return {"refused": str(error)}
    return {"refused": None, **exported.metrics()}


def random_init_model(name: str, spec: str, images: Tensor) -> nn.Module:
    """A model with random weights in eval mode, its batch normalization with the statistics of ``images``."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*γ = 0")
        model = create_model(name, spec)
    return recalibrate_batchnorm(model, [images]).eval()
