"""``deepsquare export``: a checkpoint as a file for another runtime."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from deepsquare._terminal import show
from deepsquare.cli._common import AsJson, load_model, model_file
from deepsquare.export import export
from deepsquare.export.images import CALIBRATION_IMAGES, PARITY_IMAGES, load_images, sample_files, split_calibration
from deepsquare.export.runtimes import RUNTIMES

if TYPE_CHECKING:
    RuntimeName = str
else:
    RuntimeName = tyro.extras.literal_type_from_choices(list(RUNTIMES))


def export_command(
    checkpoint: tyro.conf.Positional[Path],
    *,
    to: RuntimeName,
    output: Path | None = None,
    images: Path | None = None,
    int8: bool = False,
    any_size: bool = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a file that runs without PyTorch, and compare its logits with the model's.

    The model is folded first. Its preprocessing and the names of its classes are stored in the file.

    Args:
        checkpoint: A safetensors file, or the folder of a training run.
        to: The runtime: onnx for onnxruntime, executorch for phones and boards, by XNNPACK.
        output: The file; beside the checkpoint by default.
        images: Folder with images, at any depth, to compare on and to calibrate int8 with; random input by default.
        int8: Quantize weights and activations to eight bits; squares stay in float32.
        any_size: Allow any height and width of the input (onnx only).
    """
    file, runtime = model_file(checkpoint), RUNTIMES[to]
    path = output or file.with_name(f"{file.stem}{'-int8' if int8 else ''}{runtime.suffix}")
    if path.suffix != runtime.suffix:
        raise ValueError(f"the output is {path}; expected the suffix {runtime.suffix} for {to}")
    if int8 and images is None:
        raise ValueError("int8 needs images to take its ranges from; give a folder, such as train: --images DIR")
    model, preprocessing = load_model(file)
    parity_images, calibration = None, None
    if images is not None:
        count = CALIBRATION_IMAGES + PARITY_IMAGES if int8 else PARITY_IMAGES
        parity_images = load_images(sample_files(images, count), preprocessing)
        if int8:
            calibration, parity_images = split_calibration(parity_images)
            print(f"Calibrating with {len(calibration)} images; this takes minutes.", file=sys.stderr, flush=True)
    exported = export(model, path, preprocessing, images=parity_images, calibration=calibration, any_size=any_size)
    if as_json:
        print(json.dumps({**vars(exported), "path": str(exported.path)}))
        return
    noun = f"{'random input' if images is None else 'image'}{'s' if exported.num_images > 1 else ''}"
    show(f"{exported.path.resolve()}: {exported.size / 1e6:.1f} MB for {exported.runtime}, {exported.precision}")
    print(
        f"On {exported.num_images} {noun} it differs from the model by {exported.max_rel_error:.1e} of the largest "
        f"logit (PyTorch's own float32: {exported.fp32_error:.1e}); the top-1 class is the same for "
        f"{exported.top1_agreement:.1%}."
    )
    if runtime.delegate:
        undelegated_ops = ", ".join(f"{count} × {name}" for name, count in exported.undelegated_ops.items())
        print(f"{runtime.delegate} runs everything{f' but {undelegated_ops}' if undelegated_ops else ''}.")
        if exported.undelegated_muls:
            print(f"Of these, {exported.undelegated_muls} are products, such as squares: they run slowly.")
