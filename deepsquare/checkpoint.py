"""Checkpoints that know their model: safetensors with the model's name, spec and arguments in the header.

Only safetensors files are read. A pickled file can run code when it is opened, so it is refused.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import warnings
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepsquare._files import atomic_write
from deepsquare.models import WEIGHT_KWARGS, ModelConfig, create_model
from deepsquare.surgery import PREFIX, check_intact, equip_record, fold, is_folded, refuse_inner, unwrap

logger = logging.getLogger("deepsquare")
PathLike = str | os.PathLike[str]
VERSION = 1
FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str, type(None)),
    "arguments": (dict,),
    "spec": (str,),
    "dropout": (float, int, type(None)),
    "input_shape": (list, type(None)),
    "folded": (bool,),
    "pictures": (dict, type(None)),
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images, by channel, from 0 to 1


@dataclass(frozen=True)
class Preprocessing:
    """How a image becomes a model's input, and the names of the classes that it tells apart.

    Attributes:
        classes: their names, in the order of the outputs.
        size: side of the centre that is cut out.
        resize: the shorter side before that.
        mean, std: by which the values, from 0 to 1, are normalised.
    """

    classes: tuple[str, ...]
    size: int = 224
    resize: int = 256
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def __post_init__(self) -> None:
        if not (isinstance(self.classes, tuple) and all(isinstance(name, str) for name in self.classes)):
            raise ValueError(f"classes is {self.classes!r}; expected a tuple of names")
        if not 0 < self.size <= self.resize:
            raise ValueError(f"size is {self.size} and resize {self.resize}; expected a centre within the shorter side")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} is {values}; expected three numbers, for red, green and blue")
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; expected numbers above 0")

    @classmethod
    def read(cls, stored: dict[str, Any], path: PathLike) -> Preprocessing:
        """From a header; a clear word if it is damaged."""
        try:
            mean, std = (tuple(float(value) for value in stored[key]) for key in ("mean", "std"))
            classes = stored["classes"]
            named = tuple(classes) if isinstance(classes, list) else classes
            return cls(named, int(stored["size"]), int(stored["resize"]), mean, std)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"the header of {path} has no valid 'pictures' ({error}); fetch or save the file again"
            raise ValueError(reason) from error


def save(model: nn.Module, path: PathLike, preprocessing: Preprocessing | None = None) -> None:
    """Write ``model`` to a safetensors file from which :func:`load` rebuilds it.

    ``preprocessing`` says how a image becomes its input and what its classes are called; what evaluates, exports or
    predicts finds it there (:func:`read_preprocessing`).

    A model that :func:`deepsquare.create_model` did not build is saved with its spec, but without its name; load it
    with :func:`load_weights`. The file is written beside its place first and renamed, so it is whole or not there.
    """
    model = unwrap(model)
    present = equip_record(model)
    refuse_inner(model)
    check_intact(model)
    config: ModelConfig | None = getattr(model, "deepsquare_config", None)
    header = {
        "format": "deepsquare",
        "version": VERSION,
        "name": config.name if config else None,
        "arguments": config.kwargs if config else {},
        "spec": present.spec if present else "",
        "dropout": present.dropout if present else None,
        "input_shape": present.sites.input_shape if present else None,
        "folded": is_folded(model),
        "pictures": asdict(preprocessing) if preprocessing else None,
    }
    try:
        metadata = {key: json.dumps(value) for key, value in header.items()}
    except TypeError as error:
        raise ValueError(
            f"the arguments {header['kwargs']} of {header['name']} cannot be stored: {error}. Build the model with "
            "numbers, strings and truth values only"
        ) from error
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    first = {value.untyped_storage().data_ptr(): key for key, value in reversed(tensors.items())}
    for key, value in tensors.items():
        if first[value.untyped_storage().data_ptr()] != key:  # a second name of one tensor
            tensors[key] = value.clone()
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"could not write {path}: {error}") from error


def load(path: PathLike, spec: str | None = None) -> nn.Module:
    """Rebuild the model that :func:`save` wrote.

    Args:
        path: the file.
        spec: equip the model otherwise than the checkpoint says; what the file has no weights for is reported.
    """
    header = read_header(path)
    if header.get("name") is None:
        raise ValueError(
            f"{path} does not say which model it holds; build that model, equip it with spec "
            f"{header.get('spec', '')!r}, and use deepsquare.load_weights(model, path)"
        )
    chosen = header["spec"] if spec is None else spec
    kwargs = {key: value for key, value in header["arguments"].items() if key not in WEIGHT_KWARGS}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* started at γ = 0")  # weights follow
        shape = header["input_shape"]
        model = create_model(header["name"], chosen, dropout=header["dropout"], input_shape=shape, **kwargs)
    if header["folded"]:
        model = fold(model.eval())
    tensors = load_file(path)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if key in tensors:
            value.data = value.data.to(tensors[key].dtype)
    _fill(model, tensors, path, header)
    return model


def load_weights(model: nn.Module, path: PathLike) -> list[str]:
    """Load a safetensors file into ``model`` and return the keys that are new in the model.

    New keys may only be DeepSquare's own (the file holds the base model); anything else that does not fit is an error.
    """
    header = read_header(path)
    return _fill(unwrap(model), load_file(path), path, header)


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: PathLike, header: dict[str, Any]) -> list[str]:
    """Put ``tensors`` into ``model``, all or none; the keys that are new in the model."""
    expected = model.state_dict()
    new = [key for key in expected if key not in tensors and PREFIX in key]
    problems = [f"{key} is missing" for key in expected if key not in tensors and PREFIX not in key]
    problems += [f"{key} is not part of the model" for key in tensors if key not in expected]
    problems += [
        f"{key} is {tuple(tensors[key].shape)} in the file, {tuple(value.shape)} in the model"
        for key, value in expected.items()
        if key in tensors and tensors[key].shape != value.shape
    ]
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise ValueError(
            f"{path} does not fit {_describe(model)}: {shown}. {_holds(header)}. If that model was changed after it "
            "was created, build it again and use deepsquare.load_weights; weights of a base model go in before a word "
            "that widens its classifier (load first, then equip)"
        )
    before = copy.deepcopy(expected)
    state = OrderedDict(tensors)
    state._metadata = before._metadata  # type: ignore[attr-defined]  # the versions of the modules: MNASNet asks for them
    try:
        model.load_state_dict(state, strict=False)
    except ValueError as error:
        model.load_state_dict(before)
        raise ValueError(f"{path}: {error}") from error
    if new:
        logger.warning(
            "%s: loaded %d tensors; new in %s and left at their start values: %s",
            path, len(tensors), _describe(model), ", ".join(new),
        )  # fmt: skip
    return new


def read_header(path: PathLike) -> dict[str, Any]:
    """What a checkpoint says of itself: name, arguments, spec, dropout; empty for a foreign safetensors file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        with path.open("rb") as file:
            start = file.read(4)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            raise ValueError(
                f"{path} is a pickled file, which may run code when it is opened; only safetensors files are read. If "
                "you trust it, convert it: safetensors.torch.save_file(torch.load(path, weights_only=True), new_path)"
            ) from error
        raise ValueError(f"{path} is no complete safetensors file ({error}); fetch or save it again") from error
    if metadata.get("format") != '"deepsquare"':
        return {}
    try:
        header = {key: json.loads(value) for key, value in metadata.items()}
    except json.JSONDecodeError as error:
        raise ValueError(f"the header of {path} is damaged ({error}); fetch or save it again") from error
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} is a checkpoint of version {header.get('version')}, this deepsquare reads {VERSION}; use the "
            "release that wrote it"
        )
    header.setdefault("pictures", None)
    for field, types in FIELDS.items():
        if not isinstance(header.get(field, ...), types):
            raise ValueError(f"the header of {path} has no valid {field!r}; fetch or save the file again")
    return header


def read_preprocessing(path: PathLike) -> Preprocessing | None:
    """What images a checkpoint was saved for, if it says so."""
    stored = read_header(path).get("pictures")
    return Preprocessing.read(stored, path) if stored else None


def _describe(model: nn.Module) -> str:
    present = equip_record(model)
    return type(model).__name__ + (f" equipped with {present.spec!r}" if present else "")


def _holds(header: dict[str, Any]) -> str:
    if not header:
        return "The file does not say which model it holds"
    name = header["name"] or "a model of your own"
    return f"The file holds {name} with spec {header['spec']!r} and arguments {header['kwargs']}"
