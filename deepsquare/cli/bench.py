"""``deepsquare bench``: measurements side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro


def bench(
    subject: tyro.conf.Positional[Literal["train", "models", "ops", "data", "deploy"]],
    *,
    rounds: int | None = None,
    steps: int | None = None,
    backbones: tuple[str, ...] = (),
    specs: tuple[str, ...] = (),
    functions: tuple[str, ...] = (),
    data: Path | None = None,
    results: Path = Path("out/results"),
) -> None:
    """Measure side by side, in turns within one run.

    Args:
        subject: train is our loop on CIFAR-10 against bare steps, and against torchvision with a DataLoader; models is
            every technique and peer against its plain network; ops is every function against the limit of the memory,
            the formula, the compiler and timm's attentions; data is every way to read images against torchvision's;
            deploy is every technique in onnxruntime and ExecuTorch, float32 and int8, against its plain network.
        rounds: Turns of each contestant: 5 for train, 9 for models and data, 15 for ops and 300 for deploy if not
            given.
        steps: Of train, the training steps of a turn; one epoch when not given.
        backbones: Of models, the networks, the paper's four when not given; of deploy, shufflenet_v2_x1_0 and resnet18.
        specs: Of models and deploy, what is put into them; all techniques and peers when not given, of deploy all
            techniques and se.
        functions: Of ops, the functions; all when not given.
        data: Of train, the folder with CIFAR-10; fetched and cached when not given. Of data, the folder that holds
            train, with a folder of images for each class.
        results: Folder for the rows.
    """
    from deepsquare.paper.bench import data as images
    from deepsquare.paper.bench import models, ops, train

    if subject == "train":
        train.run(rounds=5 if rounds is None else rounds, steps=steps, folder=data, results=results)
    elif subject == "models":
        turns = 9 if rounds is None else rounds
        models.run(backbones or models.BACKBONES, specs or models.SPECS, rounds=turns, results=results)
    elif subject == "deploy":
        from deepsquare.paper.bench import deployment as deploy

        turns = 300 if rounds is None else rounds
        deploy.run(backbones or deploy.BACKBONES, specs or deploy.SPECS, rounds=turns, results=results)
    elif subject == "data":
        if data is None:
            raise ValueError("bench data needs images; give --data DIR, which holds train with a folder for each class")
        images.run(data, rounds=9 if rounds is None else rounds, results=results)
    else:
        ops.run(functions or tuple(ops.FUNCTIONS), rounds=15 if rounds is None else rounds, results=results)
