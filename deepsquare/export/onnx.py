"""ONNX files, run by onnxruntime on the CPU."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.export.base import METADATA_KEY, Metadata, Runtime, RuntimeModel, require

CALIBRATION_BATCH_SIZE = 16
PERCENTILE = 99.9  # of an activation's values lie within its range: the largest values of a square are outliers


class OnnxRuntime(Runtime):
    """Writes ONNX files and runs them in onnxruntime."""

    name, label, suffix = "onnx", "onnxruntime", ".onnx"
    modules = ("onnxruntime", "onnx", "onnxscript")
    dynamic_shapes = True
    # onnxruntime stores maps in blocks of channels, squares them in that layout and then reorders both the map and its
    # square; of a flattened map it reorders only the map.
    flatten_maps = True
    global_threads = False  # whether all models share one pool of threads instead of a pool for each

    def load(self, path: Path) -> RuntimeModel:
        onnxruntime = require("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        options.use_per_session_threads = not self.global_threads
        # Weights are in the file itself: one from a stranger must not read others beside it.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
        try:
            session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
            text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
            inputs, outputs = (  # read here: a name need not be UTF-8
                [(value.name, value.type, list(value.shape)) for value in values]
                for values in (session.get_inputs(), session.get_outputs())
            )
        except Exception as error:  # of classes that onnxruntime does not export
            raise ValueError(f"{path} is no ONNX file that onnxruntime can run: {_last_line(error)}") from error
        metadata = Metadata.loads(text, path)
        described = [(kind, len(shape)) for _, kind, shape in (*inputs, *outputs)]
        if len(inputs) != 1 or described != [("tensor(float)", 4), ("tensor(float)", 2)]:
            actual = "; ".join(f"{name[:40]}: {kind} {shape}" for name, kind, shape in (*inputs, *outputs)[:4])
            raise ValueError(
                f"{path} has {len(inputs)} inputs and {len(outputs)} outputs ({actual}); expected images (N, 3, H, W) "
                "and logits (N, K), as deepsquare export writes them"
            )

        input_name, _, shape = inputs[0]

        def run(images: Tensor) -> Tensor:
            try:
                return torch.from_numpy(session.run(None, {input_name: images.numpy()})[0])
            except Exception as error:  # of classes that onnxruntime does not export
                raise ValueError(f"{path} does not run on {tuple(images.shape)}: {_last_line(error)}") from error

        return RuntimeModel(metadata, tuple(shape), run)

    def convert(
        self, model: nn.Module, images: Tensor, metadata: Metadata, calibration: Tensor | None, any_size: bool
    ) -> tuple[bytes, dict[str, int]]:
        onnx = require("onnx")
        dims = dict.fromkeys((0, 2, 3) if any_size else (0,), torch.export.Dim.DYNAMIC)
        program: Any = torch.onnx.export(
            model, (images,), dynamo=True, dynamic_shapes=(dims,), input_names=["images"],
            output_names=["logits"], external_data=False, verbose=False,
        )  # fmt: skip
        proto = program.model_proto
        if calibration is not None:
            proto = self.quantize(proto, calibration)
        for node in proto.graph.node:
            del node.metadata_props[:]  # source files and lines of this machine
        entry = proto.metadata_props.add()
        entry.key, entry.value = METADATA_KEY, metadata.dumps()
        onnx.checker.check_model(proto)
        return proto.SerializeToString(), {}

    def quantize(self, model: Any, calibration: Tensor) -> Any:
        """An ONNX model in int8, with weights of seven bits.

        Without VNNI (AVX2 only), onnxruntime adds up pairs of products of unsigned and signed bytes in 16 bits, which
        weights of eight bits overflow.
        """
        onnx = require("onnx")
        quantization = require("onnxruntime.quantization")
        shape_inference = require("onnxruntime.quantization.shape_inference")
        count = max(1, len(calibration) // CALIBRATION_BATCH_SIZE) * CALIBRATION_BATCH_SIZE  # batches of equal size
        batches = iter(torch.split(calibration[:count], CALIBRATION_BATCH_SIZE))
        input_name = model.graph.input[0].name

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
            def get_next(self) -> dict[str, Any] | None:
                batch = next(batches, None)
                return None if batch is None else {input_name: batch.numpy()}

        with tempfile.TemporaryDirectory() as folder:
            source, prepared, quantized = (f"{folder}/{name}.onnx" for name in ("source", "prepared", "quantized"))
            onnx.save(model, source)
            shape_inference.quant_pre_process(source, prepared)
            nodes = onnx.load(prepared).graph.node
            squares = {node.output[0] for node in nodes if node.op_type == "Mul" and node.input[0] == node.input[1]}
            quantization.quantize_static(
                prepared, quantized, Reader(), per_channel=True, reduce_range=True,
                op_types_to_quantize=["Conv", "Gemm"], activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                nodes_to_exclude=[node.name for node in nodes if node.op_type == "Conv" and node.input[0] in squares],
                calibrate_method=quantization.CalibrationMethod.Percentile,
                extra_options={"CalibPercentile": PERCENTILE},
            )  # fmt: skip
            return onnx.load(quantized)

    def set_num_threads(self, num_threads: int) -> None:
        """One global pool; the pool of each session would spin for a while beside the session that runs next."""
        require("onnxruntime").set_global_thread_pool_sizes(num_threads, 1)
        self.global_threads = True


def _last_line(error: Exception) -> str:
    """Of a message of onnxruntime: those before are of its own sources."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]
