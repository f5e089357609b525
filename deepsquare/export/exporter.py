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

from deepsquare._files import clear, make_writable, replacing
from deepsquare.checkpoint import Pictures
from deepsquare.export.lowering import graph_form, xnnpack_form
from deepsquare.export.quantize import quantise_onnx, quantise_program
from deepsquare.export.runtime import KEY, Description, Runtime, needed, open_program, runtime_of
from deepsquare.surgery import equipment

TOLERANCE = 1e-4  # of the largest logit, in float32
ROUNDINGS = 4  # or as many times what PyTorch's own float32 is off by, for a network that amplifies rounding
AGREEING = 0.8  # of the first answers, below which there is a word
EXPLODING = 10  # times the usual largest logit; squares that follow one another do so on a few pictures
SOME = 8  # pictures for the proof, if none are given
AT_ONCE = 64  # pictures
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
        agreement: the share of pictures with the same first answer.
        pictures: how many these are of.
        outside: operations that ExecuTorch does not hand to XNNPACK, by name; empty for ONNX.
    """

    path: Path
    runtime: Runtime
    precision: str
    size: int
    difference: float
    rounding: float
    agreement: float
    pictures: int
    outside: dict[str, int]

    @property
    def squares_outside(self) -> int:
        """How many products, of which a square is one, XNNPACK does not run."""
        return sum(count for name, count in self.outside.items() if name in ("mul", "pow", "square"))


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    pictures: Pictures,
    *,
    images: Tensor | None = None,
    calibration: Tensor | None = None,
    any_size: bool = False,
) -> Export:
    """Write the model in a runtime's own format, run it there and compare.

    Args:
        model: as :func:`deepsquare.load` gives it; it is left as it is.
        path: of the file, ending in ``.onnx``, or ``.pte`` for ExecuTorch; a failed export leaves nothing there.
        pictures: how a picture becomes the input, which goes into the file.
        images: (N, 3, H, W) float32 to compare on, as the model wants them; random ones if not given.
        calibration: (N, 3, H, W) float32, some hundred pictures whose values the ranges of int8 are taken from; without
            them it stays float32. An int8 model is compared too, but differs.
        any_size: let the sides of the input vary too; ONNX only. The number of pictures always may there.
    """
    path = Path(path)
    runtime = runtime_of(path)
    if any_size and runtime != "onnx":
        raise ValueError("any size is for ONNX; XNNPACK's memory is planned for one size: export a file for each")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it")
    make_writable(path.parent)
    clear(path)
    model = copy.deepcopy(model).eval().float().cpu()
    if images is None:
        shape = (SOME, 3, pictures.size, pictures.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    images, own = _finite(model, _checked("images", images, pictures))
    expected = logits_of(copy.deepcopy(model).double(), images.double())
    rounding = _distance(own, expected)
    if pictures.classes and len(pictures.classes) != expected.shape[1]:
        names = len(pictures.classes)
        raise ValueError(f"pictures names {names} classes; expected {expected.shape[1]}, as the model tells apart")
    if len(images) > 1 and float(expected.std(0).max()) <= TOLERANCE * float(expected.abs().max()):
        logger.warning("the model says the same of every picture, so that parity proves little; export a trained one")
    if calibration is not None:
        calibration = _usual(*_finite(model, _checked("calibration", calibration, pictures)))
    present, precision = equipment(model), "float32" if calibration is None else "int8"
    origin = getattr(model, "deepsquare_origin", None)
    described = Description(origin and origin.name, present.spec if present else "", precision, pictures)
    form = graph_form(model, images[:1], flat=runtime == "onnx" and not any_size)
    with _room(path), replacing(path) as temporary:
        named = temporary.with_name(temporary.name + path.suffix)  # runtimes go by it
        try:
            if runtime == "onnx":
                outside = _write_onnx(form, images, described, named, calibration, any_size)
            else:
                outside = _write_executorch(form, images[:1], described, named, calibration)
            said = open_program(named)(images)
            named.replace(temporary)
        finally:
            named.unlink(missing_ok=True)
        difference, allowed = _distance(said, expected), max(TOLERANCE, ROUNDINGS * rounding)
        agreement = float((said.argmax(1) == expected.argmax(1)).float().mean())
        if agreement < AGREEING and len(images) > SOME:
            logger.warning("the first answer is the same for %.0f%% only; measure the accuracy", 100 * agreement)
        if calibration is None and not difference <= allowed:
            raise ExportError(
                f"the exported model differs by {difference:.1e} of the largest logit; expected at most {allowed:.1e}, "
                f"as PyTorch's own float32 differs by {rounding:.1e}. Nothing was written"
            )
    size = path.stat().st_size
    return Export(path, runtime, precision, size, difference, rounding, agreement, len(images), outside)


def _checked(name: str, images: Tensor, pictures: Pictures) -> Tensor:
    size = pictures.size
    if images.dtype != torch.float32 or images.ndim != 4 or images.shape[1:] != (3, size, size) or not len(images):
        given = f"{tuple(images.shape)} {str(images.dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} is {given}; expected (N, 3, {size}, {size}) float32, as pictures says")
    return images


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """What a classifier says of pictures, some at a time."""
    try:
        with torch.inference_mode():
            parts = [model(part) for part in torch.split(images, AT_ONCE)]
    except RuntimeError as error:
        raise ValueError(f"the model does not take pictures of {tuple(images.shape[1:])}: {error}") from error
    if not isinstance(parts[0], Tensor) or parts[0].ndim != 2:
        raise ValueError("the model's output is no tensor (N, K) of logits; expected a classifier")
    return torch.cat(parts)


def _finite(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures for which the model has finite logits, and these; where a square overflows there is no parity."""
    logits = logits_of(model, images)
    finite = logits.isfinite().all(1)
    if not finite.any():
        raise ValueError("the model's own logits are not finite on these pictures; export a trained model")
    if not finite.all():
        logger.warning("%d of %d pictures have no finite logits and are left out", int((~finite).sum()), len(images))
    return images[finite], logits[finite]


def _usual(images: Tensor, logits: Tensor) -> Tensor:
    """The pictures on which the network does not explode: a single one that does would set the ranges for all."""
    largest = logits.abs().amax(1)
    usual = largest <= EXPLODING * largest.median()
    if not usual.all():
        logger.warning("ranges leave out %d pictures on which the network explodes", int((~usual).sum()))
    return images[usual]


def _distance(said: Tensor, expected: Tensor) -> float:
    """The largest difference of a logit, relative to the largest logit."""
    return float((said - expected).abs().max() / expected.abs().max().clamp(min=torch.finfo().tiny))


def _write_onnx(
    form: nn.Module, images: Tensor, described: Description, path: Path, calibration: Tensor | None, any_size: bool
) -> dict[str, int]:
    onnx = needed("onnx")
    needed("onnxscript")
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {0: dynamic, 2: dynamic, 3: dynamic} if any_size else {0: dynamic}
    with _silent(), _told("ONNX", described):
        program: Any = torch.onnx.export(
            form, (images[:2],), dynamo=True, dynamic_shapes=(shapes,), input_names=["images"],
            output_names=["logits"], external_data=False, verbose=False,
        )  # fmt: skip
        proto = program.model_proto
        if calibration is not None:
            proto = quantise_onnx(proto, calibration)
    for node in proto.graph.node:
        del node.metadata_props[:]  # where in which file of this machine it came from
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, described.dumps()
    onnx.checker.check_model(proto)
    onnx.save(proto, str(path))
    return {}


def _write_executorch(
    form: nn.Module, images: Tensor, described: Description, path: Path, calibration: Tensor | None
) -> dict[str, int]:
    partition = needed("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    exir = needed("executorch.exir")
    with _silent(), _told("ExecuTorch", described):
        form = xnnpack_form(form, images)
        if calibration is not None:
            form = quantise_program(form, calibration, images)
        exported = torch.export.export(form, (images,))
        lowered = exir.to_edge_transform_and_lower(
            exported, partitioner=[partition.XnnpackPartitioner()], constant_methods={KEY: described.dumps()}
        )
        outside, program = _outside(lowered.exported_program()), lowered.to_executorch().buffer
    path.write_bytes(program)
    return outside


def _outside(program: torch.export.ExportedProgram) -> dict[str, int]:
    """The operations that no delegate runs."""
    names = []
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_function" and name not in ("getitem", "executorch_call_delegate"):
            names.append(name.split(".")[-2] if "." in name else name)
    return dict(Counter(names).most_common())


@contextlib.contextmanager
def _told(format_name: str, described: Description) -> Iterator[None]:
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
