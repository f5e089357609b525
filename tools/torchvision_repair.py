"""Makes ``import torchvision`` work beside a torch build that its compiled library does not fit.

torchvision's wheel on the package index is built against CUDA. Beside a CPU-only torch its compiled library does not
load, and ``import torchvision`` fails with ``operator torchvision::nms does not exist``, although models, datasets and
transforms need nothing compiled. Declaring the two operators to which the Python code refers is enough.

``make`` copies this file into ``.venv`` with a one-line ``.pth`` file that imports it when the interpreter starts. It
adds one import finder, which acts when torchvision is first imported; a torchvision that works is left alone.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


def library_loads(package: str) -> bool:
    """Whether the compiled library in the folder ``package`` can be loaded into this torch."""
    from pathlib import Path

    import torch

    libraries = sorted(Path(package).glob("_C*.*"))
    try:
        for library in libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return bool(libraries)


def declare_operators() -> None:
    """Declare torchvision's detection operators, without an implementation, unless they exist."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class RepairingLoader(SourceFileLoader):
    """Declares the operators, if they are missing, before torchvision's ``__init__.py`` runs."""

    def exec_module(self, module: ModuleType) -> None:
        """Run ``__init__.py``."""
        if not library_loads(module.__path__[0]):
            declare_operators()
        super().exec_module(module)


class TorchvisionFinder:
    """A meta path finder for the name ``torchvision`` only."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """What Python's own finder finds, with a :class:`RepairingLoader`."""
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = RepairingLoader(name, spec.loader.path)
        return spec


def install() -> None:
    """Add the finder, once."""
    if TorchvisionFinder not in sys.meta_path:
        sys.meta_path.insert(0, TorchvisionFinder)


install()
