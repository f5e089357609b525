"""From a checkpoint to a file that runs without PyTorch: folded, exported, quantised, with proof of parity."""

from deepsquare.deploy.export import Export, ExportError, export
from deepsquare.deploy.program import Program, open_program

__all__ = ["Export", "ExportError", "Program", "export", "open_program"]
