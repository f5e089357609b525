"""ExecuTorch programs (.pte) for phones and boards, delegated to XNNPACK."""

import io
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from deepsquare._files import append_checksum, verify_checksum
from deepsquare.export.base import METADATA_KEY, Metadata, Runtime, RuntimeModel, quiet, require


class ExecuTorch(Runtime):
    """Writes .pte files and runs them in ExecuTorch's Python runtime."""

    name, label, suffix = "executorch", "ExecuTorch", ".pte"
    modules = ("executorch.runtime",)
    delegate = "XNNPACK"

    def load(self, path: Path) -> RuntimeModel:
        """A .pte file in ExecuTorch's runtime; it runs in batches of the file's size, the last one padded."""
        runtime = require("executorch.runtime")
        _check_content(path)
        try:
            with quiet():
                program = runtime.Runtime.get().load_program(path)
                methods = program.method_names
                inputs = program.load_method("forward").metadata
            text = program.load_method(METADATA_KEY).execute([])[0] if METADATA_KEY in methods else None
            shape = tuple(inputs.input_tensor_meta(0).sizes()) if inputs.num_inputs() == 1 else ()
        except RuntimeError as error:
            raise ValueError(f"{path} is no complete ExecuTorch program ({error}); export it again") from error
        if len(shape) != 4:
            reason = f"takes {inputs.num_inputs()} inputs, the first of shape {shape}; expected images (N, 3, H, W)"
            raise ValueError(f"{path} {reason}")

        def run(images: Tensor) -> Tensor:
            logits, forward = [], program.load_method("forward")  # cached by the program
            for batch in torch.split(images, shape[0]):
                padded = torch.cat((batch, batch[:1].expand(shape[0] - len(batch), *batch.shape[1:])))
                logits.append(forward.execute([padded])[0][: len(batch)].clone())
            return torch.cat(logits)

        return RuntimeModel(Metadata.loads(text, path), shape, run)

    def convert(
        self, model: nn.Module, images: Tensor, metadata: Metadata, calibration: Tensor | None, any_size: bool
    ) -> tuple[bytes, dict[str, int]]:
        """The content of a .pte file; its memory is planned for one batch size and one image size."""
        partitioner = require("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        exir = require("executorch.exir")
        model = rewrite_for_xnnpack(model, images)
        if calibration is not None:
            model = self.quantize(model, calibration)
        lowered = exir.to_edge_transform_and_lower(
            torch.export.export(model, (images,)),
            partitioner=[partitioner.XnnpackPartitioner()],
            constant_methods={METADATA_KEY: metadata.dumps()},
        )
        undelegated_ops = _undelegated_ops(lowered.exported_program())
        buffer = io.BytesIO(lowered.to_executorch().buffer)
        append_checksum(buffer)
        return buffer.getvalue(), undelegated_ops

    def quantize(self, model: nn.Module, calibration: Tensor) -> nn.Module:
        """A module that XNNPACK runs in int8, calibrated one image at a time."""
        quantizers = require("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
        pt2e = require("torchao.quantization.pt2e.quantize_pt2e")
        quantizer = quantizers.XNNPACKQuantizer()
        quantizer.set_global(quantizers.get_symmetric_quantization_config(is_per_channel=True))
        quantizer.set_filter_function(_is_quantizable)
        prepared = pt2e.prepare_pt2e(torch.export.export(model, (calibration[:1],)).module(), quantizer)
        with torch.no_grad():
            for image in torch.split(calibration, 1):
                prepared(image)
        quantized: nn.Module = pt2e.convert_pt2e(prepared)
        return quantized

    def set_num_threads(self, num_threads: int) -> None:
        require("executorch.extension.pybindings.portable_lib")._unsafe_reset_threadpool(num_threads)


def _check_content(path: Path) -> None:
    """Raise unless a file is as it was written: on a damaged one ExecuTorch may abort the process."""
    with path.open("rb") as file:
        if file.read(6)[4:] != b"ET":
            raise ValueError(f"{path} is no ExecuTorch program; give a file that deepsquare export wrote")
    intact = verify_checksum(path)
    if intact is None:
        raise ValueError(
            f"{path} has no checksum at its end: it is truncated, or another program or an early deepsquare wrote it; "
            "export it again"
        )
    if not intact:
        raise ValueError(f"{path} is damaged: its checksum is another; fetch or export it again")


def rewrite_for_xnnpack(model: nn.Module, images: Tensor) -> fx.GraphModule:
    """``model`` as a graph with slices instead of splits, and means that keep their dimensions.

    XNNPACK takes no others; without this a ShuffleNetV2 is divided into fifteen partitions.
    """
    program = torch.export.export(model, (images,)).module()
    assert isinstance(program, fx.GraphModule)
    graph, aten = program.graph, torch.ops.aten
    for node in list(graph.nodes):
        if node.target in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
            dim = node.args[2] if len(node.args) > 2 else 0
            ends = list(accumulate(chunk.shape[dim] for chunk in node.meta["val"]))
            for chunk in list(node.users):
                index = chunk.args[1]
                start = ends[index - 1] if index else 0
                _replace(graph, chunk, aten.slice.Tensor, (node.args[0], dim, start, ends[index]))
            graph.erase_node(node)
        elif node.target is aten.mean.dim and node.args[2:] in ((), (False,)) and not node.kwargs:
            with graph.inserting_before(node):
                mean = graph.call_function(aten.mean.dim, (*node.args[:2], True))
            _replace(graph, node, aten.view.default, (mean, list(node.meta["val"].shape)))
    program.recompile()
    return program


def _replace(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        node.replace_all_uses_with(graph.call_function(target, args))
    graph.erase_node(node)


def _is_quantizable(node: fx.Node) -> bool:
    """Whether XNNPACK may run a node in int8: not squares, what reads them, nor concatenations."""
    aten = torch.ops.aten
    source = node.args[0] if node.args else None
    if node.target in (aten.mul.Tensor, aten.cat.default):
        return False
    if not isinstance(source, fx.Node):
        return True  # a weight; the node that reads it decides
    adds_alpha = node.target is aten.add.Tensor and source.target is aten.mean.dim  # G + α² of Square-Excitation
    reads_square = source.target is aten.mul.Tensor and source.args[0] is source.args[1]
    return not (adds_alpha or reads_square)


def _undelegated_ops(program: torch.export.ExportedProgram) -> dict[str, int]:
    """The operations outside of delegated partitions, by name."""
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    names = [getattr(target, "__name__", str(target)) for target in calls]
    names = [name.split(".")[-2] if "." in name else name for name in names]
    return dict(Counter(name for name in names if name not in ("getitem", "executorch_call_delegate")).most_common())
