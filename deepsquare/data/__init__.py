"""Images: class folders and shards through three decoding pipelines; CIFAR-10, Tiny ImageNet; images in memory.

To add a data set of encoded images, write a :class:`Source` for its layout; ``folders.open_source`` recognizes layouts.
A small data set is a function that returns :class:`~deepsquare.data.in_memory.LabeledImages`, as in ``cifar10.py`` and
``tiny_imagenet.py``.
"""

from deepsquare.data.folders import check_same_classes, open_source
from deepsquare.data.loader import Batch, available, batches
from deepsquare.data.shards import write_shards
from deepsquare.data.source import Source
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
