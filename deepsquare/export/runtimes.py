"""The export runtimes: a new one is a file beside this one, and a line here."""

from __future__ import annotations

import os
from pathlib import Path

from deepsquare.export.base import Runtime, RuntimeModel
from deepsquare.export.executorch import ExecuTorch
from deepsquare.export.onnx import OnnxRuntime

RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (OnnxRuntime(), ExecuTorch())}


def is_exported(path: Path) -> bool:
    """Whether a file has the suffix of a runtime."""
    return any(path.suffix.lower() == runtime.suffix for runtime in RUNTIMES.values())


def runtime_for(path: Path) -> Runtime:
    """The runtime of a file, by its suffix."""
    for runtime in RUNTIMES.values():
        if path.suffix.lower() == runtime.suffix:
            return runtime
    suffixes = " or ".join(f"{runtime.suffix} for {name}" for name, runtime in RUNTIMES.items())
    raise ValueError(f"the file is {path}; expected the suffix {suffixes}")


def load_exported(path: str | os.PathLike[str]) -> RuntimeModel:
    """Load a file that :func:`deepsquare.export.export` wrote; the suffix tells its runtime."""
    path = Path(path)
    runtime = runtime_for(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return runtime.load(path)
