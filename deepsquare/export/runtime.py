"""A deployed model in its own runtime: an ONNX file in onnxruntime, a .pte file in ExecuTorch's."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from deepsquare.checkpoint import Preprocessing

Runtime = Literal["onnx", "executorch"]
SUFFIXES: dict[Runtime, str] = {"onnx": ".onnx", "executorch": ".pte"}
KEY = "deepsquare"  # under which a file describes itself
_shared: set[Runtime] = set()  # runtimes with one pool of threads for all programs
EXTRA = "pip install 'deepsquare[export]'"


@dataclass(frozen=True)
class Metadata:
    """What a file says of the model in it.

    Attributes:
        name: of the model, if it has one.
        spec: what it was equipped with.
        precision: ``float32`` or ``int8``.
        images: how a image becomes its input, and the names of its classes.
    """

    name: str | None
    spec: str
    precision: str
    preprocessing: Preprocessing

    def dumps(self) -> str:
        """As text, to be stored in the file."""
        return json.dumps({**vars(self), "pictures": vars(self.preprocessing)})

    @classmethod
    def loads(cls, text: str | None, path: Path) -> Metadata:
        """From what a file holds; a clear word if that is not ours."""
        if text is None:
            raise ValueError(f"{path} does not say how images become its input; expected a file of deepsquare export")
        try:
            stored = json.loads(text)
            name, spec, precision = (stored[key] for key in ("name", "spec", "precision"))
            return cls(name, spec, precision, Preprocessing.read(stored["pictures"], path))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"what {path} says of itself is damaged ({error}); export it again") from error


class RuntimeModel(ABC):
    """Images as the description says, (N, 3, H, W) float32 → logits (N, K)."""

    metadata: Metadata
    shape: tuple[int | str, ...]  # of the input; words stand for any number

    def __call__(self, images: Tensor) -> Tensor:
        """As many images as there are."""
        given, expected = tuple(images.shape), self.shape[1:]
        fits = len(given) == 4 and all(isinstance(e, str) or g == e for g, e in zip(given[1:], expected, strict=True))
        if images.dtype != torch.float32 or not fits or not len(images):
            kind = str(images.dtype).removeprefix("torch.")
            raise ValueError(f"images is {given} {kind}; expected (N, {', '.join(map(str, expected))}) float32")
        return self._run(images.detach().cpu().contiguous())

    @abstractmethod
    def _run(self, images: Tensor) -> Tensor: ...


class OnnxModel(RuntimeModel):
    """In onnxruntime, on the CPU."""

    def __init__(self, path: Path) -> None:
        onnxruntime = require("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.use_per_session_threads = "onnx" not in _shared
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # of classes that onnxruntime does not name
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"{path} is no ONNX file that onnxruntime can run: {reason}") from error
        self.metadata = Metadata.loads(self.session.get_modelmeta().custom_metadata_map.get(KEY), path)
        (read,) = self.session.get_inputs()
        self._input, self.shape = read.name, tuple(read.shape)

    def _run(self, images: Tensor) -> Tensor:
        (said,) = self.session.run(None, {self._input: images.numpy()})
        return torch.from_numpy(said)


class ExecuTorchModel(RuntimeModel):
    """In ExecuTorch's runtime, with XNNPACK; the number of images at once is fixed in the file."""

    def __init__(self, path: Path) -> None:
        runtime = require("executorch.runtime")
        with path.open("rb") as file:
            if file.read(6)[4:] != b"ET":  # its mark; ExecuTorch may abort the process on other bytes
                raise ValueError(f"{path} is no ExecuTorch program; give a file of deepsquare export")
        try:
            with _quiet():
                self._program = runtime.Runtime.get().load_program(path)
                names = self._program.method_names
                self._forward = self._program.load_method("forward")
        except RuntimeError as error:
            raise ValueError(f"{path} is no complete ExecuTorch program ({error}); export it again") from error
        text = self._program.load_method(KEY).execute([])[0] if KEY in names else None
        self.metadata = Metadata.loads(text, path)
        self.shape = tuple(self._forward.metadata.input_tensor_meta(0).sizes())
        self.batch_size = int(self.shape[0])

    def _run(self, images: Tensor) -> Tensor:
        """In parts of the file's own number; the last is filled up."""
        said = []
        for part in torch.split(images, self.batch_size):
            filled = torch.cat((part, part[:1].expand(self.batch_size - len(part), *part.shape[1:])))
            said.append(self._forward.execute([filled])[0][: len(part)].clone())
        return torch.cat(said)


def load_exported(path: str | os.PathLike[str]) -> RuntimeModel:
    """The program in a file of :func:`deepsquare.export.exporter`, told by its ending."""
    path = Path(path)
    runtime = runtime_of(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return (OnnxModel if runtime == "onnx" else ExecuTorchModel)(path)


def share_threads(runtime: Runtime, threads: int) -> None:
    """Give all programs of a runtime one pool of threads; once in a process, before the first is opened.

    In onnxruntime each has its own otherwise, which spins for a while beside the program that runs next.
    """
    if runtime == "onnx":
        require("onnxruntime").set_global_thread_pool_sizes(threads, 1)
    else:
        require("executorch.extension.pybindings.portable_lib")._unsafe_reset_threadpool(threads)
    _shared.add(runtime)


def runtime_of(path: Path) -> Runtime:
    """The runtime of a file, by its ending."""
    for runtime, ending in SUFFIXES.items():
        if path.suffix.lower() == ending:
            return runtime
    endings = " or ".join(f"{ending} for {runtime}" for runtime, ending in SUFFIXES.items())
    raise ValueError(f"the file is {path}; expected the ending {endings}")


def require(module: str) -> Any:
    """A module of the extra ``export``, or a word on how to get it."""
    try:
        with _quiet():
            return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise ValueError(f"this needs {missing}, which is not installed: {EXTRA}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of theirs are not shown; ExecuTorch's C++ code writes what it looks for straight to the error stream.

    Nor do they change how the process logs.
    """
    handlers = logging.root.handlers[:]
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.root.handlers[:] = handlers
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
