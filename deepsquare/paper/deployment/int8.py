"""Accuracy of the proxies' networks in each export runtime, in float32 and int8, with and without squares.

The networks are those that ``deepsquare reproduce proxy`` trained, on class folders. The ranges of int8 come from
training images; the accuracy is that on all validation images.
"""

import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepsquare.checkpoint import load, read_header
from deepsquare.data.folders import FolderSource, open_source
from deepsquare.export import export, load_exported
from deepsquare.export.base import Runtime
from deepsquare.export.images import CALIBRATION_IMAGES, PARITY_IMAGES, load_images, sample_files
from deepsquare.export.runtimes import RUNTIMES
from deepsquare.paper.options import OUT, ImageFolders, OutputFolders, Rows
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import Row, Store, run_key

BATCH_SIZE = 100


class TrainedNetwork(NamedTuple):
    """A network that the grid of proxies trained."""

    file: Path
    label: str
    seed: int
    preprocessing: Preprocessing


def run_int8(*, data: ImageFolders, rows: Rows = (), output: OutputFolders = OUT) -> None:
    """Quantize the networks that proxy trained, and measure their accuracy in every runtime.

    Args:
        rows: Only these networks, by the names of their rows.
    """
    networks = _trained_networks(output.results / ".runs", rows)
    store = Store(output.results / "deploy.jsonl")
    done = {row.key for row in store.rows()}
    val = open_source(data, "val")
    if not isinstance(val, FolderSource):
        raise ValueError(f"{data} has shards; give one with class folders")
    val_files = [Path(val.name(index)) for index in range(len(val))]
    train_files = sample_files(data / "train", CALIBRATION_IMAGES)
    for network, runtime, precision in product(networks, RUNTIMES.values(), ("float32", "int8")):
        calibration_files = train_files if precision == "int8" else []
        recipe = {
            "runtime": runtime.name, "precision": precision, "calibration": len(calibration_files),
            "images": len(val_files), "size": network.preprocessing.size,
        }  # fmt: skip
        if run_key("int8", network.label, network.seed, recipe) in done:
            continue
        start = time.perf_counter()
        images, calibration = (load_images(files, network.preprocessing) for files in (val_files, calibration_files))
        title = f"{network.label}, seed {network.seed}, {runtime.name}, {precision}"
        try:
            metrics = _measure(network, runtime, images, val.labels, calibration if len(calibration) else None)
        except ValueError as error:  # for example, the network has diverged
            print(f"{title}: left out: {error}", flush=True)
            continue
        seconds = round(time.perf_counter() - start, 1)
        store.append(Row("int8", network.label, network.seed, recipe, metrics, seconds))
        print(f"{title}: {metrics['accuracy']:.2%}", flush=True)


def _trained_networks(folder: Path, rows: Sequence[str]) -> list[TrainedNetwork]:
    """The networks in a folder whose header names their run, all or those of ``rows``."""
    networks = []
    for file in sorted(folder.glob("*.safetensors")):
        header = read_header(file)
        if header.run and header.preprocessing:
            label = f"{header.run.row}-continued" if header.run.init_from else header.run.row
            networks.append(TrainedNetwork(file, label, header.run.seed, header.preprocessing))
    missing = set(rows) - {network.label for network in networks}
    if missing or not networks:
        which = f" of {', '.join(sorted(missing))}" if missing else ""
        raise FileNotFoundError(
            f"{folder} holds no network{which}; first run deepsquare reproduce proxy, with a new folder as --results "
            "where rows came from another machine"
        )
    return [network for network in networks if not rows or network.label in rows]


def _measure(
    network: TrainedNetwork, runtime: Runtime, images: Tensor, labels: Tensor, calibration: Tensor | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path, parity_images = Path(folder) / f"model{runtime.suffix}", images[:: max(1, len(images) // PARITY_IMAGES)]
        model = load(network.file)
        exported = export(model, path, network.preprocessing, images=parity_images, calibration=calibration)
        runtime_model = load_exported(path)
        logits = torch.cat([runtime_model(batch) for batch in torch.split(images, BATCH_SIZE)])
    finite = logits.isfinite().all(1)
    accuracy = float(((logits.argmax(1) == labels) & finite).float().mean())
    return {"accuracy": accuracy, "overflows": int((~finite).sum()), **exported.metrics()}
