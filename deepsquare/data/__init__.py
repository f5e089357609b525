"""Images: class folders and shards through three decoders that give the same pixels; CIFAR-10; images in memory."""

from deepsquare.data.loader import Batch, available, batches
from deepsquare.data.splits import Source, check_same_classes, open_source, write_shards
from deepsquare.data.transforms import EvalView, TrainView

__all__ = [
    "Batch",
    "EvalView",
    "Source",
    "TrainView",
    "available",
    "batches",
    "check_same_classes",
    "open_source",
    "write_shards",
]
