"""Images per second of each data pipeline, against torchvision's ImageFolder with a DataLoader.

All read the same images as random crops of 224 × 224, uint8, in batches of 64. A measurement starts the workers, reads
a list of images and stops the workers. "Decoding alone" is libjpeg-turbo in one process on whole images in memory: the
lower bound, per core, for a pipeline that decodes whole images.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import rich
import torch
from rich.progress import Progress
from rich.table import Table
from tyro.conf import Suppress

from deepsquare._threads import cores
from deepsquare.data import Source, TrainTransform, available, batches, open_source
from deepsquare.data.folders import FolderSource
from deepsquare.data.limits import jpeg_size
from deepsquare.paper.bench import _common
from deepsquare.paper.statistics import bounds_label, median, median_ratio

BATCH_SIZE, SIZE, BASELINE_WORKERS = 64, 224, 2
BASELINE = f"ImageFolder + DataLoader, {BASELINE_WORKERS} workers"
DECODING = "decoding alone, 1 process"
Workload = Callable[[], int]  # reads its images and returns their number


def _baseline(source: FolderSource, images: int) -> Workload:
    """torchvision's reference training script, up to the uint8 batch."""
    from torch.utils.data import DataLoader, Subset
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.ToImage()])
    dataset = ImageFolder(str(source.folder), transform)
    subset = Subset(dataset, [index % len(dataset) for index in range(images)])
    loader = DataLoader(subset, BATCH_SIZE, num_workers=BASELINE_WORKERS, generator=torch.Generator())
    return lambda: sum(len(batch) for batch, _ in loader)


def _ours(source: Source, images: int, pipeline: str, workers: int) -> Workload:
    indices = [index % len(source) for index in range(images)]
    groups = [indices[first : first + BATCH_SIZE] for first in range(0, images, BATCH_SIZE)]
    read = partial(batches, source, groups, TrainTransform(SIZE), pipeline=pipeline, workers=workers)
    return lambda: sum(len(batch.images) for batch in read())


def _decoding(source: Source, images: int) -> Workload:
    import simplejpeg

    files = [data for data in map(source.read, range(min(images, len(source)))) if jpeg_size(data)]
    return lambda: sum(simplejpeg.decode_jpeg(data) is not None for data in files)


def _candidates(source: FolderSource, images: int) -> dict[str, Workload]:
    """The baseline, and every installed pipeline in this process and with one worker per core."""
    workers = cores()
    candidates = {BASELINE: _baseline(source, images)}
    if available("fast"):
        candidates[DECODING] = _decoding(source, images)
    for pipeline, without_workers, with_workers in (
        ("torchvision", "in this process", f"{workers} workers"),
        ("fast", "in this process", f"{workers} workers"),
        ("dali", "1 thread", f"{workers} threads"),
    ):
        if available(pipeline):
            candidates[f"{pipeline}, {without_workers}"] = _ours(source, images, pipeline, 0)
            candidates[f"{pipeline}, {with_workers}"] = _ours(source, images, pipeline, workers)
    return candidates


def _measure(workload: Workload) -> tuple[float, float]:
    """Seconds per image, and CPU seconds per image of this process and its finished workers."""
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    images = workload()
    return (time.perf_counter() - start) / images, (sum(os.times()[:4]) - cpu_start) / images


def run(
    data: Path, *, rounds: _common.Rounds = 9, results: _common.Results = _common.RESULTS, images: Suppress[int] = 4096
) -> None:
    """Every data pipeline against torchvision's ImageFolder with a DataLoader.

    Args:
        data: Folder that holds train, with a folder of images per class.
        images: Images per round.
    """
    _common.check(results, rounds=rounds, images=images)
    source = open_source(data, "train")
    if not isinstance(source, FolderSource):
        raise ValueError(f"{data} has shards, which ImageFolder does not read; give one with class folders")
    start = time.perf_counter()
    candidates = {name: partial(_measure, workload) for name, workload in _candidates(source, images).items()}
    with Progress(transient=True) as progress:
        measurements = _common.interleave(candidates, progress.track(range(rounds)))
    metrics = {
        kind: {name: [pair[index] for pair in pairs] for name, pairs in measurements.items()}
        for index, kind in enumerate(("seconds", "cpu"))
    }
    rich.print(table(**metrics))
    recipe = {
        "rounds": rounds, "images": images, "of": len(source), "batch_size": BATCH_SIZE, "size": SIZE,
        "bytes": round(sum(len(source.read(index)) for index in range(len(source))) / len(source)),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    _common.append_row(results, "data", recipe, _common.rounded(metrics, 4), start)


def table(seconds: dict[str, list[float]], cpu: dict[str, list[float]]) -> Table:
    """The comparison, from seconds and CPU seconds per image by candidate and round."""
    rounds = len(seconds[BASELINE])
    comparison = _common.make_table(
        f"Random crops of images at {SIZE} × {SIZE}, {cores()} cores",
        f"medians of {rounds} rounds; speedup over {BASELINE} ({bounds_label(rounds)})",
        ("", "images/s", "ms each", "CPU ms each", "speedup"),
    )
    for name in seconds:
        wall, cpu_wall = median(seconds[name]).value, median(cpu[name]).value
        speedup = "1" if name == BASELINE else _common.format_median(median_ratio(seconds[BASELINE], seconds[name]), 2)
        comparison.add_row(name, f"{1 / wall:.0f}", f"{1e3 * wall:.2f}", f"{1e3 * cpu_wall:.2f}", speedup)
    return comparison
