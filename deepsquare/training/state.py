"""Training checkpoints, from which a stopped run resumes: bit for bit on the same machine."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from deepsquare._compat import upgrade_training_state
from deepsquare._files import atomic_write, remove_stale_temps
from deepsquare.training.config import describe_run
from deepsquare.training.recipe import Recipe
from deepsquare.training.trainer import Trainer

VERSION = 3


def save_progress(path: Path, trainer: Trainer, recipe: Recipe, progress: dict[str, Any]) -> None:
    """Write the trainer's state and the progress, which holds plain values, atomically.

    Called by every process, written by the main process.
    """
    described = describe_run(recipe, trainer.config)
    state = {"version": VERSION, **trainer.state(), "recipe": described, "progress": progress}
    if not trainer.distributed.is_main_process:
        return
    buffer = io.BytesIO()
    torch.save(state, buffer)  # not into the file: torch's error for a full disk names neither file nor reason
    try:
        remove_stale_temps(path)
        with atomic_write(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    except OSError as error:
        raise OSError(
            f"cannot write the checkpoint {path} ({error.strerror}); free some space; the run can be resumed from its "
            "last checkpoint (deepsquare train: --resume)"
        ) from error


def load_progress(path: Path, trainer: Trainer, identity: str, recipe: Recipe) -> dict[str, Any]:
    """Restore the trainer, and return the progress; a checkpoint of another identity or recipe is refused."""
    state = _read(path)
    progress: dict[str, Any] = state["progress"]
    expected = {"identity": identity, **describe_run(recipe, trainer.config)}
    stored = {"identity": progress.get("identity"), **state["recipe"]}
    if different := [name for name in expected if stored.get(name) != expected[name]]:
        names = "; ".join(f"its {name} is {stored.get(name)}, expected {expected[name]}" for name in different)
        raise ValueError(f"{path} belongs to another run: {names}. Remove it or choose another path")
    try:
        trainer.restore(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} belongs to another model: {error}. Remove it or choose another path") from error
    return progress


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a training checkpoint, or is damaged; remove it to start again") from error
    if isinstance(state, dict) and state.get("version") == 2:
        state = upgrade_training_state(state)
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"{path} is not a training checkpoint of version {VERSION}; remove it to start again")
    if missing := {"model", "optimizer", "ema", "scaler", "progress", "random", "recipe"} - state.keys():
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}; remove it to start again")
    return state
