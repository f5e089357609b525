"""What is measured on a network once it is trained, by its spec; no part of a run's identity.

The weights do not change, and the seconds of the run do not include it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare.batchnorm import recalibrate_batchnorm
from deepsquare.nn import EleSquare, SquareSoftmin
from deepsquare.results import round_for_json
from deepsquare.training import Batches, Evaluation
from deepsquare.training.trainer import evaluate, preserved_random_state

if TYPE_CHECKING:
    from deepsquare.paper.grid.runner import TrainingRun

PROBED = ("Original", "DeepSquare3", "Square-Pooling")  # rows of the vanilla CNN that get a linear probe
BN_IMAGES = 10_000  # training images
PROBE_IMAGES = 25_000  # training images; a fifth of them chooses the decay
PROBE_DECAYS = (1e-2, 1e-3, 1e-4)
PROBE_STEPS = 40  # of L-BFGS for each decay, each from the weights of the one before

TrainImages = Callable[[int], Iterator[tuple[Tensor, Tensor]]]  # batches with so many images, or all
Measurement = Callable[[nn.Module, TrainImages, Evaluation], dict[str, Any]]


def measure(run: TrainingRun, model: nn.Module, batches: Batches, evaluation: Evaluation) -> dict[str, Any]:
    """The measurements that the run's network calls for, by name.

    Training images are those of the epoch after the last one, augmented as in training.
    """

    def train_images(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        with closing(batches.epoch(run.recipe.epochs)) as epoch:
            yield from islice(epoch, max(1, count // run.recipe.batch_size))

    modules = list(model.modules())
    wanted: dict[str, tuple[Measurement, bool]] = {
        "softmin_signs": (softmin_signs, any(isinstance(module, SquareSoftmin) for module in modules)),
        "reestimated_bn": (reestimated_bn, any(isinstance(module, EleSquare) for module in modules)),
        "linear_probe": (linear_probe, run.model == "vanilla_cnn" and run.row in PROBED),
    }
    training = model.training
    with preserved_random_state():
        measured = {name: one(model.eval(), train_images, evaluation) for name, (one, apply) in wanted.items() if apply}
    model.train(training)
    return measured


def softmin_signs(model: nn.Module, train_images: TrainImages, evaluation: Evaluation) -> dict[str, Any]:
    """For each class k, the share of test images with x_k > 0, x being the input of Square-Softmin.

    ``all`` counts all images, ``own`` those of class k. A share well between 0 and 1 says that class k uses both sides
    of x_k = 0.
    """
    softmin = next(module for module in model.modules() if isinstance(module, SquareSoftmin))
    inputs = _inputs(model, softmin, evaluation())
    positive = torch.cat([(x.flatten(1) > 0).float() for x in inputs])  # (N, K)
    own = F.one_hot(torch.cat([labels for _, labels in evaluation()]), positive.shape[1]).float()
    of_class = (positive * own).sum(0) / own.sum(0)  # NaN for a class without images
    return {"all": round_for_json(positive.mean(0).tolist()), "own": round_for_json(of_class.tolist())}


def reestimated_bn(model: nn.Module, train_images: TrainImages, evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation of a copy whose batch statistics are the mean over batches of training images.

    Running statistics lag behind the weights, and a square amplifies the error.
    """
    recalibrated, count = copy.deepcopy(model), 0

    def images() -> Iterator[Tensor]:
        nonlocal count
        for batch, _ in train_images(BN_IMAGES):
            count += len(batch)
            yield batch

    recalibrate_batchnorm(recalibrated, images())
    metrics = evaluate(recalibrated, evaluation())
    (loss,) = round_for_json([metrics.loss], 5)
    return {"accuracy": metrics.accuracy, "loss": loss, "overflows": metrics.overflows, "images": count}


def linear_probe(model: nn.Module, train_images: TrainImages, evaluation: Evaluation) -> dict[str, Any]:
    """Equation 21: the test accuracy of a linear classifier on the means M and the variances S² of the last map.

    Square-Pooling extracts G = M² + S². ``M, M²`` has as many features as ``M, S²`` but no variance.
    """
    train = _moments(model, train_images(PROBE_IMAGES))
    test = _moments(model, evaluation())
    accuracies: dict[str, Any] = {}
    for name, columns in _FEATURES.items():
        (features, labels), (test_features, test_labels) = ((columns(m, g), labels) for m, g, labels in (train, test))
        accuracies[name] = _probe(features, labels, test_features, test_labels)
    return {**accuracies, "images": len(train[-1])}


_FEATURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "M": lambda m, g: m,
    "G": lambda m, g: g,
    "M, S²": lambda m, g: torch.cat([m, g - m.square()], 1),
    "M, M²": lambda m, g: torch.cat([m, m.square()], 1),
}


def _moments(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The mean and the mean of squares of each channel of the last map, and the labels."""
    pool, stored = model.get_submodule("pool"), []
    for images, labels in batches:
        (x,) = _inputs(model, pool, [(images, labels)])
        stored.append((x.mean((2, 3)), x.square().mean((2, 3)), labels))
    means, squares, labels = map(torch.cat, zip(*stored, strict=True))
    return means, squares, labels


def _inputs(model: nn.Module, module: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What the module reads from each batch."""
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with torch.no_grad():
            for images, _ in batches:
                model(images)
    finally:
        hook.remove()
    return inputs


def _probe(features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor) -> float:
    """The test accuracy of multinomial logistic regression on standardized features.

    Its decay is the one with the highest accuracy on the last fifth of the training images.
    """
    count = len(labels) - len(labels) // 5
    mean, std = features[:count].mean(0), features[:count].std(0).clamp(min=1e-6)
    train, held_out, test = ((x - mean) / std for x in (features[:count], features[count:], test_features))
    layer = nn.Linear(features.shape[1], int(max(labels.max(), test_labels.max())) + 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    best, accuracy = -1.0, 0.0
    for decay in PROBE_DECAYS:
        _fit(layer, train, labels[:count], decay)
        if (chosen := _accuracy(layer, held_out, labels[count:])) > best:
            best, accuracy = chosen, _accuracy(layer, test, test_labels)
    return accuracy


def _fit(layer: nn.Linear, features: Tensor, labels: Tensor, decay: float) -> None:
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=PROBE_STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(features), labels) + decay * layer.weight.square().sum()
        torch.autograd.backward(value)
        return value.item()

    optimizer.step(loss)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _accuracy(layer: nn.Linear, features: Tensor, labels: Tensor) -> float:
    return int((layer(features).argmax(1) == labels).sum()) / len(labels)
