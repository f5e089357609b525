"""Accuracy of the proxies' networks in their runtimes, float32 and int8: what eight bits cost, with a square or not.

The networks are those that ``deepsquare reproduce proxy`` trained, on class folders. Ranges come from training
pictures; the accuracy is of all validation pictures.
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

from deepsquare.checkpoint import Pictures, load, read_pictures
from deepsquare.data.folders import FolderSource
from deepsquare.data.splits import open_source
from deepsquare.export import export, open_program
from deepsquare.export.images import CALIBRATING, COMPARED, read_pictures_of, sample
from deepsquare.export.runtime import ENDINGS
from deepsquare.results import Row, Store, key

AT_ONCE = 100  # pictures
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
    files, learnt = [Path(val.name(index)) for index in range(len(val))], sample(data / "train", CALIBRATING)
    for file in trained:
        name, seed = _name(file)
        if rows and name not in rows:
            continue
        pictures = read_pictures(file)
        if pictures is None:
            print(f"{file.name} does not say what it was shown, and is left out")
            continue
        for runtime, precision in product(ENDINGS, ("float32", "int8")):
            described = {
                "runtime": runtime, "precision": precision, "calibration": len(learnt) if precision == "int8" else 0,
                "pictures": len(files), "size": pictures.size,
            }  # fmt: skip
            if key("int8", name, seed, described) in done:
                continue
            start = time.perf_counter()
            shown, calibration = (read_pictures_of(some, pictures) for some in (files, learnt))
            ranges = calibration if precision == "int8" else None
            try:
                metrics = _measure(load(file), pictures, ENDINGS[runtime], shown, val.labels, ranges)
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
    pictures: Pictures,
    ending: str,
    shown: Tensor,
    labels: Tensor,
    calibration: Tensor | None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / f"model{ending}"
        made = export(model, place, pictures, images=shown[:: max(1, len(shown) // COMPARED)], calibration=calibration)
        program = open_program(place)
        said = torch.cat([program(part) for part in torch.split(shown, AT_ONCE)])
    finite = said.isfinite().all(1)
    return {
        "accuracy": float(((said.argmax(1) == labels) & finite).float().mean()),
        "overflows": int((~finite).sum()),
        "difference": made.difference,
        "agreement": made.agreement,
        "bytes": made.size,
        "outside": made.outside,
    }
