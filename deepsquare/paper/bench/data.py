"""Images per second of each pipeline, beside torchvision's ImageFolder with a DataLoader.

All show random parts of the same images at 224 × 224, as uint8, in batches of 64, and take turns within one run, so
that a busy moment of the machine meets them alike. A turn starts its workers, reads a list of images and ends them. A
ratio is the median over the rounds of the ratio of their times. Decoding alone is libjpeg-turbo in one process, each
image in full and from memory: what no pipeline that decodes whole images can fall below on a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rich
import torch
from rich.progress import Progress
from rich.table import Table

from deepsquare import _torchvision  # noqa: F401  # before torchvision
from deepsquare._files import ensure_writable
from deepsquare._threads import cores
from deepsquare.data import Source, TrainTransform, available, batches, open_source
from deepsquare.data.folders import FolderSource
from deepsquare.data.jpeg import jpeg_size
from deepsquare.paper.statistics import Median, median, median_ratio
from deepsquare.results import Row, Store, round_for_json

BATCH_SIZE, SIZE, PLAIN_WORKERS = 64, 224, 2
PLAIN = f"ImageFolder + DataLoader, {PLAIN_WORKERS} workers"
DECODING = "decoding alone, 1 process"
Workload = Callable[[], int]  # reads its list, and says how many images that were


def _plain(source: FolderSource, images: int) -> Workload:
    """What torchvision's training script does, up to the bytes of a batch."""
    from torch.utils.data import DataLoader, Subset
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    shown = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.ToImage()])
    dataset = ImageFolder(str(source.folder), shown)
    listed = Subset(dataset, [index % len(dataset) for index in range(images)])
    loader = DataLoader(listed, BATCH_SIZE, num_workers=PLAIN_WORKERS, generator=torch.Generator())
    return lambda: sum(len(images) for images, _ in loader)


def _ours(source: Source, images: int, pipeline: str, workers: int) -> Workload:
    indices = [index % len(source) for index in range(images)]
    groups = [indices[first : first + BATCH_SIZE] for first in range(0, images, BATCH_SIZE)]
    transform = TrainTransform(SIZE)
    return lambda: sum(
        len(batch.images) for batch in batches(source, groups, transform, pipeline=pipeline, workers=workers)
    )


def _decoding(source: Source, images: int) -> Workload:
    import simplejpeg

    files = [data for data in map(source.read, range(min(images, len(source)))) if jpeg_size(data)]
    return lambda: sum(simplejpeg.decode_jpeg(data) is not None for data in files)


def candidates(source: FolderSource, images: int) -> dict[str, Workload]:
    """The plain one, and every pipeline that is installed, alone and with a worker for each core."""
    workers = cores()
    found = {PLAIN: _plain(source, images)}
    if available("fast"):
        found[DECODING] = _decoding(source, images)
    for pipeline, alone, with_workers in (
        ("torchvision", "in this process", f"{workers} workers"),
        ("fast", "in this process", f"{workers} workers"),
        ("dali", "1 thread", f"{workers} threads"),
    ):
        if available(pipeline):
            found[f"{pipeline}, {alone}"] = _ours(source, images, pipeline, 0)
            found[f"{pipeline}, {with_workers}"] = _ours(source, images, pipeline, workers)
    return found


@dataclass(frozen=True)
class DataBench:
    """Seconds per image of each contestant in each round, and those of all cores together."""

    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def speedup(self, name: str) -> Median:
        """How many times as fast as the plain one."""
        return median_ratio(self.seconds[PLAIN], self.seconds[name])

    def __rich__(self) -> Table:
        """The comparison."""
        table = Table(
            title=f"Random parts of images at {SIZE} × {SIZE}, {cores()} cores",
            caption=f"medians of {len(self.seconds[PLAIN])} rounds; × is relative to {PLAIN}, with its 95% interval",
        )
        for heading in ("", "images/s", "ms each", "CPU ms each", "×"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, seconds in self.seconds.items():
            middle, ratio = median(seconds).value, self.speedup(name)
            cells = (f"{1 / middle:.0f}", f"{1000 * middle:.2f}", f"{1000 * median(self.cpu[name]).value:.2f}")
            times = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
            table.add_row(name, *cells, "1" if name == PLAIN else times)
        return table


def run(
    folder: Path,
    *,
    rounds: int = 9,
    images: int = 4096,
    results: Path = Path("out/results"),
) -> DataBench:
    """Time every contestant, print the comparison and add it to ``bench.jsonl``.

    Args:
        folder: holds ``train``, with class folders; its images are repeated until there are enough.
        rounds: turns of each contestant.
        images: that are read in a turn.
        results: folder for the row.
    """
    for name, given in (("rounds", rounds), ("images", images)):
        if given < 1:
            raise ValueError(f"{name} is {given}; expected at least 1")
    ensure_writable(results)
    source = open_source(folder, "train")
    if not isinstance(source, FolderSource):
        raise ValueError(f"{folder} has shards, which ImageFolder does not read; give one with class folders")
    start = time.perf_counter()
    rounds_per_candidate = candidates(source, images)
    seconds: dict[str, list[float]] = {name: [] for name in rounds_per_candidate}
    cpu: dict[str, list[float]] = {name: [] for name in rounds_per_candidate}
    with Progress(transient=True) as progress:
        for _ in progress.track(range(rounds)):
            for name, workload in rounds_per_candidate.items():
                begun, used = time.perf_counter(), _cpu_time()
                read = workload()
                seconds[name].append((time.perf_counter() - begun) / read)
                cpu[name].append((_cpu_time() - used) / read)
    bench = DataBench(seconds, cpu)
    rich.print(bench)
    described = {
        "rounds": rounds, "images": images, "of": len(source), "batch_size": BATCH_SIZE, "size": SIZE,
        "bytes": round(sum(len(source.read(index)) for index in range(len(source))) / len(source)),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    metrics = {
        what: {name: round_for_json(values) for name, values in found.items()}
        for what, found in (("seconds", seconds), ("cpu", cpu))
    }
    row = Row("bench", "data", int(time.time()), described, metrics, round(time.perf_counter() - start, 1))
    Store(results / "bench.jsonl").append(row)
    return bench


def _cpu_time() -> float:
    """Of this process and of its workers that have ended."""
    return sum(os.times()[:4])
