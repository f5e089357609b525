"""Measure candidates side by side, interleaved in rounds within one run."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

Rounds = Annotated[int, tyro.conf.arg(help="Rounds; each measures every candidate.")]
Results = Annotated[Path, tyro.conf.arg(help="Folder for bench.jsonl, to which the rows are appended.")]
RESULTS = Path("out/results")


def _run(subject: str, **options: Any) -> None:
    """Call ``run`` of a module in ``deepsquare.paper.bench``; empty options are left out, so its defaults apply."""
    from deepsquare.paper import require_paper

    require_paper()
    options = {name: value for name, value in options.items() if value not in (None, ())}
    importlib.import_module(f"deepsquare.paper.bench.{subject}").run(**options)


def train(
    *, rounds: Rounds = 5, steps: int | None = None, data: Path | None = None, results: Results = RESULTS
) -> None:
    """The training loop on CIFAR-10 against bare steps, and against torchvision with a DataLoader.

    Args:
        steps: Training steps per round; one epoch if not given.
        data: Folder with CIFAR-10; downloaded and cached if not given.
    """
    _run("train", rounds=rounds, steps=steps, folder=data, results=results)


def models(
    *, rounds: Rounds = 9, backbones: tuple[str, ...] = (), specs: tuple[str, ...] = (), results: Results = RESULTS
) -> None:
    """Every technique and baseline against its plain network, in inference and training.

    Args:
        backbones: Networks; the paper's four if not given.
        specs: Specs to equip them with; all techniques and baselines if not given.
    """
    _run("models", backbones=backbones, specs=specs, rounds=rounds, results=results)


def ops(*, rounds: Rounds = 15, functions: tuple[str, ...] = (), results: Results = RESULTS) -> None:
    """Every function against memory bandwidth, the formula, torch.compile and timm's attention modules.

    Args:
        functions: Functions, such as square_pooling; all if not given.
    """
    _run("ops", functions=functions, rounds=rounds, results=results)


def data(*, data: Path, rounds: Rounds = 9, results: Results = RESULTS) -> None:
    """Every data pipeline against torchvision's ImageFolder with a DataLoader.

    Args:
        data: Folder that holds train, with a folder of images per class.
    """
    _run("data", folder=data, rounds=rounds, results=results)


def deployment(
    *, rounds: Rounds = 300, backbones: tuple[str, ...] = (), specs: tuple[str, ...] = (), results: Results = RESULTS
) -> None:
    """Every technique in onnxruntime and ExecuTorch, float32 and int8, against its plain network.

    Args:
        backbones: Networks; shufflenet_v2_x1_0 and resnet18 if not given.
        specs: Specs to equip them with; all techniques and se if not given.
    """
    _run("deployment", backbones=backbones, specs=specs, rounds=rounds, results=results)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (train, models, ops, data, deployment)
}
