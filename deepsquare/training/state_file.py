"""The file of a training state (``last.pt``): atomic, with a checksum, and with the one before it kept beside it."""

import io
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from deepsquare._archive import check_archive
from deepsquare._compat import upgrade_training_state
from deepsquare._files import append_checksum, atomic_write, remove_stale_temps, verify_checksum
from deepsquare._memory import explain_memory

logger = logging.getLogger("deepsquare")
VERSION = 4  # 2 and 3 had no checksum
FIELDS = {"model", "optimizer", "ema", "scaler", "progress", "random", "recipe"}


class _DamagedError(ValueError):
    """The file is no training state, or not the one that was written."""


def previous_path(path: Path) -> Path:
    """Where the state before the one at ``path`` is kept."""
    return path.with_suffix(".previous.pt")


def write_state(path: Path, state: dict[str, Any], keep_previous: bool = True) -> None:
    """Replace the state at ``path``; the one there becomes the previous one, if ``keep_previous``.

    At every moment one of the two files is complete: a process may be killed between any two lines.
    """
    buffer = io.BytesIO()
    torch.save({"version": VERSION, **state}, buffer)  # not into the file: torch's error names neither file nor reason
    append_checksum(buffer)
    try:
        remove_stale_temps(path)
        if keep_previous:
            _keep(path)
        with atomic_write(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    except OSError as error:
        raise OSError(
            f"cannot write the checkpoint {path} ({error.strerror}); free some space; the run can be resumed from its "
            "last checkpoint"
        ) from error


def _keep(path: Path) -> None:
    """Make the state at ``path`` the previous one too, by a second link: no space is needed until it is replaced."""
    previous = previous_path(path)
    previous.unlink(missing_ok=True)
    if not path.exists():
        return
    try:
        os.link(os.path.realpath(path), previous)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, previous)


def read_state(path: Path) -> tuple[dict[str, Any], bool]:
    """The state at ``path``, or the previous one if that is damaged; and whether it is the one at ``path``."""
    try:
        return _read(path), True
    except _DamagedError as error:
        previous = previous_path(path)
        if not previous.exists():
            raise
        try:
            state = _read(previous)
        except _DamagedError:
            raise error from None
        logger.warning("%s is damaged; the run continues from %s, the checkpoint before it", path, previous)
        return state, False


def _read(path: Path) -> dict[str, Any]:
    try:
        with explain_memory(f"loading the checkpoint {path}", "free some memory, or use a machine with more"):
            checked = verify_checksum(path)
            if checked is False:
                raise ValueError("its checksum is another")
            check_archive(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (PermissionError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes torch and pickle fail in many ways
        raise _DamagedError(f"{path} is not a training checkpoint, or is damaged; remove it to start again") from error
    version = state.get("version") if isinstance(state, dict) else None
    if version == VERSION and checked is None:
        raise _DamagedError(f"{path} has lost its checksum, so it is damaged; remove it to start again")
    if version in (2, 3):
        state = upgrade_training_state(state)
        logger.warning("%s is of an earlier version without a checksum, so damage in it would not be noticed", path)
    elif version != VERSION:
        raise ValueError(f"{path} is not a training checkpoint of version {VERSION}; remove it to start again")
    if missing := FIELDS - state.keys():
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}; remove it to start again")
    return dict(state)
