"""Export a model to a runtime's format, run it there and compare its logits with the model's."""

import copy
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare._files import atomic_write, ensure_writable, exclusive, remove_stale_temps
from deepsquare._memory import explain_memory
from deepsquare.export.base import Metadata, Runtime, check_images, quiet
from deepsquare.export.lowering import lower_for_export
from deepsquare.export.runtimes import RUNTIMES, runtime_for
from deepsquare.preprocessing import Preprocessing
from deepsquare.surgery import equip_record

TOLERANCE = 1e-4  # of max_rel_error in float32
FP32_FACTOR = 4  # a network that amplifies rounding may instead reach this multiple of its own fp32_error
MIN_AGREEMENT = 0.8  # a lower top1_agreement is logged
OUTLIER_FACTOR = 10  # largest logit over its median: consecutive squares explode on a few images
DEFAULT_IMAGES = 8  # random images of the parity check, if none are given
BATCH_SIZE = 64
logger = logging.getLogger("deepsquare")


class ExportError(ValueError):
    """A model that a runtime cannot represent, or that gives other logits there."""


@dataclass(frozen=True)
class Export:
    """What was written, and how its logits compare with the model's in float64."""

    path: Path
    runtime: str  # its name
    precision: str  # float32 or int8
    size: int  # of the file, in bytes
    max_rel_error: float  # the largest difference of a logit, relative to the largest logit
    fp32_error: float  # the same for the model itself in float32; an export can hardly be nearer
    top1_agreement: float  # the fraction of images with the same top-1 class
    num_images: int  # of the comparison
    undelegated_ops: dict[str, int]  # operations that the runtime does not delegate, by name; empty for ONNX

    def metrics(self) -> dict[str, Any]:
        fields = ("max_rel_error", "fp32_error", "top1_agreement", "undelegated_ops", "undelegated_muls")
        return {"bytes": self.size, **{name: getattr(self, name) for name in fields}}

    @property
    def undelegated_muls(self) -> int:
        """How many products, squares among them, are not delegated."""
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
    """Write the model in a runtime's format, run it there and compare.

    Args:
        model: as :func:`deepsquare.load` returns it; it is not modified.
        path: of the file, with the suffix ``.onnx``, or ``.pte`` for ExecuTorch; a failed export writes nothing.
        preprocessing: how an image becomes the input; it is stored in the file.
        images: (N, 3, H, W) float32 to compare on, preprocessed; random if not given.
        calibration: (N, 3, H, W) float32, some hundred images from which the ranges of int8 are taken; without them
            the file is float32. An int8 model is compared too, but its difference is not limited.
        any_size: allow any height and width of the input, where the runtime supports it.
    """
    path = Path(path)
    runtime = runtime_for(path)
    if any_size and not runtime.dynamic_shapes:
        others = " or ".join(other.name for other in RUNTIMES.values() if other.dynamic_shapes)
        raise ValueError(f"a file for {runtime.label} has one input size; export one for each size, or use {others}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it")
    runtime.require_modules()
    ensure_writable(path.parent)
    real = Path(os.path.realpath(path))  # which other links may name too
    lock_path = real.with_name(f".{real.name}.lock")
    with (
        exclusive(lock_path, str(path), "wait until that export ends, or give another path"),
        explain_memory(f"the export of {path}", "free some memory, or export on a machine with more"),
    ):
        return _export(model, path, runtime, preprocessing, images, calibration, any_size)


def _export(
    model: nn.Module,
    path: Path,
    runtime: Runtime,
    preprocessing: Preprocessing,
    images: Tensor | None,
    calibration: Tensor | None,
    any_size: bool,
) -> Export:
    """Write the file, whose path no other export uses, and compare."""
    remove_stale_temps(path)
    model = copy.deepcopy(model).eval().float().cpu()
    shape = (3, preprocessing.size, preprocessing.size)
    if images is None:
        images = torch.randn((DEFAULT_IMAGES, *shape), generator=torch.Generator().manual_seed(0))
    check_images("images", images, shape, ", as preprocessing says")
    images, fp32_logits = _finite(model, images)
    expected = compute_logits(copy.deepcopy(model).double(), images.double())
    _check_outputs(expected, preprocessing)
    fp32_error = _max_rel_error(fp32_logits, expected)
    if calibration is not None:
        check_images("calibration", calibration, shape, ", as preprocessing says")
        calibration = _without_outliers(*_finite(model, calibration))
    record, config = equip_record(model), getattr(model, "deepsquare_config", None)
    precision = "float32" if calibration is None else "int8"
    metadata = Metadata(config and config.name, record.spec if record else "", precision, preprocessing)
    content, undelegated_ops = _convert(runtime, model, images[:1], metadata, calibration, any_size)
    allowed = max(TOLERANCE, FP32_FACTOR * fp32_error)
    try:
        with atomic_write(path) as temporary:
            temporary.write_bytes(content)
            logits = runtime.load(temporary)(images)
            max_rel_error = _max_rel_error(logits, expected)
            if calibration is None and not max_rel_error <= allowed:
                raise ExportError(
                    f"the exported model differs by {max_rel_error:.1e} of the largest logit; expected at most "
                    f"{allowed:.1e}, as PyTorch's own float32 differs by {fp32_error:.1e}. Nothing was written"
                )
    except OSError as error:
        if error.errno is None:  # raised by deepsquare, with a message
            raise
        raise OSError(f"cannot write {path} ({error.strerror}); make room, or give another path") from error
    top1_agreement = float((logits.argmax(1) == expected.argmax(1)).float().mean())
    if top1_agreement < MIN_AGREEMENT and len(images) > DEFAULT_IMAGES:
        logger.warning("the top-1 class is the same for %.0f%% only; measure the accuracy", 100 * top1_agreement)
    return Export(
        path, runtime.name, metadata.precision, len(content), max_rel_error, fp32_error, top1_agreement, len(images),
        undelegated_ops,
    )  # fmt: skip


def compute_logits(model: nn.Module, images: Tensor) -> Tensor:
    """The logits of a classifier, in batches."""
    try:
        with torch.inference_mode():
            logits = [model(batch) for batch in torch.split(images, BATCH_SIZE)]
    except RuntimeError as error:
        raise ValueError(f"the model does not take images of {tuple(images.shape[1:])}: {error}") from error
    if not isinstance(logits[0], Tensor) or logits[0].ndim != 2:
        raise ValueError("the model's output is no tensor (N, K) of logits; expected a classifier")
    return torch.cat(logits)


def _check_outputs(logits: Tensor, preprocessing: Preprocessing) -> None:
    names, num_classes = len(preprocessing.class_names), logits.shape[1]
    if names not in (0, num_classes):
        raise ValueError(f"preprocessing has {names} class names; expected {num_classes}, one for each of the logits")
    if len(logits) > 1 and float(logits.std(0).max()) <= TOLERANCE * float(logits.abs().max()):
        logger.warning("the model gives all images the same logits, so parity proves little; export a trained model")


def _finite(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The images for which the model's logits are finite, and these logits; others cannot be compared."""
    logits = compute_logits(model, images)
    finite = logits.isfinite().all(1)
    if not finite.any():
        raise ValueError("the model's own logits are not finite on these images; export a trained model")
    if not finite.all():
        logger.warning("%d of %d images have no finite logits and are left out", int((~finite).sum()), len(images))
    return images[finite], logits[finite]


def _without_outliers(images: Tensor, logits: Tensor) -> Tensor:
    """The images on which the network does not explode: a single one that does would set the ranges for all."""
    largest = logits.abs().amax(1)
    usual = largest <= OUTLIER_FACTOR * largest.median()
    if not usual.all():
        logger.warning("ranges leave out %d images on which the network explodes", int((~usual).sum()))
    return images[usual]


def _max_rel_error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max().clamp(min=torch.finfo().tiny))


def _convert(
    runtime: Runtime, model: nn.Module, image: Tensor, metadata: Metadata, calibration: Tensor | None, any_size: bool
) -> tuple[bytes, dict[str, int]]:
    """Lower and convert a model; any error of the runtime's exporter becomes an ExportError of one line."""
    lowered = lower_for_export(model, image, flatten_maps=runtime.flatten_maps and not any_size)
    example = image.repeat(2 if runtime.dynamic_shapes else 1, 1, 1, 1)  # torch.export fixes a dynamic size of 1
    try:
        with quiet():
            return runtime.convert(lowered, example, metadata, calibration, any_size)
    except Exception as error:  # each part of an exporter has classes of its own
        cause = next((line for line in str(error.__cause__ or error).splitlines() if line.strip()), repr(error))
        name = f"{metadata.name or 'this model'}{' with ' + metadata.spec if metadata.spec else ''}"
        raise ExportError(f"{name} cannot be exported for {runtime.label}: {cause.strip()}") from error
