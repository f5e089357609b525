"""What verbs that read a checkpoint share."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import nn

from deepsquare.checkpoint import Preprocessing, load, read_header, read_preprocessing
from deepsquare.export.runtime import SUFFIXES
from deepsquare.training.run import CHECKPOINT, MODEL


def model_file(given: Path) -> Path:
    """The model of a checkpoint, or of the folder of a training run."""
    if given.suffix.lower() in SUFFIXES.values():
        raise ValueError(f"{given} is an exported file; give the checkpoint that it was made from")
    found = given / MODEL if given.is_dir() else given
    folder = found.parent
    if found.name == CHECKPOINT or (given.is_dir() and not found.exists()):
        state = "is there" if (folder / MODEL).exists() else "is written when the run ends (--resume goes on with it)"
        raise ValueError(f"{given} is no model; expected {folder / MODEL}, which {state}")
    return found


def open_model(file: Path) -> tuple[nn.Module, Preprocessing]:
    """The model of a checkpoint, and what it is shown: as it says, or as ImageNet's networks usually are."""
    model, shown = load(file), read_preprocessing(file)
    if shown is None:
        shape, usual = read_header(file)["input_shape"], Preprocessing(())
        shown = usual if shape is None or shape[-1] == usual.size else Preprocessing((), shape[-1], shape[-1])
        warnings.warn(
            f"{file} does not say how images become its input (deepsquare.save has images=… for that); taken as "
            f"the centre, {shown.size} × {shown.size} of a shorter side of {shown.resize}, normalised as for ImageNet",
            stacklevel=2,
        )
    return model, shown
