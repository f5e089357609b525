"""The kernels: equal to the eager reference in float64, in value and gradient; selected only where they apply."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from deepsquare import functional as DF
from deepsquare import kernels
from deepsquare.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")

ALPHA = 0.7
Shape = tuple[int, ...]
# Each function of a map F, α and a residual R; it takes what it needs.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu_square": lambda x, alpha, residual: DF.relu_square(x),
    "square_pooling": lambda x, alpha, residual: DF.square_pooling(x),
    "square_excitation": lambda x, alpha, residual: DF.square_excitation(x, alpha),
    "square_excitation_add_relu": DF.square_excitation_add_relu,
    # With β, a part of α: so the gradient of α is checked with that of β in it, in more parts than one.
    "blended_square": lambda x, alpha, residual: DF.square(x, alpha),
    "blended_pooling": lambda x, alpha, residual: DF.square_pooling(x, beta=alpha),
    "blended_excitation": lambda x, alpha, residual: DF.square_excitation(x, alpha, alpha / 2),
    "blended_excitation_add_relu": lambda x, alpha, residual: DF.square_excitation_add_relu(
        x, alpha, residual, alpha / 2
    ),
}
ELEMENTWISE = ("relu_square", "blended_square")
POOLINGS = ("square_pooling", "blended_pooling")
BLOCK_ENDS = ("square_excitation_add_relu", "blended_excitation_add_relu")
# Planes of less than a vector, of whole vectors and of a rest; few and many channels; two blocks of a sum.
SHAPES = [
    (2, 3, 1, 2),
    (1, 5, 3, 3),
    (2, 9, 7, 7),
    (3, 16, 4, 4),
    (2, 33, 14, 15),
    (1, 17, 14, 14),
    (1, 2, 70, 90),
    (2, 20, 3),
    (2, 3, 2, 3, 4),
]
LAYOUTS = ["contiguous", "channels_last"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
functions = pytest.mark.parametrize("name", FUNCTIONS)


def made(shape: Shape, dtype: torch.dtype = torch.float32, layout: str = "contiguous", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if layout == "channels_last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.to(dtype)


def inputs(shape: Shape, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> tuple[Tensor, ...]:
    return made(shape, dtype, layout).requires_grad_(), torch.tensor([ALPHA], requires_grad=True), \
        made(shape, dtype, layout, seed=1).requires_grad_()  # fmt: skip


def results(name: str, given: tuple[Tensor, ...], gradient: Tensor | None = None) -> list[Tensor]:
    """The value, and the gradients of what the function takes."""
    y = FUNCTIONS[name](*given)
    if gradient is None:
        gradient = made(tuple(y.shape), seed=2).to(y.dtype)
    return [y.detach(), *(g for g in torch.autograd.grad(y, given, gradient, allow_unused=True) if g is not None)]


@functions
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients_are_those_of_float64(
    name: str, shape: Shape, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(shape, dtype, layout)
    called: list[cpu.Kernel] = []
    launch = cpu.launch

    def counted(kernel: cpu.Kernel, *args: Tensor, **kwargs: Tensor) -> None:
        called.append(kernel)
        launch(kernel, *args, **kwargs)

    monkeypatch.setattr(cpu, "launch", counted)
    found = results(name, given)
    dense = layout == "contiguous" or len(shape) > 3
    assert len(called) == (2 if dense or (name in ELEMENTWISE and given[0].is_contiguous()) else 0), called
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    expected = results(name, exact, made(tuple(found[0].shape), seed=2).to(found[0].dtype).double())
    if name in BLOCK_ENDS and dtype != torch.float32:  # a sum that rounds to 0 is 0 for the ReLU
        lost = (found[0] == 0) & (expected[0] > 0)
        assert lost.float().mean() < 0.01
        if lost.any():
            found, expected = found[:1], expected[:1]
    assert len(found) == len(expected)
    for ours, reference in zip(found, expected, strict=True):
        bound = TOLERANCE[dtype] * float(reference.abs().max()) * (4 if reference.numel() == 1 else 1)
        torch.testing.assert_close(ours.double(), reference, rtol=TOLERANCE[dtype], atol=bound)
    assert found[0].dtype == dtype
    if name not in POOLINGS:
        assert found[0].stride() == given[0].stride(), "the layout is kept"


@functions
def test_equal_to_the_eager_reference(name: str) -> None:
    given = inputs((2, 6, 9, 11))
    found = results(name, given)
    with kernels.without_kernels():
        eager = results(name, given)
    torch.testing.assert_close(found, eager, rtol=2e-6, atol=2e-6)


@functions
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_threads_gives_the_same_bits(name: str, layout: str) -> None:
    given, before = inputs((1, 70, 31, 47), layout=layout), torch.get_num_threads()  # one image, in parts
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(name, given))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_large_maps_past_the_caches() -> None:
    x, residual = made((2, 70, 190, 190)), made((2, 70, 190, 190), seed=1)  # 20 MB: results are streamed to memory
    for layout in (torch.contiguous_format, torch.channels_last):
        given = (
            x.contiguous(memory_format=layout).requires_grad_(),
            torch.tensor([ALPHA], requires_grad=True),
            residual.requires_grad_(),
        )
        for name in FUNCTIONS:
            found = results(name, given)
            with kernels.without_kernels():
                torch.testing.assert_close(found, results(name, given), rtol=5e-6, atol=5e-6)


def test_another_default_device() -> None:
    x, alpha = made((2, 3, 8, 8)), torch.tensor([ALPHA])
    expected = DF.square_pooling(x), DF.square_excitation(x, alpha)
    with torch.device("meta"):
        found = DF.square_pooling(x), DF.square_excitation(x, alpha)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_infinities_in_gradients_stay_where_they_are() -> None:
    x = torch.tensor([1.0, 1.0, 2.0, 3.0]).view(1, 1, 2, 2).requires_grad_()
    alpha = torch.zeros(1, requires_grad=True)
    gradient = torch.tensor([math.inf, 1.0, 1.0, 1.0]).view(1, 1, 2, 2)
    found = torch.autograd.grad(DF.square_excitation(x, alpha), (x, alpha), gradient)
    assert found[0].flatten().tolist() == [math.inf, 1, 1, 1]  # α = 0 is the identity
    assert found[1].item() == 0
    t = torch.tensor([-1.0, 2e38, 2e38, 0.0], requires_grad=True)
    (of_t,) = torch.autograd.grad(DF.relu_square(t), t, torch.tensor([math.inf, 0.0, 0.1, math.inf]))
    torch.testing.assert_close(of_t, torch.tensor([0.0, 0.0, 4e37, 0.0]))


def test_inplace_bumps_the_version_and_is_skipped_for_overlapping_inputs() -> None:
    x = made((1, 2, 4, 4)).requires_grad_()
    z = x * 1.0
    y = (z * z).sum()
    with torch.no_grad():
        DF.square_excitation_add_relu(z, torch.tensor([ALPHA]), torch.zeros_like(z), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y)
    both = made((4, 3, 7, 7))
    expected = DF.square_excitation_add_relu(both[1:].clone(), torch.tensor([ALPHA]), both[:3].clone())
    found = DF.square_excitation_add_relu(both[1:], torch.tensor([ALPHA]), both[:3], inplace=True)  # they overlap
    assert torch.equal(found, expected)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("side", [3, 7, 20])
def test_few_images_are_split_among_threads_and_may_be_overwritten(batch: int, side: int) -> None:
    shape = (batch, 2100, side, side)  # in channels_last an image is cut into two chunks, and into parts of its rows
    residual, alpha = made(shape, seed=1), torch.tensor([ALPHA])
    for layout in (torch.contiguous_format, torch.channels_last):
        x = made(shape).contiguous(memory_format=layout)
        for name in FUNCTIONS:
            given = (x.clone().requires_grad_(), alpha.clone().requires_grad_(), residual.clone().requires_grad_())
            found = results(name, given)
            atol = 5e-4 if name.startswith("blended") else 5e-5  # two sums, of 6,300 planes or 2.5 million values
            with kernels.without_kernels():
                torch.testing.assert_close(found, results(name, given), rtol=5e-6, atol=atol)
        expected, place = DF.square_excitation_add_relu(x, alpha, residual), x.clone()
        written = DF.square_excitation_add_relu(place, alpha, residual, inplace=True)
        assert written.data_ptr() == place.data_ptr()
        assert torch.equal(written, expected)
        asked = x.clone().requires_grad_()
        kept = DF.square_excitation_add_relu(asked, alpha, residual, inplace=True)
        assert kept.data_ptr() != asked.data_ptr()  # its gradient needs it


@functions
def test_saves_only_its_input(name: str) -> None:
    given, kept = inputs((2, 4, 8, 8)), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = FUNCTIONS[name](*given)
    maps = [tensor for tensor in kept if tensor.numel() == given[0].numel()]
    expected = [given[0], y] if name in BLOCK_ENDS else [given[0]]
    assert sorted(tensor.data_ptr() for tensor in maps) == sorted(tensor.data_ptr() for tensor in expected)
    few = 2 if name != "blended_pooling" else 4 * given[0].shape[:2].numel() + 8  # α and β, or numbers of each plane
    assert sum(tensor.numel() for tensor in kept) <= sum(tensor.numel() for tensor in expected) + few


@functions
def test_second_derivatives(name: str) -> None:
    given = inputs((2, 3, 4, 5))

    def second(*tensors: Tensor) -> list[Tensor]:
        y = FUNCTIONS[name](*tensors)
        used = [tensors[0]] if name in ("relu_square", "square_pooling") else [*tensors[:2]]
        first = torch.autograd.grad((y * made(tuple(y.shape), seed=3).to(y.dtype)).sum(), used, create_graph=True)
        found = torch.autograd.grad(sum((g * g).sum() for g in first), used)  # type: ignore[arg-type]
        return list(found)

    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    for ours, reference in zip(second(*given), second(*exact), strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=1e-5)


# torch's own forward-mode AD still compiles a few formulas by TorchScript when first used
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@functions
def test_transforms_get_the_eager_reference(name: str) -> None:
    x, alpha, residual = (tensor.detach() for tensor in inputs((3, 2, 4, 4, 5)))
    batched = torch.vmap(lambda a, b: FUNCTIONS[name](a, alpha, b))(x, residual)
    one_by_one = torch.stack([FUNCTIONS[name](a, alpha, b) for a, b in zip(x, residual, strict=True)])
    torch.testing.assert_close(batched, one_by_one)
    gradient = torch.func.grad(lambda a: FUNCTIONS[name](a, alpha, residual[0]).sum())(x[0])
    leaf = x[0].clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(FUNCTIONS[name](leaf, alpha, residual[0]).sum(), leaf)[0])
    tangent = torch.func.jvp(lambda a: FUNCTIONS[name](a, alpha, residual[0]), (x[0],), (x[1],))[1]
    torch.testing.assert_close(tangent.sum(), (gradient * x[1]).sum(), rtol=1e-4, atol=1e-4)


@functions
def test_batched_gradients(name: str) -> None:
    given = inputs((2, 3, 4, 5))
    y = FUNCTIONS[name](*given)
    several = torch.stack([made(tuple(y.shape), seed=seed) for seed in range(3)])
    (found,) = torch.autograd.grad(y, given[0], several, is_grads_batched=True, retain_graph=True)
    for ours, gradient in zip(found, several, strict=True):
        torch.testing.assert_close(ours, torch.autograd.grad(y, given[0], gradient, retain_graph=True)[0])


@functions
def test_compilers_see_the_eager_reference(name: str) -> None:
    given = inputs((2, 3, 4, 5))
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*given), FUNCTIONS[name](*given))
    assert seen
    assert not any("ctypes" in target or "_Fused" in target for target in seen)


@functions
@pytest.mark.parametrize("change", ["step", "gap", "expanded", "transposed"])
def test_memory_with_gaps(name: str, change: str) -> None:
    x = made((4, 6, 6, 8))
    x = {
        "step": x[..., ::2],
        "gap": x[:, 1:4],
        "expanded": x[:, :1].expand(4, 6, 6, 8),
        "transposed": x.transpose(2, 3),
    }[change].requires_grad_()
    given = (x, torch.tensor([ALPHA], requires_grad=True), x.detach().clone().requires_grad_())
    dense = (x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(), *given[1:])
    torch.testing.assert_close(results(name, given), results(name, dense), rtol=1e-5, atol=2e-6)


@functions
def test_gradients_of_any_layout(name: str) -> None:
    given = inputs((2, 3, 4, 6))
    y = FUNCTIONS[name](*given)
    one = torch.ones((), dtype=y.dtype).expand(y.shape)
    for gradient in (one, made((*y.shape, 2), seed=4)[..., 0], torch.imag(torch.complex(one, one).conj())):
        (found,) = torch.autograd.grad(y, given[0], gradient, retain_graph=True)
        (expected,) = torch.autograd.grad(y, given[0], gradient.clone().resolve_neg(), retain_graph=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edges_of_excitation(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    planes = [[0.0] * 4, [1e-30] * 4, [largest] * 4, [math.inf, 1, 2, 3], [math.nan, 1, 2, 3], [-1.0, 0.5, 0.0, 2.0]]
    x = torch.tensor(planes, dtype=dtype).reshape(1, 6, 2, 2)
    for alpha in (torch.zeros(1), torch.full((1,), 1e-30), torch.ones(1), torch.full((1,), 1e20)):
        found = results(
            "square_excitation", (x.clone().requires_grad_(), alpha.requires_grad_(), x.clone().requires_grad_())
        )
        with kernels.without_kernels():
            eager = results(
                "square_excitation", (x.clone().requires_grad_(), alpha.requires_grad_(), x.clone().requires_grad_())
            )
        finite = [0, 1, 5]
        torch.testing.assert_close(found[0], eager[0], equal_nan=True)
        torch.testing.assert_close(found[1][:, finite], eager[1][:, finite])


def test_half_types_are_rounded_to_nearest_even() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)  # every number there is
        with kernels.without_kernels():
            expected = (x.float().clamp(min=0) ** 2).to(dtype)
        torch.testing.assert_close(DF.relu_square(x), expected, rtol=0, atol=0, equal_nan=True)


@functions
def test_without_a_library_the_eager_reference_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs((2, 3, 4, 5))
    found = results(name, given)
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert not kernels.backend_for(given[0])
    torch.testing.assert_close(results(name, given), found, rtol=2e-6, atol=2e-6)


def test_the_environment_turns_them_off() -> None:
    code = (
        "import torch; from deepsquare import kernels; print(kernels.backend_for(torch.ones(1, 2, 3, 4)) is not None)"
    )
    for value, expected in (("0", "False"), ("1", "True")):
        environment = {**os.environ, "DEEPSQUARE_KERNELS": value}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.strip() == expected


@functions
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allocates_nothing_but_its_results(name: str, dtype: torch.dtype, layout: str) -> None:
    """Guards against a slower form: another pass over the map needs memory to write to."""
    given = inputs((4, 64, 28, 28), dtype, layout)
    size = given[0].numel() * given[0].element_size()

    def allocated(call: Callable[[], Any]) -> tuple[Any, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = call()
        return result, sum(max(0, event.self_cpu_memory_usage) for event in profile.events() or ())

    y, forward = allocated(lambda: FUNCTIONS[name](*given))
    assert forward <= y.numel() * y.element_size() + 0.05 * size
    gradient = made(tuple(y.shape), dtype, layout if y.ndim == 4 else "contiguous")
    maps = 2 if name in BLOCK_ENDS else 1
    _, backward = allocated(lambda: torch.autograd.grad(y, given, gradient, allow_unused=True))
    assert backward <= maps * size + 0.05 * size
