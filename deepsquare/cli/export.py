"""The commands that deploy: ``deepsquare export | predict``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from deepsquare.cli._checkpoint import model_file, open_model
from deepsquare.export import export
from deepsquare.export.images import CALIBRATION_IMAGES, PARITY_IMAGES, load_images, sample_files, split_calibration
from deepsquare.export.runtime import SUFFIXES, Runtime


def export_command(
    checkpoint: tyro.conf.Positional[Path],
    *,
    to: Runtime,
    output: Path | None = None,
    images: Path | None = None,
    int8: bool = False,
    any_size: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Write a checkpoint as a file that runs without PyTorch, and prove that it says the same there.

    The model is folded first. How images become its input, and the names of its classes, go into the file.

    Args:
        checkpoint: A safetensors file, or the folder of a training run.
        to: onnx for onnxruntime, executorch for phones and boards, by XNNPACK.
        output: The file; beside the checkpoint when not given.
        images: Folder with images, at any depth, to compare on and to calibrate int8 with; random input when not
            given.
        int8: Quantise weights and activations to eight bits; squares stay in float32.
        any_size: Of onnx, let the sides of the input vary too.
        as_json: Print JSON.
    """
    file = model_file(checkpoint)
    model, shown = open_model(file)
    place = output or file.with_name(f"{file.stem}{'-int8' if int8 else ''}{SUFFIXES[to]}")
    if place.suffix != SUFFIXES[to]:
        raise ValueError(f"the output is {place}; expected the ending {SUFFIXES[to]} for {to}")
    if int8 and images is None:
        raise ValueError("int8 needs images to take its ranges from; give a folder, such as train: --images DIR")
    compared, calibration = None, None
    if images is not None:
        count = CALIBRATION_IMAGES + PARITY_IMAGES if int8 else PARITY_IMAGES
        compared = load_images(sample_files(images, count), shown)
        if int8:
            calibration, compared = split_calibration(compared)
            print(f"Taking ranges from {len(calibration)} images; this takes minutes.", file=sys.stderr, flush=True)
    made = export(model, place, shown, images=compared, calibration=calibration, any_size=any_size)
    if as_json:
        print(json.dumps({**vars(made), "path": str(made.path)}))
        return
    kind = ("random input" if images is None else "image") + ("s" if made.num_images > 1 else "")
    print(f"{made.path.resolve()}: {made.size / 1e6:.1f} MB for {to}, {made.precision}")
    print(
        f"On {made.num_images} {kind} it differs from the model by {made.max_rel_error:.1e} of the largest logit (PyTorch's "
        f"own float32: {made.fp32_error:.1e}); the first answer is the same for {made.top1_agreement:.1%}."
    )
    if to == "executorch":
        undelegated_ops = ", ".join(f"{count} × {name}" for name, count in made.undelegated_ops.items())
        print(f"XNNPACK runs everything but {undelegated_ops}." if undelegated_ops else "XNNPACK runs everything.")
        if made.undelegated_muls:
            print(f"Of these, {made.undelegated_muls} are products, such as squares: they run slowly.")
