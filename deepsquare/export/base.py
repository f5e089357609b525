"""The interface of an export runtime: an object that converts, quantizes and reads models for it.

To add a runtime, implement :class:`Runtime` in a new file and add it to ``deepsquare.export.runtimes.RUNTIMES``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from deepsquare._compat import EXPORT_KEYS, rename_keys
from deepsquare._terminal import printable
from deepsquare.preprocessing import Preprocessing

METADATA_KEY = "deepsquare"  # of the metadata in an exported file
EXTRA = "pip install 'deepsquare[export]'"


@dataclass(frozen=True)
class Metadata:
    """What an exported file says about its model."""

    name: str | None
    spec: str
    precision: str  # float32 or int8
    preprocessing: Preprocessing

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: object, path: Path) -> Metadata:
        """From the JSON in an exported file; ``path`` is for messages."""
        if not isinstance(text, str):
            raise ValueError(f"{path} has no metadata of deepsquare; expected a file that deepsquare export wrote")
        try:
            return msgspec.convert(rename_keys(msgspec.json.decode(text), EXPORT_KEYS), cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"the metadata of {path} is damaged ({printable(str(error))}); export it again") from error


@dataclass(frozen=True)
class RuntimeModel:
    """An exported model in its runtime."""

    metadata: Metadata
    shape: tuple[int | str, ...]  # of the input; a string stands for any size
    run: Callable[[Tensor], Tensor]  # without a check of the images

    def __call__(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) float32, preprocessed as the metadata says, to logits (N, K); N is any number."""
        check_images("images", images, self.shape[1:])
        logits = self.run(images.detach().cpu().contiguous())
        if logits.ndim != 2 or len(logits) != len(images) or logits.dtype != torch.float32:
            actual = f"{tuple(logits.shape)} {str(logits.dtype).removeprefix('torch.')}"
            raise ValueError(f"the exported model gives {actual} for {len(images)} images; expected (N, K) float32")
        return logits


def check_images(name: str, images: Tensor, shape: tuple[int | str, ...], reason: str = "") -> None:
    """Raise ValueError unless ``images`` is (N, *shape) float32 with N ≥ 1."""
    fits = images.ndim == 1 + len(shape) and all(
        isinstance(side, str) or actual == side for actual, side in zip(images.shape[1:], shape, strict=True)
    )
    if images.dtype != torch.float32 or not fits or not len(images):
        actual = f"{tuple(images.shape)} {str(images.dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} is {actual}; expected (N, {', '.join(map(str, shape))}) float32{reason}")


class Runtime(ABC):
    """All that deepsquare knows about one export runtime."""

    name: ClassVar[str]  # in commands and rows
    label: ClassVar[str]  # for people
    suffix: ClassVar[str]  # of its files
    modules: ClassVar[tuple[str, ...]]  # the first one reads files, all of them write
    dynamic_shapes: ClassVar[bool] = False  # one file takes any number of images at once and, on request, of any size
    flatten_maps: ClassVar[bool] = False  # the means of Square-Excitation are faster on maps of shape (N, C, H·W)
    delegate: ClassVar[str | None] = None  # the backend that runs the operations, if some may remain undelegated

    def require_modules(self) -> None:
        """Fail early if a module of this runtime is missing."""
        for module in self.modules:
            require(module)

    @abstractmethod
    def load(self, path: Path) -> RuntimeModel:
        """Read a file that :func:`deepsquare.export.export` wrote."""

    @abstractmethod
    def convert(
        self, model: nn.Module, images: Tensor, metadata: Metadata, calibration: Tensor | None, any_size: bool
    ) -> tuple[bytes, dict[str, int]]:
        """The content of a file for a lowered model, and the operations that are not delegated, by name.

        ``images`` is an example input. With ``calibration`` images the model is quantized to int8 (post-training,
        static), with the ranges that they give; ``docs/deploy.md`` says what stays in float32, and why.
        """

    @abstractmethod
    def set_num_threads(self, num_threads: int) -> None:
        """Run all models in one pool of threads; call it once in a process, before the first model is loaded."""


def require(module: str) -> Any:
    """Import a module of the extra ``export``."""
    try:
        with quiet():
            return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise ValueError(f"this needs {missing}, which is not installed: {EXTRA}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what runtimes print, warn and log, also from C++ on the error stream, and restore the logging handlers."""
    disabled, handlers = logging.root.manager.disable, logging.root.handlers[:]
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        logging.root.handlers[:] = handlers
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)
