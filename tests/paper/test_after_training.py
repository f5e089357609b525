"""What is measured after training: against independent computations, and the same in a resumed run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toy_grid import RUNS, Toy
from torch import Tensor, nn

from deepsquare.models import create_model
from deepsquare.paper.grid import after_training, runner
from deepsquare.paper.grid.after_training import linear_probe, measure, reestimated_bn, softmin_signs
from deepsquare.paper.grid.runner import InMemoryTraining, TrainingRun
from deepsquare.results import Row
from deepsquare.training.trainer import evaluate


def data(size: int = 60, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return list(zip(torch.split(images, 20), torch.split(torch.arange(size) % 3, 20), strict=True))


def network(spec: str) -> nn.Module:
    """A network in eval mode whose batch statistics are not those of its inputs."""
    torch.manual_seed(1)
    model = create_model("vanilla_cnn", spec)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            module.running_mean -= 0.3
    return model.eval()


def no_images(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    raise AssertionError("it reads no training images")


def test_the_shares_of_signs_are_those_of_the_input_of_square_softmin() -> None:
    model, test, features = network("softmin"), data(), list[Tensor]()
    fc = model.get_submodule("fc")
    assert isinstance(fc, nn.Linear)
    hook = fc.register_forward_pre_hook(lambda module, args: features.append(args[0].detach()))
    for images, _ in test:
        model(images)
    hook.remove()
    x = torch.cat(features) @ fc.weight.detach().T
    medians = x.median(0).values
    fc.bias.data.copy_(-medians)
    measured = softmin_signs(model, no_images, lambda: test)
    x, labels = x - medians, torch.cat([labels for _, labels in test]).tolist()
    for k in range(10):
        everything = [float(x[n, k]) > 0 for n in range(60)]
        own = [positive for positive, label in zip(everything, labels, strict=True) if label == k]
        assert measured["all"][k] == pytest.approx(sum(everything) / 60, abs=0.02)  # one image may lie on x_k = 0
        assert measured["own"][k] == (pytest.approx(sum(own) / len(own), abs=0.06) if own else None)
    assert 0.4 < sum(measured["all"]) / 10 < 0.6


def test_batch_statistics_are_estimated_anew_on_a_copy() -> None:
    model, train, test = network("square(after='layer2')"), data(20, seed=1), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured = reestimated_bn(model, lambda count: iter(train), lambda: test)
    assert {name: torch.equal(value, before[name]) for name, value in model.state_dict().items()} == dict.fromkeys(
        before, True
    )
    expected = network("square(after='layer2')").train()
    for module in expected.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # the statistics of the one batch
    with torch.no_grad():
        expected(train[0][0])
    metrics = evaluate(expected.eval(), test)
    assert measured["loss"] == pytest.approx(metrics.loss, rel=1e-4)
    assert (measured["accuracy"], measured["images"]) == (metrics.accuracy, 20)
    assert measured["loss"] != pytest.approx(evaluate(model, test).loss, rel=1e-3)


class Maps(nn.Module):
    """A network whose last map is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(x).flatten(1)
        return out


def maps(count: int, seed: int, *, by_variance: bool) -> list[tuple[Tensor, Tensor]]:
    """Maps of two classes that differ in the variance of the first channel, or in its mean."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    x = torch.randn(count, 4, 6, 6, generator=generator)
    x = x - x.mean((2, 3), keepdim=True) + torch.randn(count, 4, 1, 1, generator=generator)
    if by_variance:
        middle = x[:, :1].mean((2, 3), keepdim=True)
        x[:, :1] = middle + (x[:, :1] - middle) * (1 + labels)[:, None, None, None]
    else:
        x[:, 0] += 3 * labels[:, None, None]
    return list(zip(torch.split(x, 50), torch.split(labels, 50), strict=True))


def probe(train: list[tuple[Tensor, Tensor]], test: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    return linear_probe(Maps(), lambda count: iter(train), lambda: test)


def test_the_probe_tells_means_from_variances() -> None:
    for by_variance in (True, False):
        measured = probe(maps(500, 0, by_variance=by_variance), maps(300, 1, by_variance=by_variance))
        assert measured["images"] == 500
        assert measured["M, S²"] > 0.9
        assert (measured["M"] < 0.6) == by_variance
        assert (measured["M, M²"] < 0.6) == by_variance


def test_the_probe_is_logistic_regression_on_standardized_features() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    train, test = maps(500, 0, by_variance=False), maps(300, 1, by_variance=False)
    measured = probe(train, test)
    x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
    means = x.mean((2, 3))
    standard = [
        (part - means[:400].mean(0)) / means[:400].std(0)
        for part in (means, torch.cat([x for x, _ in test]).mean((2, 3)))
    ]
    accuracies = []
    for decay in after_training.PROBE_DECAYS:
        # Two weights w and -w here, their difference there: the same penalty.
        fitted = linear_model.LogisticRegression(C=1 / (decay * 400), tol=1e-8).fit(standard[0][:400], y[:400])
        labels = torch.cat([labels for _, labels in test])
        scores = [fitted.score(part, labels) for part, labels in ((standard[0][400:], y[400:]), (standard[1], labels))]
        accuracies.append(scores)
    assert measured["M"] == pytest.approx(max(accuracies, key=lambda scores: scores[0])[1], abs=0.01)


def test_the_spec_decides_what_is_measured() -> None:
    expected = {
        "": {"linear_probe"},
        "softmin": {"softmin_signs"},
        "square(after='layer1')+softmin": {"softmin_signs", "reestimated_bn"},
        "moment3": set(),
    }
    for spec, names in expected.items():
        run = replace(RUNS[0], spec=spec, row="Original" if not spec else "another")
        batches, evaluation = Toy()(run)
        model = create_model("vanilla_cnn", spec)
        state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
        assert set(measure(run, model, batches, evaluation)) == names
        assert model.training
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert torch.equal(random, torch.get_rng_state())


def test_a_run_that_is_killed_while_it_is_measured_ends_with_the_same_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(RUNS[0], spec="square(after='layer1')+softmin", recipe=replace(RUNS[0].recipe, epochs=2))
    train, checkpoint = InMemoryTraining(Toy()), tmp_path / "run.pt"
    expected = train(run, None, lambda key, metrics: None)

    def killed(*args: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "measure", killed)
        with pytest.raises(KeyboardInterrupt):
            train(run, checkpoint, lambda key, metrics: None)
    resumed = train(run, checkpoint, lambda key, metrics: None)
    assert {"softmin_signs", "reestimated_bn", "linear_probe"} <= resumed.metrics.keys()
    assert outcome(resumed) == outcome(expected)


def outcome(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.metrics.items() if name not in ("cpu_seconds", "step")}


def test_a_diverged_run_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(run: TrainingRun, *args: Any, **kwargs: Any) -> Row:
        return Row(run.experiment, run.row, run.seed, run.to_recipe(), {"diverged": "epoch 1"}, 0.0)

    monkeypatch.setattr(runner, "train_to_row", diverging)
    assert InMemoryTraining(Toy())(RUNS[0], None, lambda key, metrics: None).metrics == {"diverged": "epoch 1"}
