"""Post-training quantisation to int8: what becomes integers, and what stays in float32.

A square doubles the dynamic range: of values that eight bits hold, those below a sixteenth of the largest vanish when
the square is rounded to eight bits again. So squares, the averages over them and the division of Square-Excitation are
computed in float32 from the integers before them, and so are the convolutions that read a square (Square-Encoding).
The other convolutions and the fully connected layers run in integers, weights with a scale for each output channel.
Maps are joined in float32: one range for an excited map and the plain one beside it would leave the smaller few steps.

In ONNX the weights take seven bits: where a processor has no instruction for it (AVX2 without VNNI), onnxruntime adds
up pairs of products of unsigned and signed bytes in 16 bits, which eight-bit weights overflow.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.export.runtime import require

CALIBRATION_BATCH_SIZE = 16  # images, in calibration
PERCENTILE = 99.9  # of an activation's values lie within its range: a square's largest are far out


def quantize_onnx(proto: Any, images: Tensor) -> Any:
    """An ONNX model with static quantisation, its ranges those that ``images`` show."""
    onnx = require("onnx")
    quantization = require("onnxruntime.quantization")
    shapes = require("onnxruntime.quantization.shape_inference")
    even = max(1, len(images) // CALIBRATION_BATCH_SIZE) * CALIBRATION_BATCH_SIZE  # it asks for parts of equal size
    parts = iter(torch.split(images[:even], CALIBRATION_BATCH_SIZE))
    name = proto.graph.input[0].name

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> dict[str, Any] | None:
            part = next(parts, None)
            return None if part is None else {name: part.numpy()}

    with tempfile.TemporaryDirectory() as folder:
        plain, ready, made = (str(Path(folder) / name) for name in ("plain.onnx", "ready.onnx", "made.onnx"))
        onnx.save(proto, plain)
        shapes.quant_pre_process(plain, ready)
        nodes = onnx.load(ready).graph.node
        squares = {node.output[0] for node in nodes if node.op_type == "Mul" and node.input[0] == node.input[1]}
        quantization.quantize_static(
            ready, made, Reader(), per_channel=True, reduce_range=True, op_types_to_quantize=["Conv", "Gemm"],
            activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=[node.name for node in nodes if node.op_type == "Conv" and node.input[0] in squares],
            calibrate_method=quantization.CalibrationMethod.Percentile,
            extra_options={"CalibPercentile": PERCENTILE},
        )  # fmt: skip
        return onnx.load(made)


def quantize_program(form: nn.Module, images: Tensor, one: Tensor) -> nn.Module:
    """A module to be exported for XNNPACK, with static quantisation; ``one`` is an input of the final shape."""
    quantizers = require("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    pt2e = require("torchao.quantization.pt2e.quantize_pt2e")
    quantizer = quantizers.XNNPACKQuantizer()
    quantizer.set_global(quantizers.get_symmetric_quantization_config(is_per_channel=True))
    quantizer.set_filter_function(_in_integers)
    prepared = pt2e.prepare_pt2e(torch.export.export(form, (one,)).module(), quantizer)
    with torch.no_grad():
        for part in torch.split(images, len(one)):
            if len(part) == len(one):
                prepared(part)
    quantised: nn.Module = pt2e.convert_pt2e(prepared)
    return quantised


def _in_integers(node: torch.fx.Node) -> bool:
    """Whether a node may be quantised for XNNPACK, by the node that it reads."""
    aten = torch.ops.aten
    read = node.args[0] if node.args else None
    if node.target in (aten.mul.Tensor, aten.cat.default):
        return False
    if not isinstance(read, torch.fx.Node):
        return True  # a weight, of whichever node reads it
    scales = node.target is aten.add.Tensor and read.target is aten.mean.dim  # G + α² of Square-Excitation
    square = read.target is aten.mul.Tensor and read.args[0] is read.args[1]
    return not (scales or square)
