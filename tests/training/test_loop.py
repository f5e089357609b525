"""The training loop: its steps against plain SGD, divergence, and runs that are resumed."""

import errno
import math
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.points import Points
from torch import Tensor, nn
from torch.nn import functional as F

from deepsquare.results import unpack_bits
from deepsquare.training import CifarRecipe, DivergedError, History, Recipe, evaluate, fit
from deepsquare.training.loop import PATIENCE, tune_malloc
from deepsquare.training.state_file import previous_path


def network(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


RECIPE = Recipe(epochs=4, lr=0.05, warmup=1.0, weight_decay=1e-3)


def test_the_lr_rises_linearly_and_decays_by_a_cosine() -> None:
    recipe = Recipe(epochs=12, lr=0.4, warmup=2)
    assert recipe.lr_at(0) == 0
    assert recipe.lr_at(1) == pytest.approx(0.2)
    assert recipe.lr_at(2) == pytest.approx(0.4)
    assert recipe.lr_at(7) == pytest.approx(0.2)  # half way down
    assert recipe.lr_at(4.5) == pytest.approx(0.2 * (1 + math.cos(math.pi / 4)))
    assert recipe.lr_at(12) == pytest.approx(0)
    assert Recipe(epochs=1, warmup=0, lr=0.4).lr_at(0) == pytest.approx(0.4)
    assert Recipe(epochs=1, warmup=1, lr=0.4).lr_at(1) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs is 0; expected at least 1"),
        ("lr", 0.0, "lr is 0.0; expected above 0"),
        ("lr", math.nan, "lr is nan; expected above 0"),
        ("warmup", 5.0, "warmup is 5.0; expected between 0 and the 4 epochs"),
        ("momentum", 1.0, "momentum is 1.0"),
        ("momentum", 0.0, "nesterov is True; expected False where momentum is 0"),
        ("weight_decay", -1.0, "weight_decay is -1.0; expected at least 0"),
        ("pad", -1, "pad is -1; expected at least 0"),
        ("batch_size", 2.5, "batch_size is 2.5; expected int"),
        ("flip", "no", "flip is 'no'; expected bool"),
    ],
)
def test_a_recipe_checks_its_values(field: str, value: float, message: str) -> None:
    arguments: dict[str, Any] = {"epochs": 4, field: value}
    with pytest.raises((ValueError, TypeError), match=message):
        CifarRecipe(**arguments)


def test_fit_does_the_steps_of_plain_sgd() -> None:
    data = Points()
    model, plain = network(), network()
    history = fit(model, data, RECIPE, data.evaluation)

    velocity = [torch.zeros_like(p) for p in plain.parameters()]  # Nesterov as Sutskever et al. (2013), in torch's form
    losses: list[list[float]] = []
    for epoch in range(4):
        losses.append([])
        for step, (points, labels) in enumerate(data.epoch(epoch)):
            lr = RECIPE.lr_at(epoch + (step + 1) / len(data))
            loss = F.cross_entropy(plain(points), labels)
            gradients = torch.autograd.grad(loss, list(plain.parameters()))
            losses[-1].append(loss.item())
            with torch.no_grad():
                for parameter, gradient, speed in zip(plain.parameters(), gradients, velocity, strict=True):
                    whole = gradient + 1e-3 * parameter
                    speed.mul_(0.9).add_(whole)
                    parameter.sub_(lr * (whole + 0.9 * speed))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert history.train_loss == pytest.approx([sum(part) / len(part) for part in losses], rel=1e-4)
    logits = plain.eval()(data.points)
    assert history.loss[-1] == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-4)
    assert history.accuracy[-1] == (logits.argmax(1) == data.labels).double().mean().item() > 0.9
    assert unpack_bits(history.correct, len(data.labels)).tolist() == (logits.argmax(1) == data.labels).tolist()
    assert history.epochs == 4
    assert history.seconds > 0


def test_evaluate_counts_every_image_and_leaves_the_mode() -> None:
    data, model = Points(), network()
    uneven = [(data.points[:50], data.labels[:50]), (data.points[50:], data.labels[50:])]
    model.train()
    parts, whole = evaluate(model, uneven), evaluate(model, data.evaluation())
    assert parts[:4] == pytest.approx(whole[:4])
    assert parts.correct.tolist() == whole.correct.tolist()
    assert parts.correct.double().mean().item() == parts.accuracy
    assert model.training


class StoppedError(Exception):
    pass


def stop_after(epochs: int) -> Any:
    def on_epoch(history: History) -> None:
        if history.epochs == epochs:
            raise StoppedError

    return on_epoch


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("epochs", [1, 3, 4])
def test_a_stopped_run_ends_with_the_same_weights(tmp_path: Path, epochs: int, dropout: float) -> None:
    data, whole = Points(), network(dropout=dropout)
    expected = fit(whole, data, RECIPE, data.evaluation)
    path = tmp_path / "run.pt"
    stopped = network(dropout=dropout)
    with pytest.raises(StoppedError):
        fit(stopped, data, RECIPE, data.evaluation, checkpoint=path, identity="a", on_epoch=stop_after(epochs))
    resumed = network(99, dropout)
    history = fit(resumed, data, RECIPE, data.evaluation, checkpoint=path, identity="a")
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert history.train_loss == expected.train_loss
    assert history.accuracy == expected.accuracy


def test_cpu_time_adds_up_and_an_old_checkpoint_has_none(tmp_path: Path) -> None:
    data, path = Points(), tmp_path / "run.pt"
    first = fit(network(), data, RECIPE, data.evaluation, checkpoint=path)
    assert first.cpu_seconds > 0
    assert first.metrics()["cpu_seconds"] == round(first.cpu_seconds, 1)
    assert fit(network(), data, RECIPE, data.evaluation, checkpoint=path).cpu_seconds == first.cpu_seconds
    state = torch.load(path, weights_only=True)
    del state["progress"]["history"]["cpu_seconds"]
    torch.save({**state, "version": 3}, path)
    assert fit(network(), data, RECIPE, data.evaluation, checkpoint=path).cpu_seconds == 0


def test_a_checkpoint_of_another_run_or_none_is_refused(tmp_path: Path) -> None:
    data, path = Points(), tmp_path / "run.pt"
    fit(network(), data, RECIPE, data.evaluation, checkpoint=path, identity="a")
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"another run: its identity is a, expected b\. Remove it or choose another path"
    ):
        fit(network(), data, RECIPE, data.evaluation, checkpoint=path, identity="b")
    with pytest.raises(ValueError, match=r"another run: its momentum is 0.9, expected 0.5\. Remove"):
        fit(network(), data, replace(RECIPE, momentum=0.5), data.evaluation, checkpoint=path, identity="a")
    with pytest.raises(ValueError, match=r"run\.pt belongs to another model: "):
        fit(nn.Linear(2, 2), data, RECIPE, data.evaluation, checkpoint=path, identity="a")
    assert path.read_bytes() == before
    previous_path(path).unlink()
    for damaged in (b"", before[: len(before) // 2], b"nonsense"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is not a training checkpoint.*remove it to start again"):
            fit(network(), data, RECIPE, data.evaluation, checkpoint=path, identity="a")
    torch.save({"version": 2, "progress": {}}, path)
    with pytest.raises(
        ValueError, match=r"has no ema, model, optimizer, random, recipe, scaler; remove it to start again"
    ):
        fit(network(), data, RECIPE, data.evaluation, checkpoint=path, identity="a")


class Sabotage(nn.Module):
    """A linear network whose outputs are changed from some step on."""

    def __init__(self, after: int, factor: float) -> None:
        super().__init__()
        self.linear, self.after, self.factor, self.steps = nn.Linear(2, 2), after, factor, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        out: Tensor = self.linear(x) * (self.factor if self.steps > self.after else 1.0)
        return out


def test_a_loss_that_is_not_finite_stops_the_run_before_it_reaches_the_weights() -> None:
    data, model = Points(), Sabotage(after=6, factor=math.nan)
    with pytest.raises(DivergedError, match=r"epoch 2: the loss is nan at step 3, lr 0\.\d+; try a lower lr") as info:
        fit(model, data, RECIPE, data.evaluation)
    assert info.value.history.epochs == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_nan_logits_count_as_misclassified() -> None:
    logits = torch.tensor([[torch.nan, 0.0], [1.0, 0.0], [0.0, 1.0]])
    metrics = evaluate(nn.Identity(), [(logits, torch.zeros(3, dtype=torch.int64))])
    assert (metrics.accuracy, metrics.top5) == pytest.approx((1 / 3, 2 / 3))
    assert metrics.overflows == 1


def test_an_evaluation_that_is_not_finite_is_logged_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    class OnlyInTraining(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if not self.training:
                out = torch.cat((out[:2] * math.nan, out[2:]))  # as when a square overflows for some
            return out

    data, histories = Points(), []
    for kind in (nn.Linear, OnlyInTraining):
        nn.init.zeros_((model := kind(2, 2)).weight)
        nn.init.zeros_(model.bias)
        histories.append(fit(model, data, RECIPE, data.evaluation))
    plain, history = histories
    assert history.train_loss == plain.train_loss
    assert 0.5 < history.accuracy[-1] <= plain.accuracy[-1]
    assert math.isnan(history.loss[-1])
    assert "epoch 1: 2 images have no finite loss in the evaluation" in caplog.text


def test_other_errors_are_no_divergence() -> None:
    class Faulty(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (1 // 0)

    data, none = Points(), Points(count=0)
    with pytest.raises(ZeroDivisionError):
        fit(Faulty(2, 2), data, RECIPE, data.evaluation)
    with pytest.raises(ValueError, match="an epoch has no batches"):
        fit(network(), none, RECIPE, data.evaluation)
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        fit(network(), data, RECIPE, lambda: [])


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    data = Points()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        OSError, match=r"cannot write the checkpoint .*run\.pt \(No space left on device\); free some space"
    ):
        fit(network(), data, RECIPE, data.evaluation, checkpoint=tmp_path / "run.pt")
    assert not list(tmp_path.iterdir())


def test_a_loss_that_stays_above_chance_counts_as_diverged() -> None:
    data = Points()
    recipe = Recipe(epochs=10, warmup=2.0, lr=1e-6)
    last = 2 + PATIENCE  # the warm-up is not judged
    with pytest.raises(DivergedError, match=rf"epoch {last}: the loss is .*, no better than chance \(0.693\)") as info:
        fit(Sabotage(after=-1, factor=-100), data, recipe, data.evaluation)
    assert info.value.history.epochs == last
    short = Recipe(epochs=1, warmup=0.0, lr=1e-6)
    with pytest.raises(DivergedError, match="epoch 1"):
        fit(Sabotage(after=-1, factor=-100), data, short, data.evaluation)


def test_the_allocator_is_set_where_it_can_be() -> None:
    assert tune_malloc() or platform.libc_ver()[0] != "glibc"
