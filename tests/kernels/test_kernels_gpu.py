"""The Triton kernels: compiled for a GPU, and under Triton's interpreter equal to float64, in value and gradient.

Triton chooses between compiler and interpreter when it is imported. So the interpreter has a process of its own: there
pytest runs the functions ``check_…`` of this file, which an ordinary run does not collect.
"""

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_kernels import DTYPES, LAYOUTS, POOLINGS, Shape, functions, inputs, made, results
from torch import Tensor

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import (
    BlendedSquare,
    MeanAndMeanSquare,
    MeanSquare,
    ReLUSquare,
    SquareExcitation,
    SquareExcitationAddReLU,
    cpu,
    dispatch,
)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# The interpreter is slow. The half types differ in reading and writing only, so float32 stands for them in most cases.
CASES: list[tuple[Shape, str, torch.dtype]] = [
    *(((2, 9, 5, 7), layout, dtype) for layout in LAYOUTS for dtype in DTYPES),  # a tile has room for several planes
    *(((1, 35, 9, 8), layout, torch.float32) for layout in LAYOUTS),  # channels for more than a tile, and a rest
    *(((1, 3, 48, 50), layout, torch.float32) for layout in LAYOUTS),  # positions likewise
    ((2, 7, 3), "contiguous", torch.float32),
    ((2, 3, 2, 3, 5), "channels_last", torch.float32),
]


def run(*arguments: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *arguments], env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_under_the_interpreter() -> None:
    options = ["-o", "python_functions=check_*", "-p", "no:cacheprovider"]
    print(run("-m", "pytest", *options, __file__, TRITON_INTERPRET="1"))


KERNELS: dict[str, dict[str, Any]] = {
    "POOL": dict.fromkeys(("factor", "alpha", "beta", "residual", "y")),
    "POOL_BACKWARD": dict.fromkeys(("alpha", "beta", "residual", "per_plane")),
    "EXCITE": dict.fromkeys(("factor", "beta", "residual", "per_plane")),
    "EXCITE_BACKWARD": {"result": None, "dresidual": None},
    "EXCITE_ADD_RELU": dict.fromkeys(("factor", "per_plane")),
    "EXCITE_ADD_RELU_BACKWARD": {"beta": None},
    "POOL_BOTH": dict.fromkeys(("factor", "alpha", "beta", "residual", "y")),
    "POOL_BOTH_BACKWARD": dict.fromkeys(("alpha", "beta", "residual", "per_plane")),
    "RELU_SQUARE": {"grad": None},
    "RELU_SQUARE_BACKWARD": {},
    "BLEND_SQUARE": dict.fromkeys(("grad", "per_plane")),
    "BLEND_SQUARE_BACKWARD": {},
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter lets pass what the compiler refuses."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deepsquare.kernels import gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = gpu._KERNELS[cpu.Kernel[name]]
    for channels_last in (False, True) if name == "POOL" else (False,):  # it makes a difference in _tile alone
        constants = {"channels_last": channels_last, "rows": 64, "width": 4, "block": 256, **KERNELS[name]}
        constants["both"] = name.startswith("POOL_BOTH")
        constants = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
        kinds = dict.fromkeys(("channels", "hw", "count", "planes"), "i64") | dict.fromkeys(constants, "constexpr")
        signature = {argument: kinds.get(argument, "*bf16") for argument in kernel.arg_names}
        compiled = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32))
        assert ".f64" not in compiled.asm["ptx"], "computes in float32"
        assert compiled.asm["cubin"]


def test_a_gpu_tensor_selects_the_gpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepsquare.kernels import gpu

    x: Any = SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True, is_cpu=False)
    monkeypatch.setattr(dispatch, "_is_plain_tensor", lambda tensor: True)
    for supported, expected in ((True, gpu), (False, None)):
        monkeypatch.setattr(gpu, "supports", lambda tensor, supported=supported: supported)
        assert kernels.backend_for(x) is expected
    with kernels.without_kernels():
        assert kernels.backend_for(x) is None


def test_without_triton_nothing_is_supported() -> None:
    code = """
import sys
sys.modules["triton"] = None  # import triton now raises ImportError
import torch, deepsquare
x = torch.ones(1, 2, 3, 4)
deepsquare.functional.square_excitation(x, torch.ones(1))
assert "deepsquare.kernels.gpu" not in sys.modules, "imported for a tensor of a GPU only"
from deepsquare.kernels import gpu
print(gpu.supports(x))
"""
    assert run("-W", "error", "-c", code).strip() == "False"


# ---- Under the interpreter ----


def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """Between float32 and bfloat16, to nearest even as a GPU does: the interpreter's own cuts the last bits off."""
    if target.name == "bf16":
        return torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16).float().numpy()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels, serving :mod:`deepsquare.functional` too."""
    from deepsquare.kernels import gpu

    monkeypatch.setattr("triton.runtime.interpreter._convert_float", converted)
    select = dispatch.backend_for  # says cpu where a kernel applies
    monkeypatch.setattr(dispatch, "backend_for", lambda *inputs: gpu if select(*inputs) else None)
    with np.errstate(all="ignore"):  # a GPU does not warn of 0/0 either
        yield gpu


@functions
@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES, ids=str)
def check_value_and_gradients_are_those_of_float64(
    name: str, shape: Shape, layout: str, dtype: torch.dtype, gpu: ModuleType
) -> None:
    given = inputs(shape, dtype, layout)
    assert gpu.supports(given[0])
    found = results(name, given)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    expected = results(name, exact, made(tuple(found[0].shape), seed=2).to(found[0].dtype).double())
    assert len(found) == len(expected)
    for ours, reference in zip(found, expected, strict=True):
        once = 0 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps / 2  # one rounding, and float32's
        bound = 2e-6 * max(1, float(reference.abs().max()))
        torch.testing.assert_close(ours.double(), reference, rtol=once + 2e-6, atol=bound)
    assert found[0].dtype == dtype
    if name not in POOLINGS:
        assert all(tensor.stride() == given[0].stride() for tensor in (found[0], found[1])), "the layout is kept"


def every_operation(
    backend: ModuleType, x: Tensor, alpha: Tensor, residual: Tensor, grad: Tensor, beta: Tensor | None = None
) -> list[Any]:
    result = SquareExcitationAddReLU.forward(backend, x, alpha, beta, residual)
    per_plane, weight = grad.flatten(2)[..., 0].float(), torch.tensor([0.3])
    found = [
        MeanSquare.forward(backend, x),
        *MeanSquare.backward(backend, per_plane, x),
        SquareExcitation.forward(backend, x, alpha, beta),
        *SquareExcitation.backward(backend, grad, x, alpha, beta),
        result,
        *SquareExcitationAddReLU.backward(backend, grad, x, alpha, beta, result),
        ReLUSquare.forward(backend, x),
        *ReLUSquare.backward(backend, grad, x),
        MeanAndMeanSquare.forward(backend, x),
        *MeanAndMeanSquare.backward(backend, torch.stack([per_plane, per_plane.flip(0)]), x),
        BlendedSquare.forward(backend, x, weight),
        *BlendedSquare.backward(backend, grad, x, weight),
    ]
    return [tensor for tensor in found if tensor is not None]


needs_cpu = pytest.mark.skipif(cpu.library() is None, reason="the kernels of the CPU were not built here")


@needs_cpu
@pytest.mark.parametrize("layout", LAYOUTS)
@dtypes
def check_agree_with_the_cpu_kernels(dtype: torch.dtype, layout: str, gpu: ModuleType) -> None:
    x = made((2, 5, 3, 7), dtype, layout)
    others = made(tuple(x.shape), seed=1).double(), torch.ones(()).expand(x.shape)  # of other types and layouts
    alpha = torch.tensor([[-0.2]], dtype=torch.bfloat16)
    for beta in (None, torch.tensor(0.4)):
        found, expected = (every_operation(each, x, alpha, *others, beta) for each in (gpu, cpu))
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps + 2e-6, atol=4e-6)
        assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]


EDGES = [*((torch.float32, alpha) for alpha in (0.0, 1e-30, 1e-19, 1e18, 1e20, math.nan)), *((t, -1.0) for t in DTYPES)]


@pytest.mark.parametrize(("dtype", "alpha"), EDGES, ids=str)
def check_edges(dtype: torch.dtype, alpha: float, gpu: ModuleType) -> None:
    planes = [
        [0.0] * 4,
        [1e-30] * 4,
        [torch.finfo(dtype).max] * 4,
        [-1.0, 0.5, -0.0, 2.0],
        [math.inf, 1.0, -2.0, 3.0],
        [math.nan, 1.0, -2.0, 3.0],
    ]
    x = torch.tensor(planes).to(dtype).reshape(1, 6, 2, 2)
    other, weight = x.flip(1), torch.tensor([alpha])  # NaN meets 0, and inf small numbers
    gradient = made(tuple(x.shape), dtype, seed=1)  # finite: NaN in the result is the function's own
    found = every_operation(gpu, x, weight, other, gradient)
    with kernels.without_kernels():
        excited, squared = DF.square_excitation(x, weight), DF.relu_square(x)
    summed = (excited.float() + other.float()).relu().to(dtype)  # rounded twice
    twice = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[2], excited, equal_nan=True)
    torch.testing.assert_close(found[5], summed, rtol=twice, atol=twice, equal_nan=True)
    torch.testing.assert_close(found[9], squared, rtol=0, atol=0, equal_nan=True)
    if cpu.library() is not None:  # gradients too, NaN where these have it
        torch.testing.assert_close(found, every_operation(cpu, x, weight, other, gradient), equal_nan=True)


@dtypes
def check_zero_alpha_is_exactly_the_identity(dtype: torch.dtype, gpu: ModuleType) -> None:
    x, gradient = made((2, 3, 4, 5), dtype), made((2, 3, 4, 5), dtype, seed=1)
    x[0, 0] = 0
    assert torch.equal(SquareExcitation.forward(gpu, x, torch.zeros(1), None), x)
    of_x, of_alpha, _ = SquareExcitation.backward(gpu, gradient, x, torch.zeros(1), None)
    assert of_x is not None
    assert torch.equal(of_x, gradient)
    assert of_alpha == 0


def check_what_is_supported(gpu: ModuleType) -> None:
    x = torch.ones(2, 3, 4, 5)
    served = [x, x.half(), x.bfloat16(), x.to(memory_format=torch.channels_last), torch.ones(())]
    assert all(gpu.supports(tensor) for tensor in served)
    refused = [x.double(), x.int(), x[:0], x[..., ::2], x.transpose(2, 3)]
    assert not any(gpu.supports(tensor) for tensor in refused)


def check_elementwise_functions_take_any_shape(gpu: ModuleType) -> None:
    for shape in ((), (7,), (3, 1000)):
        x, gradient = made(shape), made(shape, seed=1)
        torch.testing.assert_close(ReLUSquare.forward(gpu, x), x.clamp(min=0) ** 2)
        torch.testing.assert_close(ReLUSquare.backward(gpu, gradient, x), (2 * x.clamp(min=0) * gradient,))


def check_a_triton_that_cannot_run_warns_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(gpu, "launch", fail)
    gpu._runs_on.cache_clear()
    x = torch.ones(1, 1, 2)
    with pytest.warns(UserWarning, match=r"Triton cannot run on cpu \(no C compiler\)"):
        assert not gpu.supports(x)
    assert not gpu.supports(x)
    gpu._runs_on.cache_clear()
