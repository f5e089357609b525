"""Pictures of full size, as of ImageNet: from class folders or shards, by three pipelines that show the same."""

from deepsquare.data.pictures.loader import Batch, available, batches
from deepsquare.data.pictures.source import Source, check_same_classes, open_source, write_shards
from deepsquare.data.pictures.views import EvalView, TrainView

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
