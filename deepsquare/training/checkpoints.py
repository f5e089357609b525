"""Training checkpoints: a run that was stopped goes on from one, bit for bit on the same machine."""

from __future__ import annotations

import io
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepsquare._files import replacing
from deepsquare.training.recipe import Recipe

VERSION = 1


def save_progress(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, recipe: Recipe, progress: dict[str, Any]
) -> None:
    """Write model, optimiser, random state and progress, whole or not at all; ``progress`` holds plain values."""
    state = {
        "version": VERSION,
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "random": torch.get_rng_state(),  # of dropout
        "recipe": asdict(recipe),
        "progress": progress,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)  # not into the file: what torch says of a full disk names neither
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    except OSError as error:
        reason = f"cannot write the checkpoint {path} ({error.strerror}); make room and run the same command"
        raise OSError(reason) from error


def load_progress(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, identity: str, recipe: Recipe
) -> dict[str, Any]:
    """Set model, optimiser and random state to where they were, and return the progress.

    ``identity`` and ``recipe`` must be the checkpoint's own: one of another run is refused.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a training checkpoint, or a damaged one; remove it to start anew") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"{path} is not a training checkpoint of version {VERSION}; remove it to start anew")
    if missing := {"model", "optimiser", "progress", "random", "recipe"} - state.keys():
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}; remove it to start anew")
    progress: dict[str, Any] = state["progress"]
    expected = {"identity": identity, "recipe": asdict(recipe)}
    found = {"identity": progress.get("identity"), "recipe": state["recipe"]}
    for name, value in expected.items():
        if found[name] != value:
            reason = f"{path} belongs to another run: its {name} is {found[name]}; expected {value}"
            raise ValueError(f"{reason}. Remove it or give another place")
    try:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} belongs to another model: {error}. Remove it or give another place") from error
    torch.set_rng_state(state["random"])
    return progress
