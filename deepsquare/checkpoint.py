"""Checkpoints from which a model can be rebuilt: safetensors with the model's name, spec and kwargs in the header.

Only safetensors files are read. Unpickling a file can run code, so pickled files are refused.
"""

import copy
import json
import logging
import os
import warnings
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepsquare._compat import upgrade_header
from deepsquare._files import atomic_write
from deepsquare.models import WEIGHT_KWARGS, ModelConfig, create_model
from deepsquare.preprocessing import Preprocessing
from deepsquare.surgery import PREFIX, Init, equip_record, fold, intact_record, is_folded, unwrap

logger = logging.getLogger("deepsquare")
PathLike = str | os.PathLike[str]
VERSION = 2


@dataclass(frozen=True)
class RunInfo:
    """The training run that a model comes from."""

    row: str  # its label
    seed: int
    init_from: str | None = None  # the row whose trained weights it started from; None for random weights


@dataclass(frozen=True)
class Header:
    """The header of a checkpoint; name, kwargs, spec, dropout and input_shape are those of ``create_model``."""

    name: str | None  # None for a model that create_model did not build
    kwargs: dict[str, Any]
    spec: str
    dropout: float | None
    input_shape: tuple[int, ...] | None  # None for a model without a spec
    folded: bool
    init: Init = "paper"
    preprocessing: Preprocessing | None = None
    run: RunInfo | None = None


def save(
    model: nn.Module, path: PathLike, preprocessing: Preprocessing | None = None, run: RunInfo | None = None
) -> None:
    """Write ``model`` to a safetensors file from which :func:`load` rebuilds it.

    A model that :func:`deepsquare.create_model` did not build is saved with its spec, but without its name; load it
    with :func:`load_weights`. ``preprocessing`` says how an image becomes the model's input; evaluation, export and
    prediction read it from the file. The file is written to a temporary path and renamed, so it is never incomplete.
    """
    model = unwrap(model)
    record = intact_record(model)
    config: ModelConfig | None = getattr(model, "deepsquare_config", None)
    header = Header(
        name=config.name if config else None,
        kwargs=config.kwargs if config else {},
        spec=record.spec if record else "",
        dropout=record.dropout if record else None,
        input_shape=record.sites.input_shape if record else None,
        folded=is_folded(model),
        init=record.init if record else "paper",
        preprocessing=preprocessing,
        run=run,
    )
    try:
        fields = {"format": "deepsquare", "version": VERSION, **asdict(header)}
        metadata = {key: json.dumps(value) for key, value in fields.items()}
    except TypeError as error:
        raise ValueError(
            f"the kwargs {header.kwargs} of {header.name} cannot be stored: {error}. Build the model with numbers, "
            "strings and booleans only"
        ) from error
    if missing := next((key for key, value in model.state_dict().items() if value.is_meta), None):
        raise ValueError(
            f"{type(model).__name__} has no weights to save: {missing} is on the meta device; load them first"
        )
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    first = {value.untyped_storage().data_ptr(): key for key, value in reversed(tensors.items())}
    for key, value in tensors.items():
        if first[value.untyped_storage().data_ptr()] != key:  # a tensor that two keys share
            tensors[key] = value.clone()
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"could not write {path}: {error}") from error


def load(path: PathLike, spec: str | None = None, init: Init | None = None) -> nn.Module:
    """Rebuild the model that :func:`save` wrote.

    ``spec`` and ``init`` equip it otherwise than the checkpoint says; parameters that the file lacks are logged.
    """
    header = read_header(path)
    if header.name is None:
        equipped = header.spec or header.dropout is not None
        starting = f", init={header.init!r}" if header.init != "paper" else ""
        equipping = f", call deepsquare.equip(model, {header.spec!r}, dropout={header.dropout}{starting})"
        equipping = equipping if equipped else ""
        folding = ", fold it" if header.folded else ""
        raise ValueError(
            f"{path} holds a model that create_model did not build, so it cannot be rebuilt by name; build the model "
            f"yourself{equipping}{folding}, then call deepsquare.load_weights(model, path)"
        )
    kwargs = {key: value for key, value in header.kwargs.items() if key not in WEIGHT_KWARGS}
    kwargs |= {"dropout": header.dropout, "input_shape": header.input_shape, "init": init or header.init}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* with γ = 0")  # the weights are loaded below
        model = create_model(header.name, header.spec if spec is None else spec, **kwargs)
    if header.folded:
        model = fold(model.eval())
    tensors = load_file(path)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if key in tensors:
            value.data = value.data.to(tensors[key].dtype)
    _fill(model, tensors, path, header)
    return model


def load_weights(model: nn.Module, path: PathLike) -> list[str]:
    """Load a safetensors file into ``model`` and return the keys that the file lacks.

    Only DeepSquare's own keys may be missing (the file holds the base model); any other mismatch is an error.
    """
    header, record = read_header(path), equip_record(model)
    spec = record.spec if record else ""
    if header.spec and set(header.spec.split("+")) != set(spec.split("+")):  # not each has keys of its own
        logger.warning("%s holds a model with spec %r; this one has spec %r", path, header.spec, spec)
    return _fill(unwrap(model), load_file(path), path, header)


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: PathLike, header: Header) -> list[str]:
    """Load ``tensors`` into ``model``, all or none; return the keys that the file lacks."""
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
        listed = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        name = header.name or "a model without a name"
        raise ValueError(
            f"{path} does not fit {_describe(model)}: {listed}. The file holds {name} with spec {header.spec!r} and "
            f"kwargs {header.kwargs}: build and equip the model as it was saved, with later changes, and use "
            "deepsquare.load_weights; load weights of a base model before equipping it with a technique that widens "
            "its classifier"
        )
    before = copy.deepcopy(expected)
    state = OrderedDict(tensors)
    state._metadata = before._metadata  # type: ignore[attr-defined]  # the modules' versions: MNASNet needs them
    try:
        model.load_state_dict(state, strict=False)
    except ValueError as error:
        model.load_state_dict(before)
        raise ValueError(f"{path}: {error}") from error
    if new:
        logger.warning(
            "%s: loaded %d tensors; new in %s and left at their initial values: %s",
            path, len(tensors), _describe(model), ", ".join(new),
        )  # fmt: skip
    return new


def read_header(path: PathLike) -> Header:
    """The header of a checkpoint; for a safetensors file of another program, one without name, spec and kwargs."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}; expected a .safetensors file or the folder of a run")
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
        reason = f"{path} is not a safetensors file, or is truncated ({error})"
        raise ValueError(f"{reason}; expected a file that deepsquare.save wrote") from error
    if metadata.get("format") != '"deepsquare"':
        return Header(name=None, kwargs={}, spec="", dropout=None, input_shape=None, folded=False)
    try:
        fields = upgrade_header({key: json.loads(value) for key, value in metadata.items()})
        if fields.get("version") == VERSION:
            return msgspec.convert(fields, Header)
    except ValueError as error:  # of json or msgspec
        raise ValueError(f"the header of {path} is damaged ({error}); fetch or save it again") from error
    raise ValueError(
        f"{path} is a checkpoint of version {fields.get('version')}, this deepsquare reads {VERSION}; use the release "
        "that wrote it"
    )


def _describe(model: nn.Module) -> str:
    record = equip_record(model)
    return type(model).__name__ + (f" equipped with {record.spec!r}" if record else "")
