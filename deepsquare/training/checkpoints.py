"""Training checkpoints: a run that was stopped goes on from one, bit for bit on the same machine."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepsquare._files import replacing

VERSION = 1


def save_progress(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write model, optimiser and progress, whole or not at all. ``progress`` holds plain values and tensors."""
    state = {
        "version": VERSION,
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "progress": progress,
    }
    with replacing(path) as temporary:
        torch.save(state, temporary)


def load_progress(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, identity: str) -> dict[str, Any]:
    """Set model and optimiser to where they were, and return the progress.

    ``identity`` must be the progress's own: a checkpoint of another run is refused.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a training checkpoint, or a damaged one; remove it to start anew") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"{path} is not a training checkpoint of version {VERSION}; remove it to start anew")
    progress: dict[str, Any] = state["progress"]
    if progress.get("identity") != identity:
        reason = f"{path} belongs to another run: {progress.get('identity')}; expected {identity}"
        raise ValueError(f"{reason}. Remove it or give another place")
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return progress
