"""Decoding by NVIDIA DALI, on the CPU or on a GPU.

Its graph has no random operator: crops are computed here and passed in with the bytes, so that an epoch is the same as
by the other pipelines. Pillow reads all but common JPEGs, and every image of a batch that DALI rejects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from deepsquare.data.jpeg import jpeg_size
from deepsquare.data.loader import Batch, BatchDataset, check_indices
from deepsquare.data.pil import MAX_PIXELS
from deepsquare.data.source import Source
from deepsquare.data.transforms import CropParams, Transform, crop_params

PREFETCH = 2  # batches in flight: one that DALI decodes, one whose files are read


def dali_batches(
    source: Source,
    batch_indices: Sequence[Sequence[int]],
    transform: Transform,
    seed: int,
    epoch: int,
    threads: int,
    device_id: int | None,
) -> Iterator[Batch]:
    """Yield a batch for each sequence of indices, on the GPU if ``device_id`` is given."""
    by_pillow = BatchDataset(source, batch_indices, transform, seed, epoch, "torchvision")
    largest = max((len(indices) for indices in batch_indices), default=0)
    decoder = _Decoder(transform.size, max(1, largest), threads, device_id)
    reading, decoding = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    pending: deque[Future[Batch]] = deque()
    try:
        for indices in batch_indices:
            job = reading.submit(_Job, by_pillow, check_indices(indices, len(source)))
            pending.append(decoding.submit(decoder.decode, job))
            if len(pending) > PREFETCH:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for pool in (reading, decoding):
            pool.shutdown(cancel_futures=True)


class _Job:
    """The images of a batch: those that DALI decodes, with their crops, and the others."""

    def __init__(self, by_pillow: BatchDataset, indices: list[int]) -> None:
        self.by_pillow, self.indices = by_pillow, indices
        self.positions: list[int] = []
        self.data: list[bytes] = []
        self.crops: list[CropParams] = []
        for position, index in enumerate(indices):
            data = by_pillow.source.read(index)
            size = jpeg_size(data)
            if size is not None and size[0] * size[1] <= MAX_PIXELS:
                self.positions.append(position)
                self.data.append(data)
                self.crops.append(
                    crop_params(by_pillow.transform, *size, seed=by_pillow.seed, epoch=by_pillow.epoch, index=index)
                )

    def batch(self, decoded: Tensor) -> Batch:
        """The images that DALI decoded, (n, S, S, 3), and the others by Pillow."""
        rest = sorted(set(range(len(self.indices))) - set(self.positions))
        labels = self.by_pillow.source.labels[torch.tensor(self.indices, dtype=torch.int64)]
        if not rest:
            return Batch(decoded.permute(0, 3, 1, 2), labels, ())
        others = self.by_pillow.batch([self.indices[position] for position in rest])
        labels[rest] = others.labels
        images = decoded.new_empty((len(self.indices), *decoded.shape[1:]))
        images[self.positions] = decoded
        images[rest] = others.images.permute(0, 2, 3, 1).to(images.device)
        return Batch(images.permute(0, 3, 1, 2), labels, others.damaged)

    def batch_by_pillow(self, device_id: int | None) -> Batch:
        """All of them by Pillow."""
        batch = self.by_pillow.batch(self.indices)
        return batch if device_id is None else batch._replace(images=batch.images.cuda(device_id))


class _Decoder:
    """DALI's pipeline, rebuilt after an image broke it."""

    def __init__(self, size: int, largest: int, threads: int, device_id: int | None) -> None:
        self.size, self.largest, self.threads, self.device_id = size, largest, threads, device_id
        self.pipeline = self._build()

    def decode(self, reading: Future[_Job]) -> Batch:
        """Decode the batch of a job."""
        job = reading.result()
        if not job.crops:
            return job.batch_by_pillow(self.device_id)
        crops = job.crops
        try:
            (decoded,) = self.pipeline.run(
                data=[np.frombuffer(data, np.uint8) for data in job.data],
                start=np.array([(crop.top, crop.left) for crop in crops], np.int32),
                shape=np.array([(crop.height, crop.width) for crop in crops], np.int32),
                resized=np.array([crop.resized[::-1] for crop in crops], np.float32),
                corner=np.array([crop.corner[::-1] for crop in crops], np.int32),
                flip=np.array([crop.flip for crop in crops], np.int32),
            )
        except RuntimeError:
            self.pipeline = self._build()
            return job.batch_by_pillow(self.device_id)
        if self.device_id is None:
            return job.batch(torch.from_numpy(np.array(decoded.as_array())))
        return job.batch(from_dlpack(decoded.as_tensor()).clone())

    def _build(self) -> Any:
        pipeline = Pipeline(
            self.largest, self.threads, self.device_id, exec_pipelined=False, exec_async=False, prefetch_queue_depth=1
        )
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
            pixels = fn.slice(pixels, start=corner, shape=(self.size, self.size), axes=(0, 1))
            pipeline.set_outputs(fn.flip(pixels, horizontal=_input("flip", types.INT32, 0)))
        pipeline.build()
        return pipeline


def _input(name: str, kind: Any, dimensions: int) -> Any:
    return fn.external_source(name=name, dtype=kind, ndim=dimensions)
