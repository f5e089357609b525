"""Export of a model to a file that runs without PyTorch, in float32 or int8, with a check of its logits."""

from deepsquare.export.base import RuntimeModel
from deepsquare.export.exporter import Export, ExportError, export
from deepsquare.export.runtimes import load_exported

__all__ = ["Export", "ExportError", "RuntimeModel", "export", "load_exported"]
