"""Square-Excitation in other ONNX operations than those of :mod:`deepsquare.export.lowering`, timed in onnxruntime.

An exported file is rewritten: the nodes of each excitation are replaced by another form of the same function. All forms
and the base network, which is measured twice, run in each round of one process, in random order.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tyro.conf import arg

from deepsquare.export import ExportError, export, load_exported
from deepsquare.export.base import require
from deepsquare.export.runtimes import RUNTIMES
from deepsquare.paper.bench import _common, deployment
from deepsquare.paper.deployment.parity import random_init_model
from deepsquare.paper.statistics import median, median_ratio
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import round_for_json

BACKBONES = ("resnet50", "shufflenet_v2_x1_0")
SPEC, EXPORTED = "pooling+excitation", "exported"
TOLERANCE = 1e-4  # relative to the largest logit, as for every export
Constant = NDArray[np.float32] | NDArray[np.int64]


@dataclass
class Block:
    """The nodes that replace one excitation, as they are added."""

    name: str
    x: str  # the map
    offset: NDArray[np.float32]  # α² for each channel
    hw: tuple[int, int]
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def add(self, op: str, *inputs: str | Constant, outputs: int = 1, **attributes: Any) -> str:
        """Append a node; returns the name of its last output."""
        helper = require("onnx.helper")
        names = [value if isinstance(value, str) else self._constant(value) for value in inputs]
        returned = [f"{self.name}_{op}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, names, returned, name=returned[0], **attributes))
        return returned[-1]

    def _constant(self, value: Constant) -> str:
        name = f"{self.name}_constant_{len(self.constants)}"
        self.constants.append(require("onnx.numpy_helper").from_array(value, name))
        return name

    def per_channel(self, values: NDArray[np.float32], spatial: int) -> NDArray[np.float32]:
        return values.reshape(1, -1, *[1] * spatial).astype(np.float32)

    def flattened(self, *tail: int) -> str:
        return self.add("Reshape", self.x, np.array([-1, len(self.offset), *tail], np.int64))

    def times(self, factor: str) -> str:
        """The map times the factor of the flattened map."""
        return self.add("Mul", self.x, self.add("Reshape", factor, np.array([-1, len(self.offset), 1, 1], np.int64)))

    def factor(self, g: str, offset: NDArray[np.float32]) -> str:
        """G / (G + α²)."""
        return self.add("Div", g, self.add("Add", g, offset))


def _maps(b: Block) -> str:
    """As exported, without the two reshapes around the mean."""
    g = b.add("ReduceMean", b.add("Mul", b.x, b.x), np.array([2, 3], np.int64))
    return b.add("Mul", b.x, b.factor(g, b.per_channel(b.offset, 2)))


def _global_average(b: Block) -> str:
    """A pooling, which runs in blocks of channels, instead of the mean."""
    g = b.add("GlobalAveragePool", b.add("Mul", b.x, b.x))
    return b.add("Mul", b.x, b.factor(g, b.per_channel(b.offset, 2)))


def _average_pool(b: Block) -> str:
    g = b.add("AveragePool", b.add("Mul", b.x, b.x), kernel_shape=list(b.hw))
    return b.add("Mul", b.x, b.factor(g, b.per_channel(b.offset, 2)))


def _global_lp_pool(b: Block) -> str:
    """√(H·W·G) in one operation, squared: H·W is folded into the constant."""
    root = b.add("GlobalLpPool", b.x, p=2)
    total = b.add("Mul", root, root)
    return b.add("Mul", b.x, b.factor(total, b.per_channel(b.offset * np.float32(np.prod(b.hw)), 2)))


def _sum_square(b: Block) -> str:
    """H·W·G in one operation."""
    x = b.flattened(int(np.prod(b.hw)))
    total = b.add("ReduceSumSquare", x, np.array([2], np.int64))
    return b.times(b.factor(total, b.per_channel(b.offset * np.float32(np.prod(b.hw)), 1)))


def _dot_products(b: Block) -> str:
    """H·W·G as a product of a row and a column for each channel."""
    n = int(np.prod(b.hw))
    total = b.add("MatMul", b.flattened(1, n), b.flattened(n, 1))  # (N, C, 1, 1)
    return b.add("Mul", b.x, b.factor(total, b.per_channel(b.offset * np.float32(n), 2)))


def _softsign(b: Block) -> str:
    """The mean and the division by α² in one product with a column; then (G / α²) / (1 + G / α²) is one operation."""
    n = int(np.prod(b.hw))
    x = b.flattened(n)
    column = np.full((n, 1), 1 / (n * b.offset[0]), np.float32)
    return b.times(b.add("Softsign", b.add("MatMul", b.add("Mul", x, x), column)))


def _reciprocal(b: Block) -> str:
    """1 − α² / (G + α²)."""
    x = b.flattened(int(np.prod(b.hw)))
    g = b.add("ReduceMean", b.add("Mul", x, x), np.array([2], np.int64))
    offset = b.per_channel(b.offset, 1)
    rest = b.add("Div", offset, b.add("Add", g, offset))
    return b.times(b.add("Sub", np.ones((1, 1, 1), np.float32), rest))


def _layer_norm(b: Block) -> str:
    """onnxruntime's RMS normalization with ε = α² also returns (G + α²)^−½; the factor is 1 − α² times its square."""
    n = int(np.prod(b.hw))
    x = b.flattened(n)
    inverse = b.add(
        "SimplifiedLayerNormalization", x, np.ones(n, np.float32), outputs=2, axis=-1, epsilon=float(b.offset[0])
    )
    rest = b.add("Mul", b.add("Mul", inverse, inverse), b.per_channel(b.offset, 1))
    return b.times(b.add("Sub", np.ones((1, 1, 1), np.float32), rest))


def _depthwise(b: Block) -> str:
    """The product with the factor as a depthwise 1×1 convolution, for one image: additions fuse into convolutions."""
    x = b.flattened(int(np.prod(b.hw)))
    g = b.add("ReduceMean", b.add("Mul", x, x), np.array([2], np.int64))
    weight = b.add("Reshape", b.factor(g, b.per_channel(b.offset, 1)), np.array([-1, 1, 1, 1], np.int64))
    return b.add("Conv", b.x, weight, group=len(b.offset), kernel_shape=[1, 1])


def _upsampled(b: Block) -> str:
    """All passes over the map in blocks of channels: the factor becomes a map too, as products there do not broadcast.

    The convolution multiplies by 1: it moves the factor into that layout.
    """
    channels = len(b.offset)
    g = b.add("GlobalAveragePool", b.add("Mul", b.x, b.x))
    factor = b.factor(g, b.per_channel(b.offset, 2))
    ones = np.ones((channels, 1, 1, 1), np.float32)
    factor = b.add("Conv", factor, ones, group=channels, kernel_shape=[1, 1])
    scales = np.array([1, 1, *b.hw], np.float32)
    factor = b.add(
        "Resize", factor, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    return b.add("Mul", b.x, factor)


FORMS: dict[str, Callable[[Block], str]] = {
    "maps": _maps,
    "global_average": _global_average,
    "average_pool": _average_pool,
    "global_lp_pool": _global_lp_pool,
    "sum_square": _sum_square,
    "dot_products": _dot_products,
    "softsign": _softsign,
    "reciprocal": _reciprocal,
    "layer_norm": _layer_norm,
    "depthwise": _depthwise,
    "upsampled": _upsampled,
}


def run(
    backbones: _common.Backbones = BACKBONES,
    forms: Annotated[Sequence[str], arg(help="Forms to compare with the exported one.")] = tuple(FORMS),
    *,
    rounds: _common.Rounds = 60,
    results: _common.Results = _common.RESULTS,
) -> None:
    """Square-Excitation in other ONNX operations, against the exported form and the plain network, in onnxruntime."""
    _common.check(results, rounds=rounds)
    if unknown := sorted(set(forms) - set(FORMS)):
        raise ValueError(f"the form is {unknown[0]!r}; expected one of {', '.join(FORMS)}")
    RUNTIMES["onnx"].require_modules()
    for backbone in backbones:
        start = time.perf_counter()
        metrics = _measure(backbone, forms, rounds)
        recipe = {"spec": SPEC, "rounds": rounds, "input": deployment.SIZE, "batch_size": 1}
        _common.append_row(results, f"excitation_onnx/{backbone}", recipe, metrics, start)
        _print(backbone, metrics, rounds)


def _measure(backbone: str, forms: Sequence[str], rounds: int) -> dict[str, Any]:
    """By form: the difference of the logits, and the latency for each number of threads."""
    size = deployment.SIZE
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {deployment.BASE: folder / "base.onnx", EXPORTED: folder / "exported.onnx"}
        for spec, path in zip(("", SPEC), paths.values(), strict=True):
            export(random_init_model(backbone, spec, images), path, Preprocessing(size=size), images=images)
        expected = load_exported(paths[EXPORTED])(images[:1])
        for form in forms:
            paths[form] = folder / f"{form}.onnx"
            rewrite(paths[EXPORTED], paths[form], FORMS[form])
            error = float((load_exported(paths[form])(images[:1]) - expected).abs().max() / expected.abs().max())
            if not error <= TOLERANCE:
                raise ExportError(f"{backbone} in the form {form} differs by {error:.1e} of the largest logit")
        paths[deployment.BASE_COPY] = paths[deployment.BASE]
        metrics: dict[str, Any] = {form: {} for form in paths}
        for threads in deployment.THREADS:
            measured = deployment.measure_latency(list(paths.values()), threads, rounds)
            seconds = dict(zip(paths, measured, strict=True))
            pairs = zip(seconds[deployment.BASE], seconds[deployment.BASE_COPY], strict=True)
            base = [sum(pair) / 2 for pair in pairs]
            for form, values in seconds.items():
                medians = {"seconds": median(values), "ratio": median_ratio(values, base)}
                metrics[form][str(threads)] = {name: round_for_json(value, 5) for name, value in medians.items()}
    return metrics


def rewrite(source: Path, target: Path, form: Callable[[Block], str]) -> int:
    """Write ``source`` with every excitation in another form; returns how many there are."""
    onnx = require("onnx")
    model = onnx.load(source)
    graph = model.graph
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    producers = {node.output[0]: node for node in graph.node}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    count = 0
    for product in [node for node in graph.node if node.op_type == "Mul"]:
        nodes = _excitation(product, producers)
        if not nodes:
            continue
        first, addition = nodes[0], nodes[3]
        batch, _, height, width = shapes[first.input[0]]
        offset = constants[addition.input[1]].astype(np.float32).ravel()
        block = Block(f"excitation_{count}", first.input[0], offset, (height.dim_value, width.dim_value))
        result = form(block)
        block.nodes.append(onnx.helper.make_node("Identity", [result], [product.output[0]], name=f"{block.name}_end"))
        for name in (node.output[0] for node in block.nodes if node.op_type == "Resize"):
            sides = [batch.dim_param, len(offset), *block.hw]  # onnxruntime cannot infer it for any batch size
            graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sides))
        position = list(graph.node).index(first)
        for old in nodes:
            graph.node.remove(old)
        for index, node in enumerate(block.nodes):
            graph.node.insert(position + index, node)
        graph.initializer.extend(block.constants)
        count += 1
    onnx.save(model, target)
    return count


def _excitation(product: Any, producers: dict[str, Any]) -> list[Any]:
    """The nodes of the excitation that ends with ``product``, the flattened map first; empty if it is none."""
    chain = [product]
    for op, index in (("Reshape", 1), ("Div", 0), ("Add", 1), ("ReduceMean", 0), ("Mul", 0), ("Reshape", 0)):
        node = producers.get(chain[-1].input[index])
        if node is None or node.op_type != op:
            return []
        chain.append(node)
    return chain[::-1]


def _print(backbone: str, metrics: dict[str, Any], rounds: int) -> None:
    headings = ("form", "1 thread, ms", "added, %", "2 threads, ms", "added, %")
    table = _common.make_table(f"{backbone} with {SPEC} in onnxruntime", f"median over {rounds} rounds", headings)
    for form, measured in metrics.items():
        cells = [{deployment.BASE: "base", deployment.BASE_COPY: "base, copy"}.get(form, form)]
        for threads in map(str, deployment.THREADS):
            value, low, high = (100 * ratio - 100 for ratio in measured[threads]["ratio"])
            cells += [f"{1e3 * measured[threads]['seconds'][0]:.2f}", f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"]
        table.add_row(*cells)
    from rich.console import Console

    Console().print(table)
