"""Accuracy of the proxies' networks in their runtimes, float32 and int8: what eight bits cost, with a square or not.

The networks are those that ``deepsquare reproduce proxy`` trained, on class folders. Ranges come from training
images; the accuracy is of all validation images.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.checkpoint import Preprocessing, load, read_preprocessing
from deepsquare.data.folders import FolderSource
from deepsquare.data.splits import open_source
from deepsquare.export import export, load_exported
from deepsquare.export.images import CALIBRATION_IMAGES, PARITY_IMAGES, load_images, sample_files
from deepsquare.export.runtime import SUFFIXES
from deepsquare.results import Row, Store, key

BATCH_SIZE = 100  # images
NAME = re.compile(r"([^.].*)-seed(\d+)")  # of a trained network's file


def run_int8(data: Path, *, rows: Sequence[str] = (), results: Path = Path("out/results")) -> None:
    """Export every trained proxy four ways, evaluate each and add the rows to ``deploy.jsonl``."""
    trained = sorted(file for file in (results / ".runs").glob("*.safetensors") if NAME.fullmatch(file.stem))
    missing = set(rows) - {_name(file)[0] for file in trained}
    if missing or not trained:
        given = f" of {', '.join(sorted(missing))}" if missing else ""
        raise FileNotFoundError(
            f"{results / '.runs'} holds no network{given}; first deepsquare reproduce proxy, with a new folder as "
            "--results where rows came from another machine"
        )
    store = Store(results / "deploy.jsonl")
    done = {row.key for row in store.rows()}
    val = open_source(data, "val")
    if not isinstance(val, FolderSource):
        raise ValueError(f"{data} has shards; give one with class folders")
    files, learnt = (
        [Path(val.name(index)) for index in range(len(val))],
        sample_files(data / "train", CALIBRATION_IMAGES),
    )
    for file in trained:
        name, seed = _name(file)
        if rows and name not in rows:
            continue
        preprocessing = read_preprocessing(file)
        if preprocessing is None:
            print(f"{file.name} does not say what it was shown, and is left out")
            continue
        for runtime, precision in product(SUFFIXES, ("float32", "int8")):
            described = {
                "runtime": runtime, "precision": precision, "calibration": len(learnt) if precision == "int8" else 0,
                "images": len(files), "size": preprocessing.size,
            }  # fmt: skip
            if key("int8", name, seed, described) in done:
                continue
            start = time.perf_counter()
            shown, calibration = (load_images(some, preprocessing) for some in (files, learnt))
            ranges = calibration if precision == "int8" else None
            try:
                metrics = _measure(load(file), preprocessing, SUFFIXES[runtime], shown, val.labels, ranges)
            except ValueError as error:  # of a network that diverged, for one
                print(f"{name}, seed {seed}, {runtime}, {precision}: left out: {error}", flush=True)
                continue
            seconds = round(time.perf_counter() - start, 1)
            store.append(Row("int8", name, seed, described, metrics, seconds))
            print(f"{name}, seed {seed}, {runtime}, {precision}: {metrics['accuracy']:.2%}", flush=True)


def _name(file: Path) -> tuple[str, int]:
    found = NAME.fullmatch(file.stem)
    assert found is not None
    return found[1], int(found[2])


def _measure(
    model: nn.Module,
    preprocessing: Preprocessing,
    ending: str,
    shown: Tensor,
    labels: Tensor,
    calibration: Tensor | None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / f"model{ending}"
        made = export(
            model, place, preprocessing, images=shown[:: max(1, len(shown) // PARITY_IMAGES)], calibration=calibration
        )
        program = load_exported(place)
        said = torch.cat([program(part) for part in torch.split(shown, BATCH_SIZE)])
    finite = said.isfinite().all(1)
    return {
        "accuracy": float(((said.argmax(1) == labels) & finite).float().mean()),
        "overflows": int((~finite).sum()),
        "max_rel_error": made.max_rel_error,
        "top1_agreement": made.top1_agreement,
        "bytes": made.size,
        "undelegated_ops": made.undelegated_ops,
    }
