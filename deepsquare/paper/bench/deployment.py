"""What a technique costs where it is deployed: latency, file and memory in onnxruntime and ExecuTorch.

One image at a time. The networks of a backbone take turns go by go, in an order that is drawn anew each round, in a
process of its own that has no other work; a ratio is taken within a round, so that a slow moment of the machine meets
both. The plain network is there twice, as copies of one program differ by where they lie in memory: the others are
compared with the mean of both, and how far these are from it is the error of the measurement.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from deepsquare._files import ensure_writable
from deepsquare.checkpoint import Preprocessing
from deepsquare.cost import cost_of
from deepsquare.export import Export, export, load_exported
from deepsquare.export.runtime import SUFFIXES, Runtime, require, runtime_of, share_threads
from deepsquare.paper.deployment.parity import random_init_model
from deepsquare.paper.statistics import Median, median, median_ratio
from deepsquare.results import Row, Store

BACKBONES = ("shufflenet_v2_x1_0", "resnet18")
SPECS = ("pooling", "softmin", "excitation", "encoding", "pooling+excitation", "se")
PLAIN, AGAIN = "", "again"
THREADS = (1, 2)
SIDE, CALIBRATING = 224, 16
WARM, ITERATIONS = 5, 5  # goes before the times count, and before the memory is read


def run(
    backbones: Sequence[str] = BACKBONES,
    specs: Sequence[str] = SPECS,
    *,
    rounds: int = 300,
    results: Path = Path("out/results"),
) -> None:
    """Export, time and weigh each spec on each backbone; a row for each runtime and precision to ``bench.jsonl``."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1")
    ensure_writable(results)
    for backbone in backbones:
        for spec in specs:
            cost_of(backbone, spec)  # a word that does not suit is told now
    for module in ("onnx", "onnxscript", "onnxruntime", "executorch.runtime"):
        require(module)
    ways = list(product(backbones, SUFFIXES, ("float32", "int8")))
    store = Store(results / "bench.jsonl")
    with Progress(transient=True) as progress:
        bar = progress.add_task("", total=len(ways) * (1 + len(specs) + len(THREADS)))
        for backbone, runtime, precision in ways:
            start = time.perf_counter()

            def told(what: str, way: str = f"{backbone}, {runtime}, {precision}") -> None:
                progress.update(bar, advance=1, description=f"{way}: {what}")

            metrics = _measure(backbone, runtime, precision, specs, rounds, told)
            described = {"rounds": rounds, "input": SIDE, "batch_size": 1}
            name, seconds = f"deploy/{backbone}/{runtime}/{precision}", round(time.perf_counter() - start, 1)
            store.append(Row("bench", name, int(time.time()), described, metrics, seconds))
            progress.console.print(_table(f"{backbone}, {runtime}, {precision}", metrics, rounds))


def _measure(
    backbone: str, runtime: Runtime, precision: str, specs: Sequence[str], rounds: int, told: Callable[[str], None]
) -> dict[str, Any]:
    images = torch.randn(CALIBRATING, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    calibration = images if precision == "int8" else None
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Export] = {}
        for spec in (PLAIN, *specs):
            told(f"export of {spec or 'the plain network'}")
            model, path = (
                random_init_model(backbone, spec, images),
                Path(folder) / f"{spec or 'plain'}{SUFFIXES[runtime]}",
            )
            made[spec] = export(model, path, Preprocessing((), SIDE), images=images[:2], calibration=calibration)
        made[AGAIN] = made[PLAIN]
        found: dict[str, Any] = {
            spec: {
                "bytes": one.size,
                "memory": _apart("weigh", [one.path], 1, ITERATIONS),
                "undelegated_ops": one.undelegated_ops,
            }
            for spec, one in made.items()
        }
        for threads in THREADS:
            told(f"time with {threads} thread{'s' if threads > 1 else ''}")
            seconds = dict(zip(made, _apart("time", [one.path for one in made.values()], threads, rounds), strict=True))
            base = [(one + other) / 2 for one, other in zip(seconds[PLAIN], seconds[AGAIN], strict=True)]
            for spec, own in seconds.items():
                found[spec][str(threads)] = _compared(own, base)
    return found


def _compared(own: Sequence[float], base: Sequence[float]) -> dict[str, list[float]]:
    return {"seconds": _rounded(median(own)), "ratio": _rounded(median_ratio(own, base))}


def _rounded(found: Median) -> list[float]:
    return [float(f"{value:.5g}") for value in (found.value, found.low, found.high)]


def _table(title: str, metrics: Mapping[str, Any], rounds: int) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{title}, one image at a time",
        caption=f"median over {rounds} rounds, and {'its 95% interval' if rounds > 8 else 'the range'}",
    )
    table.add_column("spec")
    for name in ("1 thread, ms", "more, %", "2 threads, ms", "more, %", "file, MB", "memory, MB"):
        table.add_column(name, justify="right")
    for spec, found in metrics.items():
        cells = [{PLAIN: "plain", AGAIN: "plain, again"}.get(spec, spec)]
        for threads in map(str, THREADS):
            value, low, high = (100 * ratio - 100 for ratio in found[threads]["ratio"])
            cells += [f"{1e3 * found[threads]['seconds'][0]:.2f}", f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"]
        memory = found["memory"]
        table.add_row(*cells, f"{found['bytes'] / 1e6:.2f}", f"{memory / 1e6:.1f}" if memory else "–")
    return table


# ---- in a process of its own ----


def _apart(work: str, files: Sequence[Path], threads: int, iterations: int) -> Any:
    """``time`` or ``weigh`` the programs in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "deepsquare.paper.bench.deployment",
        work,
        str(threads),
        str(iterations),
        *map(str, files),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{work} of {', '.join(path.name for path in files)} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def _time(files: Sequence[Path], threads: int, rounds: int) -> list[list[float]]:
    """Seconds of each go of each program."""
    torch.set_num_threads(1)
    images = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    share_threads(runtime_of(files[0]), threads)
    programs = [load_exported(path) for path in files]
    for _ in range(WARM):
        for program in programs:
            program(images)
    seconds: list[list[float]] = [[] for _ in programs]
    order, rng = list(range(len(programs))), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for place in order:
            start = time.perf_counter()
            programs[place](images)
            seconds[place].append(time.perf_counter() - start)
    return seconds


def _weigh(files: Sequence[Path], threads: int, iterations: int) -> int | None:
    """The most memory that a program adds to the process, in bytes; Linux says."""
    (path,) = files
    images = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    share_threads(runtime_of(path), threads)
    require("executorch.runtime" if path.suffix == ".pte" else "onnxruntime")
    clear.write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    program = load_exported(path)
    for _ in range(iterations):
        program(images)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    work, threads, iterations, *paths = sys.argv[1:]
    done = {"time": _time, "weigh": _weigh}[work]([Path(path) for path in paths], int(threads), int(iterations))
    print(json.dumps(done))
