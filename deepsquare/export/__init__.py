"""From a checkpoint to a file that runs without PyTorch: folded, exported, quantized, its parity verified."""

from deepsquare.export.base import RuntimeModel
from deepsquare.export.exporter import Export, ExportError, export
from deepsquare.export.runtimes import load_exported

__all__ = ["Export", "ExportError", "RuntimeModel", "export", "load_exported"]
