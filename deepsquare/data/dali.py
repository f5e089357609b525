"""Decoding by NVIDIA DALI, on the CPU or on a GPU.

Its graph has no random operator: crops are computed here and passed in with the bytes, so that an epoch is the same as
by the other pipelines. Pillow reads all but common JPEGs, and every image of a batch that DALI rejects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from deepsquare.data.limits import check_cost, jpeg_size
from deepsquare.data.loader import Batch, BatchDataset
from deepsquare.data.source import DecodeError
from deepsquare.data.transforms import CropParams

PREFETCH = 2  # batches in flight: one that DALI decodes, one whose files are read
Jpegs = Mapping[int, tuple[bytes, CropParams]]  # common JPEGs and their crops by position in the batch


def dali_batches(dataset: BatchDataset, threads: int, device_id: int | None) -> Iterator[Batch]:
    """Yield the batches of a dataset, on the GPU if ``device_id`` is given; the dataset itself decodes by Pillow."""
    decoder = _Decoder(dataset, threads, device_id)
    reading, decoding = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    pending: deque[Future[Batch]] = deque()
    try:
        for number in range(len(dataset)):
            pending.append(decoding.submit(decoder.decode, reading.submit(decoder.read, dataset.indices(number))))
            if len(pending) > PREFETCH:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for pool in (reading, decoding):
            pool.shutdown(cancel_futures=True)


class _Decoder:
    """DALI's pipeline, rebuilt after an image broke it."""

    def __init__(self, dataset: BatchDataset, threads: int, device_id: int | None) -> None:
        self.dataset, self.threads, self.device_id = dataset, threads, device_id
        self.pipeline = self._build()

    def read(self, indices: list[int]) -> tuple[list[int], Jpegs]:
        """Read the files of a batch that DALI decodes."""
        jpegs = {}
        for position, index in enumerate(indices):
            with suppress(DecodeError):  # the others of the batch are left to Pillow, which raises it again
                data = self.dataset.source.read(index)
                if size := jpeg_size(data):
                    check_cost(data, *size)
                    jpegs[position] = data, self.dataset.crop_for(index)(*size)
        return indices, jpegs

    def decode(self, reading: Future[tuple[list[int], Jpegs]]) -> Batch:
        """Decode the files that were read by DALI, and the others of the batch by Pillow."""
        indices, jpegs = reading.result()
        decoded = self._run(jpegs)
        by_dali = [] if decoded is None else list(jpegs)
        rest = sorted(set(range(len(indices))) - set(by_dali))
        others = self.dataset.batch([indices[position] for position in rest])
        device = "cpu" if self.device_id is None else torch.device("cuda", self.device_id)
        size = self.dataset.transform.size
        images = torch.empty((len(indices), size, size, 3), dtype=torch.uint8, device=device)
        labels = self.dataset.source.labels[torch.tensor(indices, dtype=torch.int64)]
        if decoded is not None:
            images[by_dali] = decoded
        images[rest] = others.images.permute(0, 2, 3, 1).to(device)
        labels[rest] = others.labels
        return Batch(images.permute(0, 3, 1, 2), labels, others.damaged)

    def _run(self, jpegs: Jpegs) -> Tensor | None:
        """The crops as (n, S, S, 3); None if there are none, or DALI rejects one of the files."""
        if not jpegs:
            return None
        data, crops = zip(*jpegs.values(), strict=True)
        try:
            (decoded,) = self.pipeline.run(
                data=[np.frombuffer(file, np.uint8) for file in data],
                start=np.array([(crop.top, crop.left) for crop in crops], np.int32),
                shape=np.array([(crop.height, crop.width) for crop in crops], np.int32),
                resized=np.array([crop.resized[::-1] for crop in crops], np.float32),
                corner=np.array([crop.corner[::-1] for crop in crops], np.int32),
                flip=np.array([crop.flip for crop in crops], np.int32),
            )
        except RuntimeError:
            self.pipeline = self._build()
            return None
        if self.device_id is None:
            return torch.from_numpy(np.array(decoded.as_array()))
        return from_dlpack(decoded.as_tensor())

    def _build(self) -> Any:
        largest = max((len(indices) for indices in self.dataset.batch_indices), default=1)
        settings = {"exec_pipelined": False, "exec_async": False, "prefetch_queue_depth": 1}
        pipeline = Pipeline(max(1, largest), self.threads, self.device_id, **settings)
        with pipeline:
            start, shape, corner = (_input(name, types.INT32, 1) for name in ("start", "shape", "corner"))
            pixels = fn.decoders.image_slice(
                _input("data", types.UINT8, 1),
                start=start,
                shape=shape,
                axes=(0, 1),
                device="cpu" if self.device_id is None else "mixed",
                output_type=types.RGB,
                adjust_orientation=False,  # as ImageFolder
                jpeg_fancy_upsampling=True,  # libjpeg's default
            )
            size = _input("resized", types.FLOAT, 1)
            pixels = fn.resize(pixels, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
            pixels = fn.slice(pixels, start=corner, shape=[self.dataset.transform.size] * 2, axes=(0, 1))
            pipeline.set_outputs(fn.flip(pixels, horizontal=_input("flip", types.INT32, 0)))
        pipeline.build()
        return pipeline


def _input(name: str, kind: Any, dimensions: int) -> Any:
    return fn.external_source(name=name, dtype=kind, ndim=dimensions)
