"""The export runtimes: a new one is a file beside this one, and a line here."""

import os
from pathlib import Path

from deepsquare.export.base import Runtime, RuntimeModel
from deepsquare.export.executorch import ExecuTorch
from deepsquare.export.onnx import OnnxRuntime

RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (OnnxRuntime(), ExecuTorch())}
_BY_SUFFIX = {runtime.suffix: runtime for runtime in RUNTIMES.values()}


def is_exported(path: Path) -> bool:
    """Whether a file has the suffix of a runtime."""
    return path.suffix.lower() in _BY_SUFFIX


def runtime_for(path: Path) -> Runtime:
    """The runtime of a file, by its suffix."""
    if not is_exported(path):
        suffixes = " or ".join(f"{suffix} for {runtime.name}" for suffix, runtime in _BY_SUFFIX.items())
        raise ValueError(f"the file is {path}; expected the suffix {suffixes}")
    return _BY_SUFFIX[path.suffix.lower()]


def load_exported(path: str | os.PathLike[str]) -> RuntimeModel:
    """Load a file that :func:`deepsquare.export.export` wrote; the suffix tells its runtime."""
    path = Path(path)
    runtime = runtime_for(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return runtime.load(path)
