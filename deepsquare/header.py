"""The header of a checkpoint: JSON in the metadata of a safetensors file, checked before a model is built from it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta
from safetensors import SafetensorError, safe_open

from deepsquare._compat import upgrade_header
from deepsquare.preprocessing import Preprocessing
from deepsquare.surgery import Init, parse_spec
from deepsquare.surgery.inputs import check_sides

PathLike = str | os.PathLike[str]
VERSION = 2
MAX_NUMBER = 10_000  # in kwargs; builders repeat blocks and fill lists by them
MAX_ENTRIES = 100  # of a list in kwargs
MAX_LENGTH = 10_000  # of the JSON of each field but preprocessing, in characters


@dataclass(frozen=True)
class RunInfo:
    """The training run that a model comes from."""

    row: str  # its label
    seed: int
    init_from: str | None = None  # the row whose trained weights it started from; None for random weights


def _check_numbers(name: str, value: object) -> None:
    """Bound the numbers in kwargs, and their lists, but for ``num_classes``: the file has a weight for each class."""
    if isinstance(value, (list, tuple, dict)):
        if len(value) > MAX_ENTRIES:
            raise ValueError(f"{name[:40]} has {len(value)} entries; expected at most {MAX_ENTRIES}")
        for key, entry in value.items() if isinstance(value, dict) else ((name, entry) for entry in value):
            _check_numbers(str(key), entry)
    elif isinstance(value, (int, float)) and abs(value) > MAX_NUMBER and name != "num_classes":
        raise ValueError(f"{name[:40]} is {value:g}; expected numbers up to {MAX_NUMBER} in kwargs")


@dataclass(frozen=True)
class Header:
    """The header of a checkpoint; name, kwargs, spec, dropout and input_shape are those of ``create_model``."""

    name: str | None  # None for a model that create_model did not build
    kwargs: dict[str, Any]
    spec: str
    dropout: Annotated[float, Meta(ge=0, le=1)] | None
    input_shape: tuple[int, ...] | None  # None for a model without a spec
    folded: bool
    init: Init = "paper"
    preprocessing: Preprocessing | None = None
    run: RunInfo | None = None

    def __post_init__(self) -> None:
        parse_spec(self.spec)
        if self.input_shape is not None:
            check_sides(self.input_shape)
        _check_numbers("kwargs", self.kwargs)

    def dumps(self) -> dict[str, str]:
        """As the metadata of a safetensors file."""
        fields = {"format": "deepsquare", "version": VERSION, **asdict(self)}
        try:
            metadata = {key: json.dumps(value, allow_nan=False) for key, value in fields.items()}
            _check_lengths(metadata)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the kwargs {self.kwargs} of {self.name} cannot be stored: {error}. Build the model with numbers, "
                "strings and booleans only"
            ) from error
        return metadata


NO_HEADER = Header(name=None, kwargs={}, spec="", dropout=None, input_shape=None, folded=False)  # of other programs


def read_header(path: PathLike) -> Header:
    """The header of a checkpoint; for a safetensors file of another program, one without name, spec and kwargs."""
    path = Path(path)
    if not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; expected a file, for a run {path / 'model.safetensors'}")
        raise FileNotFoundError(f"no checkpoint at {path}; expected a .safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        if is_pickled(path):
            raise ValueError(
                f"{path} is a pickled file, which may run code when it is opened; only safetensors files are read. If "
                "you trust it, convert it: safetensors.torch.save_file(torch.load(path, weights_only=True), new_path)"
            ) from error
        reason = f"{path} is not a safetensors file, or is truncated ({error})"
        raise ValueError(f"{reason}; expected a file that deepsquare.save wrote") from error
    if metadata.get("format") != '"deepsquare"':
        return NO_HEADER
    try:
        _check_lengths(metadata)
        values = {key: json.loads(value, parse_constant=_refuse_constant) for key, value in metadata.items()}
        fields = upgrade_header(values)
        if fields.get("version") == VERSION:
            return msgspec.convert(fields, Header)
    except (ValueError, RecursionError) as error:  # of json or msgspec
        raise ValueError(f"the header of {path} is damaged ({error}); fetch or save it again") from error
    raise ValueError(
        f"{path} is a checkpoint of version {str(fields.get('version'))[:20]}, this deepsquare reads {VERSION}; use "
        "the release that wrote it"
    )


def _check_lengths(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        # The names of classes may be many.
        if key not in ("preprocessing", "pictures") and len(value) > MAX_LENGTH:
            raise ValueError(f"{key[:40]} has {len(value)} characters; expected at most {MAX_LENGTH}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number; expected finite ones")


def is_pickled(path: Path) -> bool:
    """Whether a file starts as one of ``torch.save`` or of pickle."""
    with path.open("rb") as file:
        start = file.read(4)
    return start[:2] == b"PK" or start[:1] == b"\x80"
