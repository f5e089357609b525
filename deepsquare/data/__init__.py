"""Images: class folders and shards through three decoders that give the same pixels; CIFAR-10; images in memory."""

from deepsquare.data.loader import Batch, available, batches
from deepsquare.data.splits import Source, check_same_classes, open_source, write_shards
from deepsquare.data.transforms import EvalTransform, TrainTransform

__all__ = [
    "Batch",
    "EvalTransform",
    "Source",
    "TrainTransform",
    "available",
    "batches",
    "check_same_classes",
    "open_source",
    "write_shards",
]
