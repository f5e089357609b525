"""A model as a file for another runtime, with proof that it says the same there."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare._files import atomic_write, ensure_writable, remove_stale_temps
from deepsquare.checkpoint import Preprocessing
from deepsquare.export.lowering import lower_for_export, lower_for_xnnpack
from deepsquare.export.quantize import quantize_onnx, quantize_program
from deepsquare.export.runtime import KEY, Metadata, Runtime, load_exported, require, runtime_of
from deepsquare.surgery import equip_record

TOLERANCE = 1e-4  # of the largest logit, in float32
ROUNDINGS = 4  # or as many times what PyTorch's own float32 is off by, for a network that amplifies rounding
AGREEING = 0.8  # of the first answers, below which there is a word
EXPLODING = 10  # times the usual largest logit; squares that follow one another do so on a few images
DEFAULT_IMAGES = 8  # images for the proof, if none are given
BATCH_SIZE = 64  # images
logger = logging.getLogger("deepsquare")


class ExportError(ValueError):
    """A model that a format cannot hold, or that says something else there."""


@dataclass(frozen=True)
class Export:
    """What was written, and how it compares with the model.

    Attributes:
        path: of the file.
        runtime: that it is for.
        precision: float32, or int8.
        size: of the file, in bytes.
        difference: the largest difference of a logit from the model's own in float64, relative to the largest logit.
        rounding: the same of the model itself in float32: no export can be expected to be much nearer.
        agreement: the share of images with the same first answer.
        num_images: how many these are of.
        outside: operations that ExecuTorch does not hand to XNNPACK, by name; empty for ONNX.
    """

    path: Path
    runtime: Runtime
    precision: str
    size: int
    max_rel_error: float
    fp32_error: float
    top1_agreement: float
    num_images: int
    undelegated_ops: dict[str, int]

    @property
    def undelegated_muls(self) -> int:
        """How many products, of which a square is one, XNNPACK does not run."""
        return sum(count for name, count in self.undelegated_ops.items() if name in ("mul", "pow", "square"))


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    preprocessing: Preprocessing,
    *,
    images: Tensor | None = None,
    calibration: Tensor | None = None,
    any_size: bool = False,
) -> Export:
    """Write the model in a runtime's own format, run it there and compare.

    Args:
        model: as :func:`deepsquare.load` gives it; it is left as it is.
        path: of the file, ending in ``.onnx``, or ``.pte`` for ExecuTorch; a failed export leaves nothing there.
        images: how a image becomes the input, which goes into the file.
        images: (N, 3, H, W) float32 to compare on, as the model wants them; random ones if not given.
        calibration: (N, 3, H, W) float32, some hundred images whose values the ranges of int8 are taken from; without
            them it stays float32. An int8 model is compared too, but differs.
        any_size: let the sides of the input vary too; ONNX only. The number of images always may there.
    """
    path = Path(path)
    runtime = runtime_of(path)
    if any_size and runtime != "onnx":
        raise ValueError("any size is for ONNX; XNNPACK's memory is planned for one size: export a file for each")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it")
    ensure_writable(path.parent)
    remove_stale_temps(path)
    model = copy.deepcopy(model).eval().float().cpu()
    if images is None:
        shape = (DEFAULT_IMAGES, 3, preprocessing.size, preprocessing.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    images, own = _finite(model, _checked("images", images, preprocessing))
    expected = compute_logits(copy.deepcopy(model).double(), images.double())
    fp32_error = _distance(own, expected)
    if preprocessing.classes and len(preprocessing.classes) != expected.shape[1]:
        names = len(preprocessing.classes)
        raise ValueError(f"images names {names} classes; expected {expected.shape[1]}, as the model tells apart")
    if len(images) > 1 and float(expected.std(0).max()) <= TOLERANCE * float(expected.abs().max()):
        logger.warning("the model says the same of every image, so that parity proves little; export a trained one")
    if calibration is not None:
        calibration = _usual(*_finite(model, _checked("calibration", calibration, preprocessing)))
    present, precision = equip_record(model), "float32" if calibration is None else "int8"
    origin = getattr(model, "deepsquare_config", None)
    described = Metadata(origin and origin.name, present.spec if present else "", precision, preprocessing)
    form = lower_for_export(model, images[:1], flatten_maps=runtime == "onnx" and not any_size)
    with _room(path), atomic_write(path) as temporary:
        named = temporary.with_name(temporary.name + path.suffix)  # runtimes go by it
        try:
            if runtime == "onnx":
                undelegated_ops = _write_onnx(form, images, described, named, calibration, any_size)
            else:
                undelegated_ops = _write_executorch(form, images[:1], described, named, calibration)
            said = load_exported(named)(images)
            named.replace(temporary)
        finally:
            named.unlink(missing_ok=True)
        max_rel_error, allowed = _distance(said, expected), max(TOLERANCE, ROUNDINGS * fp32_error)
        top1_agreement = float((said.argmax(1) == expected.argmax(1)).float().mean())
        if top1_agreement < AGREEING and len(images) > DEFAULT_IMAGES:
            logger.warning("the first answer is the same for %.0f%% only; measure the accuracy", 100 * top1_agreement)
        if calibration is None and not max_rel_error <= allowed:
            raise ExportError(
                f"the exported model differs by {max_rel_error:.1e} of the largest logit; expected at most {allowed:.1e}, "
                f"as PyTorch's own float32 differs by {fp32_error:.1e}. Nothing was written"
            )
    size = path.stat().st_size
    return Export(
        path, runtime, precision, size, max_rel_error, fp32_error, top1_agreement, len(images), undelegated_ops
    )


def _checked(name: str, images: Tensor, preprocessing: Preprocessing) -> Tensor:
    size = preprocessing.size
    if images.dtype != torch.float32 or images.ndim != 4 or images.shape[1:] != (3, size, size) or not len(images):
        given = f"{tuple(images.shape)} {str(images.dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} is {given}; expected (N, 3, {size}, {size}) float32, as images says")
    return images


def compute_logits(model: nn.Module, images: Tensor) -> Tensor:
    """What a classifier says of images, some at a time."""
    try:
        with torch.inference_mode():
            parts = [model(part) for part in torch.split(images, BATCH_SIZE)]
    except RuntimeError as error:
        raise ValueError(f"the model does not take images of {tuple(images.shape[1:])}: {error}") from error
    if not isinstance(parts[0], Tensor) or parts[0].ndim != 2:
        raise ValueError("the model's output is no tensor (N, K) of logits; expected a classifier")
    return torch.cat(parts)


def _finite(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The images for which the model has finite logits, and these; where a square overflows there is no parity."""
    logits = compute_logits(model, images)
    finite = logits.isfinite().all(1)
    if not finite.any():
        raise ValueError("the model's own logits are not finite on these images; export a trained model")
    if not finite.all():
        logger.warning("%d of %d images have no finite logits and are left out", int((~finite).sum()), len(images))
    return images[finite], logits[finite]


def _usual(images: Tensor, logits: Tensor) -> Tensor:
    """The images on which the network does not explode: a single one that does would set the ranges for all."""
    largest = logits.abs().amax(1)
    usual = largest <= EXPLODING * largest.median()
    if not usual.all():
        logger.warning("ranges leave out %d images on which the network explodes", int((~usual).sum()))
    return images[usual]


def _distance(said: Tensor, expected: Tensor) -> float:
    """The largest difference of a logit, relative to the largest logit."""
    return float((said - expected).abs().max() / expected.abs().max().clamp(min=torch.finfo().tiny))


def _write_onnx(
    form: nn.Module, images: Tensor, described: Metadata, path: Path, calibration: Tensor | None, any_size: bool
) -> dict[str, int]:
    onnx = require("onnx")
    require("onnxscript")
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {0: dynamic, 2: dynamic, 3: dynamic} if any_size else {0: dynamic}
    with _silent(), _told("ONNX", described):
        program: Any = torch.onnx.export(
            form, (images[:2],), dynamo=True, dynamic_shapes=(shapes,), input_names=["images"],
            output_names=["logits"], external_data=False, verbose=False,
        )  # fmt: skip
        proto = program.model_proto
        if calibration is not None:
            proto = quantize_onnx(proto, calibration)
    for node in proto.graph.node:
        del node.metadata_props[:]  # where in which file of this machine it came from
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, described.dumps()
    onnx.checker.check_model(proto)
    onnx.save(proto, str(path))
    return {}


def _write_executorch(
    form: nn.Module, images: Tensor, described: Metadata, path: Path, calibration: Tensor | None
) -> dict[str, int]:
    partition = require("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    exir = require("executorch.exir")
    with _silent(), _told("ExecuTorch", described):
        form = lower_for_xnnpack(form, images)
        if calibration is not None:
            form = quantize_program(form, calibration, images)
        exported = torch.export.export(form, (images,))
        lowered = exir.to_edge_transform_and_lower(
            exported, partitioner=[partition.XnnpackPartitioner()], constant_methods={KEY: described.dumps()}
        )
        undelegated_ops, program = _outside(lowered.exported_program()), lowered.to_executorch().buffer
    path.write_bytes(program)
    return undelegated_ops


def _outside(program: torch.export.ExportedProgram) -> dict[str, int]:
    """The operations that no delegate runs."""
    names = []
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_function" and name not in ("getitem", "executorch_call_delegate"):
            names.append(name.split(".")[-2] if "." in name else name)
    return dict(Counter(names).most_common())


@contextlib.contextmanager
def _told(format_name: str, described: Metadata) -> Iterator[None]:
    """An exporter's error as one of ours."""
    try:
        yield
    except Exception as error:  # of whichever class: each part of an exporter has its own
        cause = next((line for line in str(error.__cause__ or error).splitlines() if line.strip()), repr(error))
        what = f"{described.name or 'this model'}{' with ' + described.spec if described.spec else ''}"
        raise ExportError(f"{what} cannot be written for {format_name}: {cause.strip()}") from error


@contextlib.contextmanager
def _room(path: Path) -> Iterator[None]:
    """A full disk by its name."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a message of ours
            raise
        raise OSError(f"cannot write {path} ({error.strerror}); make room, or give another place") from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Exporters print progress, warn of what is theirs, and change how the process logs."""
    before, handlers = logging.root.manager.disable, logging.root.handlers[:]
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        logging.root.handlers[:] = handlers
