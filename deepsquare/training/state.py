"""Training checkpoints: a run that was stopped goes on from one, bit for bit on the same machine."""

from __future__ import annotations

import io
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepsquare._files import atomic_write, remove_stale_temps
from deepsquare.training.recipe import Recipe
from deepsquare.training.trainer import Trainer

VERSION = 2


def save_progress(path: Path, trainer: Trainer, recipe: Recipe, progress: dict[str, Any]) -> None:
    """Write the learner's state and the progress, whole or not at all; ``progress`` holds plain values.

    Called by every process of a team, written by the one that leads.
    """
    state = {"version": VERSION, **trainer.state(), "recipe": asdict(recipe), "progress": progress}
    if not trainer.engine.distributed.is_main_process:
        return
    buffer = io.BytesIO()
    torch.save(state, buffer)  # not into the file: what torch says of a full disk names neither
    try:
        remove_stale_temps(path)
        with atomic_write(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    except OSError as error:
        reason = (
            f"cannot write the checkpoint {path} ({error.strerror}); make room; the run goes on from its last "
            "checkpoint (deepsquare train: with --resume)"
        )
        raise OSError(reason) from error


def load_progress(path: Path, trainer: Trainer, identity: str, recipe: Recipe) -> dict[str, Any]:
    """Set the learner to where it was, and return the progress.

    ``identity`` and ``recipe`` must be the checkpoint's own: one of another run is refused.
    """
    state = _read(path)
    progress: dict[str, Any] = state["progress"]
    expected = {"identity": identity, **asdict(recipe)}
    found = {"identity": progress.get("identity"), **state["recipe"]}
    if different := [name for name in expected if found.get(name) != expected[name]]:
        names = "; ".join(f"its {name} is {found.get(name)}, expected {expected[name]}" for name in different)
        raise ValueError(f"{path} belongs to another run: {names}. Remove it or give another place")
    try:
        trainer.restore(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} belongs to another model: {error}. Remove it or give another place") from error
    return progress


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a training checkpoint, or a damaged one; remove it to start anew") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"{path} is not a training checkpoint of version {VERSION}; remove it to start anew")
    if missing := {"model", "optimizer", "ema", "scaler", "progress", "random", "recipe"} - state.keys():
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}; remove it to start anew")
    return state
