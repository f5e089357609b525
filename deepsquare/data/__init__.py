"""Images: class folders and shards through three equivalent decoding pipelines; CIFAR-10; images in memory."""

from deepsquare.data.loader import Batch, available, batches
from deepsquare.data.splits import Source, check_same_classes, open_source, write_shards
from deepsquare.data.transforms import TrainTransform

__all__ = [
    "Batch",
    "Source",
    "TrainTransform",
    "available",
    "batches",
    "check_same_classes",
    "open_source",
    "write_shards",
]
