"""Kill runs at random moments, start them again, and compare the results with undisturbed ones: ``make soak``.

``PYTHONPATH=tests python tools/soak.py --kills 100 --seed 0`` sends SIGKILL to training runs that are resumed, to
several that want the same folder, to exports to the same file, and to grids of runs. A violation is anything that
differs from the undisturbed reference: a bit of the weights, a row, a line of the log, a file; also a damaged or
temporary file, a lock that outlives its process, and a process that fails.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import torch
from helpers import toy_grid
from helpers.images import make_colored_folders
from helpers.processes import command_line, start, wait
from helpers.runs import SMALL
from safetensors.torch import load_file

import deepsquare as ds
from deepsquare._files import InUseError, exclusive
from deepsquare.preprocessing import Preprocessing
from deepsquare.results import Store

TIMES = ("seconds", "time", "cpu_seconds", "step")  # values that differ from run to run
Items = dict[str, str]  # what a folder holds, by name: tensors, rows, lines of the log, files


@dataclass(frozen=True)
class Kind:
    """What is started again in a folder until it is complete.

    Attributes:
        name: for the output.
        share: of the kills.
        process: the function of a process, and its arguments.
        items: what the folder holds.
        processes: how many are started at the same time.
        orphans: seconds within which the children of a killed process end by themselves.
    """

    name: str
    share: float
    process: Callable[[Path, Random], tuple[Any, ...]]
    items: Callable[[Path], Items]
    processes: int = 1
    orphans: float = 0.0


@dataclass
class Soak:
    """The kills of one kind so far, and what was wrong."""

    kind: Kind
    folder: Path
    random: Random
    kills: int = 0
    runs: int = 0
    refused: int = 0
    violations: list[str] = field(default_factory=list)

    def __call__(self, kills: int) -> None:
        """Run the reference, then runs that are killed so many times together."""
        reference = self.folder / "reference"
        reference.mkdir(parents=True)
        wait(start(int, stderr=_errors(reference)))  # starts the fork server
        started = time.monotonic()
        if (code := wait(self._start(reference))) != 0:
            raise RuntimeError(f"the undisturbed {self.kind.name} ended with {code}: {_stderr(reference)[-2000:]}")
        seconds, expected = time.monotonic() - started, self._items(reference)
        while self.kills < kills and not self.violations:
            self.runs += 1
            folder = self.folder / f"run{self.runs}"
            folder.mkdir()
            while not self._attempt(folder, kills, seconds, expected) and not self.violations:
                pass

    def _attempt(self, folder: Path, kills: int, seconds: float, expected: Items) -> bool:
        """Start the processes, and kill one of them if kills are left; whether the folder is complete at their end."""
        _errors(folder).unlink(missing_ok=True)
        processes = [self._start(folder) for _ in range(self.kind.processes)]
        if self.kills < kills:
            time.sleep(self.random.uniform(0, seconds))
            if alive := [process for process in processes if process.is_alive()]:
                self._kill(self.random.choice(alive))
        codes = [wait(process) for process in processes]
        refused = _stderr(folder).count(" is in use by ")
        self.refused += refused
        if codes.count(2) != refused or set(codes) - {0, 2, -signal.SIGKILL} or refused == len(codes):
            self._violate(folder, f"exit codes {codes}, of which {refused} because the folder is in use")
        if "Traceback" in _stderr(folder) or "damaged" in _stderr(folder):
            self._violate(folder, "an error message")
        for path in folder.rglob("*.lock"):
            try:
                with exclusive(path, str(path), "but all processes have ended"):
                    pass
            except InUseError as error:
                self._violate(folder, str(error))
        items = self._items(folder)
        wrong = [name for name, item in items.items() if not name.startswith("file ") and item != expected.get(name)]
        if 0 in codes and not self.kind.orphans:  # grids leave out what another grid's processes still train
            wrong += sorted(items.keys() ^ expected.keys())
        if wrong:
            self._violate(folder, f"not as in the undisturbed one: {', '.join(wrong[:5])}")
        return items == expected

    def _start(self, folder: Path) -> BaseProcess:
        return start(*self.kind.process(folder, self.random), stderr=_errors(folder))

    def _kill(self, process: BaseProcess) -> None:
        """Kill a process, with or without its children, and wait until those have ended by themselves."""
        assert process.pid is not None
        if self.random.random() < 0.5:
            with suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        self.kills += process.exitcode == -signal.SIGKILL
        end = time.monotonic() + self.kind.orphans
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(process.pid, 0)
                time.sleep(0.05)

    def _items(self, folder: Path) -> Items:
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pt")
        return {**self.kind.items(folder), **{f"file {path.relative_to(folder)}": "" for path in files}}

    def _violate(self, folder: Path, what: str) -> None:
        self.violations.append(f"{self.kind.name}, {folder.name}, after {self.kills} kills: {what}")
        print(f"{self.violations[-1]}\n{_stderr(folder)[-2000:]}", file=sys.stderr)


def cli(arguments: Sequence[str]) -> None:
    """``deepsquare`` with data workers that are forked, as without the fork server that this process comes from."""
    os.dup2(2, 1)
    multiprocessing.set_start_method("fork", force=True)
    command_line(arguments)


def _errors(folder: Path) -> Path:
    return folder.with_suffix(".err")


def _stderr(folder: Path) -> str:
    return _errors(folder).read_text() if _errors(folder).exists() else ""


def _rows(store: Path) -> Items:
    items: Items = {}
    for row in Store(store).rows():
        name = f"row {row.row}, seed {row.seed}"
        name += " again" * (name in items)
        items[name] = json.dumps({key: value for key, value in row.metrics.items() if key not in TIMES})
    return items


def _run_items(folder: Path) -> Items:
    """The tensors of a training run's model, the lines of its log, and its row."""
    model, log = folder / "run" / "model.safetensors", folder / "run" / "log.jsonl"
    tensors = load_file(model) if model.exists() else {}
    items = {f"tensor {name}": sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
    for line in map(json.loads, log.read_text().splitlines() if log.exists() else []):
        items[f"epoch {line['epoch']}"] = json.dumps({key: value for key, value in line.items() if key not in TIMES})
    return items | _rows(folder / "imagenet.jsonl")


def kinds(work: Path) -> list[Kind]:
    """All kinds, with their data in ``work``."""
    data, checkpoint = make_colored_folders(work / "data"), work / "model.safetensors"
    torch.manual_seed(0)
    model = ds.create_model("vanilla_cnn", "pooling+softmin", num_classes=3)
    ds.save(model, checkpoint, Preprocessing(size=32, resize=32))

    def train(folder: Path, random: Random) -> tuple[Any, ...]:
        command = ["train", "shufflenet_v2_x0_5+pooling", "--data", str(data), "--output", str(folder / "run")]
        command += ["--resume", "--checkpoint-minutes", "0", "--epochs", "4", "--batch-size", "12", "--ema", "0.9"]
        return cli, [*command, *SMALL, "--results", str(folder), "--workers", random.choice("01")]

    def export(folder: Path, random: Random) -> tuple[Any, ...]:
        return cli, ["export", str(checkpoint), "--to", "onnx", "--output", str(folder / "model.onnx")]

    def exported(folder: Path) -> Items:
        return {f"content of {path.name}": sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.onnx")}

    return [
        Kind("training", 0.4, train, _run_items),
        Kind("training by three at once", 0.2, train, _run_items, processes=3),
        Kind("export by two at once", 0.2, export, exported, processes=2),
        Kind(
            "grid",
            0.2,
            lambda folder, _: (toy_grid.run, folder / "rows.jsonl", 0.2),
            lambda folder: _rows(folder / "rows.jsonl"),
            orphans=10,
        ),
    ]


def soak(work: Path, kills: int, seed: int = 0, names: Sequence[str] = ()) -> list[str]:
    """The violations of that many kills over the kinds of these names, or all; prints the counts of each."""
    chosen = [kind for kind in kinds(work) if not names or kind.name in names]
    violations: list[str] = []
    killed, left, share = 0, kills, sum(kind.share for kind in chosen)
    for kind in chosen:
        one = Soak(kind, work / kind.name.replace(" ", "-"), Random(f"{seed} {kind.name}"))
        count = left if kind is chosen[-1] else round(kills * kind.share / share)
        one(count)
        counts = (
            f"{one.kills} kills, {one.runs} runs, {one.refused} processes refused, {len(one.violations)} violations"
        )
        print(f"{kind.name}: {counts}", flush=True)
        violations, killed, left = violations + one.violations, killed + one.kills, left - count
    print(f"{killed} kills, seed {seed}: {len(violations)} violations")
    return violations


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill runs at random moments and compare their results.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the tests
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(bool(soak(Path(folder), options.kills, options.seed)))
