"""The processes that train one model together, as started by ``torchrun``; or a single process."""

import atexit
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
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun


@dataclass(frozen=True)
class DistributedContext:
    """This process's rank among those that train together, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums over all processes."""
        if self.world_size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def shard(self, count: int) -> range:
        """This process's indices out of ``count``; every index belongs to exactly one process."""
        return range(self.rank, count, self.world_size)


SINGLE_PROCESS = DistributedContext()


# A model in DistributedDataParallel outlives its group and would release it with the GIL held, while a thread of Gloo
# waits for the GIL to release the tensors of the last collective: neither ends (torch 2.13). Released from Python, a
# group is destroyed without the GIL.
_ended_groups: list[dist.ProcessGroup | None] = []
atexit.register(_ended_groups.clear)


@contextmanager
def init_distributed(device: str | None = None) -> Iterator[DistributedContext]:
    """Join the process group that the environment describes, or stay a single process; one GPU each if available."""
    present = [name for name in VARIABLES if name in os.environ]
    if present and len(present) < len(VARIABLES):
        names, missing = ", ".join(present), ", ".join(sorted(set(VARIABLES) - set(present)))
        raise ValueError(f"the environment has {names} but not {missing}; start with torchrun, or unset them")
    rank, world_size, local = (int(os.environ.get(name, preset)) for name, preset in zip(VARIABLES, "010", strict=True))
    context = DistributedContext(rank, world_size, _select_device(device, local))
    if world_size == 1:
        yield context
        return
    store = rendezvous(next(dist.rendezvous("env://", rank, world_size))[0], rank, world_size)
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield context
    finally:
        end_process_group()


def end_process_group() -> None:
    """Destroy the process group without the deadlock that is described above."""
    _ended_groups.append(dist.group.WORLD)
    dist.destroy_process_group()


def _select_device(kind: str | None, local_rank: int) -> torch.device:
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"the device is {kind!r}; expected cpu or cuda")
    if kind == "cpu":
        return CPU
    count = torch.cuda.device_count()
    if not count:
        raise ValueError("PyTorch finds no GPU on this machine; choose --device cpu")
    if local_rank >= count:
        raise ValueError(f"there is no GPU for process {local_rank}: PyTorch finds {count}; start at most {count}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def rendezvous(store: dist.Store, rank: int, world_size: int, timeout: float = 1800.0) -> dist.Store:
    """A prefix of a store that only the processes of this attempt share.

    ``torchrun`` keeps one store over its restarts (torch 2.13), so that a restarted process may read the address that a
    dead one left, and wait for it forever. The number of restarts is no usable prefix: it differs between machines. So
    rank 0 chooses a random name for the attempt and sends it to each rank as the reply to that rank's random token,
    until all ranks have acknowledged it.
    """
    store = dist.PrefixStore("deepsquare", store)
    token = uuid4().hex
    if rank:
        store.set(f"token/{rank}", token)
        store.wait([f"reply/{token}"], timedelta(seconds=timeout))
        name = store.get(f"reply/{token}").decode()
        store.set(f"acknowledged/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    name, missing, deadline = token, set(range(1, world_size)), time.monotonic() + timeout
    while missing := {other for other in missing if not store.check([f"acknowledged/{name}/{other}"])}:
        for other in missing:
            if store.check([f"token/{other}"]):
                store.set(f"reply/{store.get(f'token/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(missing)} of {world_size} processes did not join within {timeout:g} s, the first is rank "
                f"{min(missing)}; check whether their machines can reach this one"
            )
        time.sleep(0.05)
    return dist.PrefixStore(name, store)
