"""Lack of memory, however it is reported, is one line that says what was tried and what to reduce."""

import errno
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.images import make_colored_folders
from helpers.processes import command_line_with_memory, start, wait
from helpers.runs import SMALL
from helpers.shell import Shell

from deepsquare._memory import OutOfMemoryError, explain_memory
from deepsquare.data import loader, open_source
from deepsquare.preprocessing import Preprocessing
from deepsquare.training import Trainer

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


class OnnxError(Exception):
    """Of a class that onnxruntime does not export."""


OnnxError.__module__ = "onnxruntime.capi.onnxruntime_pybind11_state"
REPORTS = [
    MemoryError(),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    RuntimeError(CPU),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
    OnnxError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 1"),
    RuntimeError("Failed to execute method forward, error: 0x21"),
]


@pytest.mark.parametrize("error", REPORTS, ids=str)
def test_every_report_is_explained_also_as_the_cause_of_another_error(error: Exception) -> None:
    another = ValueError("the model does not take these images")
    another.__cause__ = error
    for raised in (error, another):
        with (
            pytest.raises(OutOfMemoryError, match=r"^not enough memory for a test; do less$"),
            explain_memory("a test", "do less"),
        ):
            raise raised


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("a worker process was killed, perhaps out of memory"),  # of this library, with a message
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault. "),
    ],
    ids=str,
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))) as raised, explain_memory("a test", "do less"):
        raise error
    assert raised.value is error


def test_the_innermost_explanation_stays() -> None:
    with (
        pytest.raises(OutOfMemoryError, match=r"^not enough memory for a step; do less$"),
        explain_memory("all", "stop"),
        explain_memory("a step", "do less"),
    ):
        raise MemoryError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colored_folders(tmp_path_factory.mktemp("data"))


def batches(data: Path) -> Iterator[loader.Batch]:
    indices = [list(range(4))] * 20
    return loader.batches(open_source(data, "train"), indices, Preprocessing(), pipeline="torchvision", workers=1)


def test_a_killed_data_worker_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(loader.BatchDataset, "batch", kill)  # workers are forked
    with pytest.raises(
        OutOfMemoryError, match=r"^a data worker was killed, probably for lack of memory; use fewer work"
    ):
        list(batches(data))


@pytest.mark.parametrize(
    "message",
    [
        "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit.",
    ],
)
def test_too_little_shared_memory_is_an_error(data: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """Instead of a main process that waits for ever, if it is noticed when a worker sends its batch."""

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.Tensor, "share_memory_", fail)
    with pytest.raises(
        OutOfMemoryError, match=r"^not enough shared memory \(/dev/shm\) .*; use fewer workers .*shm-size"
    ):
        list(batches(data))


def test_a_training_step_without_memory_is_one_line(data: Path, tmp_path: Path) -> None:
    """The first map of ResNet18 alone has 154 MB."""
    errors, run = tmp_path / "stderr", tmp_path / "run"
    command = ["train", "resnet18", "--data", str(data), "--output", str(run), "--results", str(tmp_path)]
    command += ["--batch-size", "48", "--epochs", "5", *SMALL, "--size", "224"]
    process = start(command_line_with_memory, 120 * 2**20, command, stderr=errors)
    assert wait(process) == 2, errors.read_text()
    (line,) = (line for line in errors.read_text().splitlines() if "note:" not in line)
    assert line.startswith("deepsquare: error: not enough memory for a training step of 48 images of 3×224×224; set a")


def test_with_a_checkpoint_the_message_names_resume(
    data: Path, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(CPU)

    command: list[str | Path] = [
        "train",
        "shufflenet_v2_x0_5",
        "--data",
        data,
        "--output",
        tmp_path,
        "--results",
        tmp_path,
        *SMALL,
    ]
    command += ["--batch-size", "12", "--epochs", "2"]
    monkeypatch.setattr(Trainer, "logits", fail)  # of the evaluation
    expected = (
        "error: not enough memory for the evaluation of 21 images of 3×32×32; choose a smaller batch, or smaller images"
    )
    for more, hint in (
        ([], ""),
        (["--checkpoint-minutes", "0"], "; --resume continues from the last checkpoint, also"),
    ):
        code, output = shell(*command, *more)
        assert code == 2
        assert f"{expected}{hint}" in output.splitlines()[-1]
        assert ("--resume" in output) == bool(hint)


def test_a_bug_stays_a_traceback(tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("deepsquare.cli.info.cost", fail)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        shell.run("info resnet18")
    monkeypatch.setattr("deepsquare.cli.info.cost", lambda *_: torch.empty(2**60))
    code, _, errors = shell.run("info resnet18")
    assert (code, errors) == (
        2,
        "deepsquare: error: not enough memory for this command; reduce the batch or input size, or "
        "run less at the same time\n",
    )
