"""The processes that train one model together, as ``torchrun`` starts them; a single one is a team too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # as torchrun sets them


@dataclass(frozen=True)
class DistributedContext:
    """This process's place among those that train together, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, the same on each."""
        if self.world_size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return [float(value) for value in summed.tolist()]

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every process, on each."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def shard(self, count: int) -> range:
        """Which of ``count`` things are this process's; each is exactly one's, however they divide."""
        return range(self.rank, count, self.world_size)


SINGLE_PROCESS = DistributedContext()


@contextmanager
def init_distributed(device: str | None = None) -> Iterator[DistributedContext]:
    """Join the team that the environment describes, or be one alone, on a GPU of its own where there is one."""
    given = [name for name in VARIABLES if name in os.environ]
    if given and len(given) < len(VARIABLES):
        missing = ", ".join(sorted(set(VARIABLES) - set(given)))
        raise ValueError(
            f"the environment has {', '.join(given)} but not {missing}; start with torchrun, or unset them"
        )
    rank, world_size, local = (
        int(os.environ.get(name, default)) for name, default in zip(VARIABLES, "010", strict=True)
    )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"the device is {kind!r}; expected cpu or cuda")
    place = torch.device(f"cuda:{local}" if kind == "cuda" else kind)
    if place.type == "cuda":
        found = torch.cuda.device_count()
        if not found:
            raise ValueError("PyTorch finds no GPU on this machine; choose --device cpu")
        if local >= found:
            raise ValueError(
                f"process {local} of this machine finds {found} GPUs; start at most {found}, or --device cpu"
            )
        torch.cuda.set_device(place)
    if world_size == 1:
        yield DistributedContext(device=place)
        return
    store = rendezvous(next(dist.rendezvous("env://", rank, world_size))[0], rank, world_size)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield DistributedContext(rank, world_size, place)
    finally:
        dist.destroy_process_group()


def rendezvous(store: dist.Store, rank: int, world_size: int, patience: float = 1800.0) -> dist.Store:
    """The part of a store that belongs to the processes that are alive now.

    ``torchrun`` keeps one store over its restarts (torch 2.13), so a process that comes again may read the address
    that another one left before it died, and wait for it for ever. The count of restarts would not do as a prefix: it
    differs between the machines of a team. So the first process names this round, and answers each of the others by
    the fresh word that it has said, until all have heard the name.
    """
    store = dist.PrefixStore("deepsquare", store)
    word = uuid4().hex
    if rank:
        store.set(f"word/{rank}", word)
        store.wait([f"answer/{word}"], timedelta(seconds=patience))
        word = store.get(f"answer/{word}").decode()
        store.set(f"heard/{word}/{rank}", "")
        return dist.PrefixStore(word, store)
    missing, end = set(range(1, world_size)), time.monotonic() + patience
    while missing := {other for other in missing if not store.check([f"heard/{word}/{other}"])}:
        for other in missing:
            if store.check([f"word/{other}"]):
                store.set(f"answer/{store.get(f'word/{other}').decode()}", word)
        if time.monotonic() > end:
            raise TimeoutError(
                f"{len(missing)} of {world_size} processes have not come within {patience:g} s, the first is {min(missing)}; "
                "see whether their machines reach this one"
            )
        time.sleep(0.05)
    return dist.PrefixStore(word, store)
