"""The cost of a technique in each export runtime: latency, file size and memory, one image at a time.

A fresh process runs all candidates of a backbone in each round, in random order. Ratios are taken within a round, so
that noise of the machine affects both sides. The base network is measured twice, as two copies of one program differ
by their place in memory: candidates are compared with the mean of both, and the copies' own ratios show the error of
the measurement.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from deepsquare.cost import cost_of
from deepsquare.export import Export, export, load_exported
from deepsquare.export.base import Runtime, require
from deepsquare.export.runtimes import RUNTIMES, runtime_for
from deepsquare.paper.bench import _common
from deepsquare.paper.deployment.parity import random_init_model
from deepsquare.paper.statistics import bounds_label, median, median_ratio
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import round_for_json

BACKBONES = ("shufflenet_v2_x1_0", "resnet18")
SPECS = ("pooling", "softmin", "excitation", "encoding", "pooling+excitation", "se")
BASE, BASE_COPY = "", "again"  # keys of the base network in a row's metrics
PRECISIONS, THREADS = ("float32", "int8"), (1, 2)
SIZE, NUM_IMAGES = 224, 16  # of the input, and for calibration
WARMUP_ITERATIONS, MEMORY_ITERATIONS = 5, 5


def run(
    backbones: _common.Backbones = BACKBONES,
    specs: _common.Specs = SPECS,
    *,
    rounds: _common.Rounds = 300,
    results: _common.Results = _common.RESULTS,
) -> None:
    """Every technique in onnxruntime and ExecuTorch, float32 and int8, against its plain network."""
    _common.check(results, rounds=rounds)
    for backbone, spec in product(backbones, specs):
        cost_of(backbone, spec)  # fail early on a spec that does not fit
    for runtime in RUNTIMES.values():
        runtime.require_modules()
    cases = list(product(backbones, RUNTIMES.values(), PRECISIONS))
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(cases) * (1 + len(specs) + len(THREADS)))
        for backbone, runtime, precision in cases:
            start, title = time.perf_counter(), f"{backbone}, {runtime.name}, {precision}"

            def report(step: str, title: str = title) -> None:
                progress.update(task, advance=1, description=f"{title}: {step}")

            metrics = _measure(backbone, runtime, precision, specs, rounds, report)
            recipe = {"rounds": rounds, "input": SIZE, "batch_size": 1}
            _common.append_row(results, f"deploy/{backbone}/{runtime.name}/{precision}", recipe, metrics, start)
            progress.console.print(_table(title, metrics, rounds))


def _measure(
    backbone: str, runtime: Runtime, precision: str, specs: Sequence[str], rounds: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """By spec: file size, memory, undelegated operations, and latency for each number of threads."""
    images = torch.randn(NUM_IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    calibration = images if precision == "int8" else None
    with tempfile.TemporaryDirectory() as folder:
        candidates: dict[str, Export] = {}
        for spec in (BASE, *specs):
            report(f"export of {spec or 'the base network'}")
            model, path = random_init_model(backbone, spec, images), Path(folder) / f"{spec or 'base'}{runtime.suffix}"
            candidates[spec] = export(model, path, Preprocessing(size=SIZE), images=images[:2], calibration=calibration)
        metrics: dict[str, Any] = {
            spec: {
                "bytes": exported.size,
                "memory": _in_subprocess("memory", [exported.path], 1, MEMORY_ITERATIONS),
                "undelegated_ops": exported.undelegated_ops,
            }
            for spec, exported in candidates.items()
        }
        candidates[BASE_COPY], metrics[BASE_COPY] = candidates[BASE], dict(metrics[BASE])
        for threads in THREADS:
            report(f"latency with {threads} thread{'s' if threads > 1 else ''}")
            paths = [exported.path for exported in candidates.values()]
            seconds = dict(zip(candidates, measure_latency(paths, threads, rounds), strict=True))
            base = [sum(pair) / 2 for pair in zip(seconds[BASE], seconds[BASE_COPY], strict=True)]
            for spec, values in seconds.items():
                medians = {"seconds": median(values), "ratio": median_ratio(values, base)}
                metrics[spec][str(threads)] = {name: round_for_json(value, 5) for name, value in medians.items()}
    return metrics


def _table(title: str, metrics: Mapping[str, Any], rounds: int) -> Table:
    table = _common.make_table(
        f"{title}, batch size 1",
        f"median over {rounds} rounds ({bounds_label(rounds)})",
        ("spec", "1 thread, ms", "added, %", "2 threads, ms", "added, %", "file, MB", "memory, MB"),
    )
    for spec, measured in metrics.items():
        cells = [{BASE: "base", BASE_COPY: "base, copy"}.get(spec, spec)]
        for threads in map(str, THREADS):
            value, low, high = (100 * ratio - 100 for ratio in measured[threads]["ratio"])
            cells += [f"{1e3 * measured[threads]['seconds'][0]:.2f}", f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"]
        memory = measured["memory"]
        table.add_row(*cells, f"{measured['bytes'] / 1e6:.2f}", f"{memory / 1e6:.1f}" if memory else "–")
    return table


def measure_latency(paths: Sequence[Path], threads: int, rounds: int) -> list[list[float]]:
    """Seconds of each round, for each exported file, in a fresh process."""
    seconds: list[list[float]] = _in_subprocess("latency", paths, threads, rounds)
    return seconds


def _in_subprocess(measurement: str, paths: Sequence[Path], threads: int, iterations: int) -> Any:
    """``latency`` or ``memory`` of exported files, measured in a fresh process."""
    arguments = [measurement, str(threads), str(iterations), *map(str, paths)]
    command = [sys.executable, "-m", "deepsquare.paper.bench.deployment", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        names = ", ".join(path.name for path in paths)
        raise OSError(f"measuring the {measurement} of {names} failed:\n{completed.stderr.strip()}")
    return json.loads(completed.stdout)


def _latency(paths: Sequence[Path], rounds: int) -> list[list[float]]:
    """Seconds of each round, for each file."""
    torch.set_num_threads(1)
    image, rng = _image(), random.Random(0)
    calls = [partial(load_exported(path), image) for path in paths]
    for call in calls:
        _common.time_call(call, WARMUP_ITERATIONS)
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for index in rng.sample(range(len(calls)), len(calls)):
            seconds[index].append(_common.time_call(calls[index]))
    return seconds


def _memory(paths: Sequence[Path], iterations: int) -> int | None:
    """Peak memory that loading and running a file adds to the process, in bytes; None where there is no /proc."""
    (path,) = paths
    image, clear_refs = _image(), Path("/proc/self/clear_refs")
    if not clear_refs.exists():
        return None
    require(runtime_for(path).modules[0])
    clear_refs.write_text("5")  # resets the peak
    before = _status("VmRSS")
    model = load_exported(path)
    for _ in range(iterations):
        model(image)
    return _status("VmHWM") - before


def _image() -> torch.Tensor:
    return torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    measurement, threads, iterations, *files = sys.argv[1:]
    paths = [Path(file) for file in files]
    runtime_for(paths[0]).set_num_threads(int(threads))
    print(json.dumps({"latency": _latency, "memory": _memory}[measurement](paths, int(iterations))))
