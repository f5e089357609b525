"""Makes ``import torchvision`` work beside a torch build that its compiled part does not fit.

torchvision's wheel on the package index is built against CUDA. Beside a CPU-only torch its compiled part does
not load, and ``import torchvision`` stops at ``operator torchvision::nms does not exist``, although models,
datasets and transforms need nothing compiled. Declaring the two operators that the Python part refers to is
enough. Import this module before torchvision or timm.
"""

import importlib.util
import sys
from pathlib import Path

import torch


def _compiled_part_loads() -> bool:
    """Whether torchvision's own extension library can be loaded into this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True  # not installed: the import itself will say so
    libraries = sorted(Path(spec.submodule_search_locations[0]).glob("_C*.*"))
    try:
        for library in libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return bool(libraries)


def prepare() -> None:
    """Declare torchvision's detection operators if, and only if, its compiled part is missing."""
    if "torchvision" in sys.modules or _compiled_part_loads():
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


prepare()
