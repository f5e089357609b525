"""The CPU kernels on other processors: compiled with a small C program, emulated by qemu, against float64 formulas."""

import atexit
import functools
import itertools
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

import deepsquare.kernels
from deepsquare.kernels.cpu import GROUP, RUN, Kernel

pytestmark = pytest.mark.slow  # it compiles the kernels, and emulates them

HERE, SOURCES = Path(__file__).parent, Path(deepsquare.kernels.__file__).parent
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
ALPHA, BETA = 0.7, 0.6
# n, c, hw: less than a vector, whole vectors and rests, special sizes, an image in parts; more channels than a chunk.
SHAPES = ((1, 3, 2), (2, 5, 9), (2, 8, 16), (1, 20, 49), (2, 17, 196), (1, 33, 300), (1, 2070, 3))
RUNS = (1, 7, 16, 45, 2 * RUN + 11)
TRAINING = (14, 17)  # NORM_SUMS and NORM_BACKWARD_SUMS of ``cpu.c``: a block's end in training, forward and backward
Case = tuple[int, torch.dtype, bool, tuple[int, int, int]]
PLANES = [kernel for kernel in Kernel if kernel < Kernel.RELU_SQUARE]
ELEMENTWISE = [kernel for kernel in Kernel if Kernel.RELU_SQUARE <= kernel <= Kernel.BLEND_SQUARE_BACKWARD]
CASES: list[Case] = [
    *itertools.product(PLANES, FORMATS, (False, True), SHAPES),
    *itertools.product(ELEMENTWISE, FORMATS, (False,), [(1, 1, count) for count in RUNS]),
    *itertools.product(TRAINING, FORMATS, (False, True), SHAPES),
]


@functools.cache
def build(compiler: str) -> Path:
    """The program of ``cpu_harness.c``, without shared libraries; skips where there is no such compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    sources = map(str, (HERE / "cpu_harness.c", SOURCES / "cpu_avx512.c"))
    flags = ("-O3", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-static", f"-I{SOURCES}")
    subprocess.run((compiler, *flags, *sources, "-o", str(folder / "harness")), check=True)
    return folder / "harness"


def on_x86() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"this machine is {platform.machine()}, not x86")


def emulator(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def maps_of(case: Case) -> list[Tensor]:
    """X, grad, residual and result of a case, each n × c × hw."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    maps = [torch.randn(case[3], generator=generator).to(case[1]) for _ in range(4)]
    return [*maps[:3], maps[3].relu()]


def factor_of(case: Case) -> Tensor:
    n, c, hw = case[3]
    width = 2 * padded(c) if case[0] in TRAINING else max(n * c, -(-hw // RUN))
    return torch.linspace(-1, 1, 2 * width).view(2, -1)


def padded(channels: int) -> int:
    return -(-channels // GROUP) * GROUP


def in_memory(tensor: Tensor, channels_last: bool) -> bytes:
    ordered = tensor.transpose(1, 2) if channels_last else tensor
    return ordered.contiguous().view(torch.uint8).numpy().tobytes()


def encode(case: Case) -> bytes:
    kernel, dtype, channels_last, (n, c, hw) = case
    factor, maps = factor_of(case), maps_of(case)
    head = (kernel, FORMATS.index(dtype), channels_last, n, c, hw, n * c * hw * dtype.itemsize, factor.shape[1])
    planes = b"".join(in_memory(each, channels_last) for each in maps)
    return struct.pack("8q2f", *head, ALPHA, BETA) + factor.numpy().tobytes() + planes


def decode(case: Case, written: bytes) -> tuple[Tensor, Tensor, Tensor]:
    """Y, dresidual and the two rows of per_plane, in float64."""
    _, dtype, channels_last, (n, c, hw) = case
    size = n * c * hw * dtype.itemsize
    shape = (n, hw, c) if channels_last else (n, c, hw)
    maps = [
        torch.frombuffer(bytearray(written[k * size : (k + 1) * size]), dtype=dtype).view(shape).double()
        for k in (0, 1)
    ]
    per_plane = torch.frombuffer(bytearray(written[2 * size :]), dtype=torch.float32).view(2, -1).double()
    y, dresidual = (each.transpose(1, 2) if channels_last else each for each in maps)
    return y, dresidual, per_plane


def expected(case: Case) -> dict[str, Tensor]:
    """The outputs that the kernel has, by the formulas, in float64."""
    kernel, _, _, (n, c, _) = case
    x, grad, residual, result = (each.double() for each in maps_of(case))
    factor = factor_of(case).double()
    if kernel in TRAINING:
        return _training(kernel == TRAINING[1], x, grad, residual, result, factor[:, :c])
    if kernel >= Kernel.RELU_SQUARE:
        return _elementwise(kernel, x, grad)
    if kernel in (Kernel.POOL_BACKWARD, Kernel.POOL_BOTH_BACKWARD):
        both = kernel == Kernel.POOL_BOTH_BACKWARD
        scale, shift = (factor[row, : n * c].view(n, c, 1) for row in (int(both), 0))
        return {"y": x * scale + (shift if both else 0)}
    mean, square = x.mean(2).flatten(), x.square().mean(2).flatten()
    if kernel in (Kernel.POOL, Kernel.POOL_BOTH):
        return {"first": square} if kernel == Kernel.POOL else {"first": mean, "second": square}
    x.requires_grad_()
    alpha, beta = (
        torch.full((n, c, 1), float(torch.tensor(value))).double().requires_grad_() for value in (ALPHA, BETA)
    )
    g = x.square().mean(2, keepdim=True)
    excited = x * (1 - beta + beta * g / (g + alpha.square()))
    if kernel == Kernel.EXCITE:
        return {"y": excited.detach()}
    if kernel == Kernel.EXCITE_ADD_RELU:
        return {"y": (excited + residual).relu().detach()}
    masked = grad * (result > 0) if kernel == Kernel.EXCITE_ADD_RELU_BACKWARD else grad
    dx, dalpha, dbeta = torch.autograd.grad(excited, (x, alpha, beta), masked)
    found = {"y": dx, "first": dalpha.flatten(), "second": dbeta.flatten()}
    return found | ({"dresidual": masked} if kernel == Kernel.EXCITE_ADD_RELU_BACKWARD else {})


def _training(
    backward: bool, x: Tensor, grad: Tensor, residual: Tensor, result: Tensor, factor: Tensor
) -> dict[str, Tensor]:
    """Rows of ``per_channel`` in pairs: mean and variance; or the gradients of weight and bias, and of α and β."""
    c = x.shape[1]
    x.requires_grad_()
    weight, bias = (row.clone().requires_grad_() for row in factor)
    alpha, beta = (torch.full((c, 1), float(torch.tensor(value))).double().requires_grad_() for value in (ALPHA, BETA))
    y = torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0, 0.1)
    g = y.square().mean(2, keepdim=True)
    y = y * (1 - beta + beta * g / (g + alpha.square()))

    def rows(*values: Tensor) -> Tensor:
        pads = [torch.nn.functional.pad(value.flatten(), (0, padded(c) - c)) for value in values]
        return torch.cat(pads).detach()

    if not backward:
        statistics = x.mean((0, 2)), x.var((0, 2), correction=0)
        return {"y": (y + residual).relu().detach(), "first": rows(*statistics)}
    masked = grad * (result > 0)
    dx, dweight, dbias, dalpha, dbeta = torch.autograd.grad(y, (x, weight, bias, alpha, beta), masked)
    return {"y": dx, "dresidual": masked, "first": rows(dweight, dbias), "second": rows(dalpha, dbeta)}


def _elementwise(kernel: int, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    beta = float(torch.tensor(BETA))
    if kernel == Kernel.RELU_SQUARE:
        return {"y": x.relu().square()}
    if kernel == Kernel.RELU_SQUARE_BACKWARD:
        return {"y": 2 * x.relu() * grad}
    if kernel == Kernel.BLEND_SQUARE:
        return {"y": x * (1 - beta + beta * x)}
    parts = torch.split((grad * x * (x - 1)).flatten(), RUN)
    return {"y": grad * (1 - beta + 2 * beta * x), "first": torch.stack([part.sum() for part in parts])}


def check(command: list[str], selected: int) -> None:
    """Runs every case, with vectors of at most ``selected``, which must be what was selected."""
    given = b"".join(map(encode, CASES))
    run = subprocess.run([*command, str(selected)], input=given, capture_output=True, check=False)
    assert run.returncode == 0, (run.returncode, run.stderr)
    assert run.stdout[0] == selected
    position = 1
    for case in CASES:
        n, c, hw = case[3]
        size = 2 * n * c * hw * case[1].itemsize + factor_of(case).numel() * 4
        y, dresidual, rows = decode(case, run.stdout[position : position + size])
        position += size
        found = {"y": y, "dresidual": dresidual, "first": rows[0], "second": rows[1]}
        for name, reference in expected(case).items():
            ours = found[name].flatten()[: reference.numel()].view_as(reference)
            tolerance = TOLERANCE[case[1]] if name in ("y", "dresidual") else TOLERANCE[torch.float32]
            # A part of dα and dβ is a sum of products that cancel.
            sums = n * hw if case[0] in TRAINING else hw
            atol = (
                tolerance * max(1.0, float(reference.abs().max())) * (sums**0.5 if name in ("first", "second") else 1)
            )
            assert torch.allclose(ours, reference, rtol=tolerance, atol=atol), (case, name)
    assert position == len(run.stdout)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("selected", [1, 2])
def test_each_instruction_set_of_this_machine(compiler: str, selected: int) -> None:
    program = str(build(compiler))
    supported = subprocess.run([program, "2"], input=b"", capture_output=True, check=True).stdout[0]
    if supported < selected:
        pytest.skip("this machine has no AVX-512" if supported else "the kernels do not run on this machine")
    check([program], selected)


def test_arm() -> None:
    program = build("aarch64-linux-gnu-gcc")
    check([emulator("qemu-aarch64"), str(program)], 1)


def test_x86_without_avx512_takes_the_narrower_vectors() -> None:
    on_x86()
    check([emulator("qemu-x86_64"), "-cpu", "Haswell", str(build("gcc"))], 1)


@pytest.mark.parametrize("processor", ["Nehalem", "IvyBridge"])
def test_x86_without_avx2_is_reported(processor: str) -> None:
    on_x86()
    command = [emulator("qemu-x86_64"), "-cpu", processor, str(build("gcc")), "2"]
    run = subprocess.run(command, input=b"", capture_output=True, check=False, env={"PATH": os.environ["PATH"]})
    assert (run.returncode, run.stdout) == (0, b"\0"), run.stderr
