"""What verbs share: an option, and reading a checkpoint."""

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import tyro
from torch import nn

from deepsquare._memory import explain_memory
from deepsquare.checkpoint import load, read_header
from deepsquare.export.runtimes import is_exported
from deepsquare.preprocessing import Preprocessing
from deepsquare.training.run import CHECKPOINT, MODEL

AsJson = Annotated[bool, tyro.conf.arg(name="json", help="Print JSON.")]


def model_file(path: Path) -> Path:
    """The model of a checkpoint, or of the folder of a training run."""
    if is_exported(path):
        raise ValueError(f"{path} is an exported file; give the checkpoint that it was exported from")
    file = path / MODEL if path.is_dir() else path
    if file.name == CHECKPOINT or (path.is_dir() and not file.exists()):
        model = file.with_name(MODEL)
        state = "exists" if model.exists() else "is written when the run ends (continue it with --resume)"
        raise ValueError(f"{path} is no model; expected {model}, which {state}")
    return file


def explain_loading(file: Path) -> AbstractContextManager[None]:
    """For the block that loads a model: lack of memory names the file."""
    return explain_memory(f"loading the model {file}", "free some memory, or use a machine with more")


def load_model(file: Path) -> tuple[nn.Module, Preprocessing]:
    """The model of a checkpoint and its preprocessing; ImageNet's if the checkpoint has none."""
    with explain_loading(file):
        model, header = load(file), read_header(file)
    if header.preprocessing:
        return model, header.preprocessing
    preprocessing = Preprocessing()
    if header.input_shape and (size := header.input_shape[-1]) != preprocessing.size:
        preprocessing = Preprocessing(size=size, resize=size)
    warnings.warn(
        f"{file} does not say how images become its input (deepsquare.save has preprocessing=… for that); using a "
        f"center crop of {preprocessing.size} × {preprocessing.size} after resizing the shorter side to "
        f"{preprocessing.resize}, and ImageNet's mean and std",
        stacklevel=2,
    )
    return model, preprocessing
