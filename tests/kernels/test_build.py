"""The kernels are optional for a user without a C compiler; with one, a build that fails must not go unnoticed."""

import platform
import shutil
from pathlib import Path

import pytest

from deepsquare.kernels import cpu


def test_with_a_compiler_the_kernels_are_built() -> None:
    features = Path("/proc/cpuinfo")
    if shutil.which("gcc") is None or platform.machine() != "x86_64" or not features.exists():
        pytest.skip("no gcc, or a machine whose instruction sets are not known")
    if not {"avx2", "fma", "f16c"} <= set(features.read_text().split()):
        pytest.skip("the processor lacks AVX2, FMA or F16C")
    assert cpu.library() is not None, "the C kernels did not build; see pip install --verbose -e ."
