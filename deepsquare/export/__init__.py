"""From a checkpoint to a file that runs without PyTorch: folded, exported, quantised, with proof of parity."""

from deepsquare.export.exporter import Export, ExportError, export
from deepsquare.export.runtime import RuntimeModel, load_exported

__all__ = ["Export", "ExportError", "RuntimeModel", "export", "load_exported"]
