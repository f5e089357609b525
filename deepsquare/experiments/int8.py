"""Accuracy of the proxies' networks in their runtimes, float32 and int8: what eight bits cost, with a square or not.

The networks are those that ``deepsquare reproduce proxy`` trained. Ranges come from training pictures; nothing is
chosen by the accuracy, which is of all validation pictures.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from deepsquare.checkpoint import Pictures, load, read_pictures
from deepsquare.data.pictures.folders import FolderSource
from deepsquare.data.pictures.source import open_source
from deepsquare.deploy import export, open_program
from deepsquare.deploy.input import read_pictures_of, sample
from deepsquare.deploy.program import ENDINGS
from deepsquare.results import Row, Store

CALIBRATING, COMPARED, AT_ONCE = 512, 64, 100


def run_int8(data: Path, *, rows: Sequence[str] = (), results: Path = Path("out/results")) -> None:
    """Export every trained proxy four ways, evaluate each and add the rows to ``deploy.jsonl``."""
    trained = sorted((results / ".runs").glob("*-seed*.safetensors"))
    chosen = [file for file in trained if not rows or file.stem.rpartition("-seed")[0] in rows]
    if not chosen:
        given = f" of {', '.join(rows)}" if rows else ""
        raise FileNotFoundError(f"{results / '.runs'} holds no network{given}; first deepsquare reproduce proxy")
    store = Store(results / "deploy.jsonl")
    done = {(row.row, row.seed, row.recipe["runtime"], row.recipe["precision"]) for row in store.rows()}
    val = open_source(data, "val")
    if not isinstance(val, FolderSource):
        raise ValueError(f"{data} has shards; give one with class folders")
    files = [Path(val.name(index)) for index in range(len(val))]
    for file in chosen:
        name, _, seed = file.stem.rpartition("-seed")
        pictures = read_pictures(file)
        if pictures is None:
            print(f"{file.name} does not say what it was shown, and is left out")
            continue
        ways = [(kind, precision) for kind in ENDINGS.values() for precision in ("float32", "int8")]
        todo = [way for way in ways if (name, int(seed), *way) not in done]
        if not todo:
            continue
        shown, calibration = (read_pictures_of(some, pictures) for some in (files, sample(data / "train", CALIBRATING)))
        for runtime, precision in todo:
            row = _measure(file, pictures, runtime, precision, shown, val.labels, calibration)
            store.append(row)
            print(f"{name}, seed {seed}, {runtime}, {precision}: {row.metrics['accuracy']:.2%}")


def _measure(
    file: Path,
    pictures: Pictures,
    runtime: str,
    precision: str,
    shown: torch.Tensor,
    labels: torch.Tensor,
    calibration: torch.Tensor,
) -> Row:
    start = time.perf_counter()
    name, _, seed = file.stem.rpartition("-seed")
    ending = next(ending for ending, kind in ENDINGS.items() if kind == runtime)
    ranges = calibration if precision == "int8" else None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / f"model{ending}"
        made = export(load(file), place, pictures, images=calibration[:COMPARED], calibration=ranges)
        program = open_program(place)
        said = torch.cat([program(part) for part in torch.split(shown, AT_ONCE)])
    finite = said.isfinite().all(1)
    metrics = {
        "accuracy": float(((said.argmax(1) == labels) & finite).float().mean()),
        "overflows": int((~finite).sum()),
        "difference": made.difference,
        "agreement": made.agreement,
        "bytes": made.size,
        "outside": made.outside,
    }
    described = {
        "runtime": runtime,
        "precision": precision,
        "calibration": len(calibration) if ranges is not None else 0,
    }
    described |= {"pictures": len(labels), "size": pictures.size}
    return Row("int8", name, int(seed), described, metrics, round(time.perf_counter() - start, 1))
