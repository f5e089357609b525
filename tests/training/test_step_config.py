"""The choice of a training step: the same values, and nothing of the run changed; it may lack a compiler."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.shufflenetv2 import channel_shuffle

from deepsquare.data.in_memory import InMemoryBatches, LabeledImages
from deepsquare.models import create_model
from deepsquare.training import Recipe, step_config
from deepsquare.training.channels_last import GlobalMean, Interleave, keep_channels_last
from deepsquare.training.loop import EpochMetrics, step
from deepsquare.training.matmul_conv import conv2d_as_matmul, faster_as_matmul, use_matmul
from deepsquare.training.step_config import StepChoice, StepConfig, choose_step, make_trainer, resume_or_choose

RECIPE = Recipe(epochs=1, batch_size=16, lr=0.05, warmup=0)
CHOICE = StepChoice(StepConfig(compile=True, matmul_convs=("0",)), {"eager": 100.0}, 1.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False))
    return nn.Sequential(*layers, nn.Dropout(0.0), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.inf


def batches() -> InMemoryBatches:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (64, 3, 8, 8), dtype=np.uint8))
    return InMemoryBatches(LabeledImages(images, torch.from_numpy(rng.integers(0, 4, 64))), 16, pad=1)


def train(config: StepConfig) -> tuple[list[Tensor], list[float]]:
    """The parameters after an epoch, and the loss of every step."""
    trainer, losses = make_trainer(network(), RECIPE, config), []
    for images, labels in batches().epoch(0):
        metrics = EpochMetrics()
        step(trainer, images, labels, RECIPE.lr, metrics)
        losses.append(metrics.mean_loss)
    return [parameter.detach() for parameter in trainer.model.parameters()], losses


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (3, 1, 0), (1, 1, 0), (1, 2, 0), (5, 3, 2)])
def test_a_convolution_as_a_matrix_product(kernel: int, stride: int, padding: int) -> None:
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, kernel, kernel, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(x, weight, None, stride, padding)
    actual = conv2d_as_matmul(x, weight, (stride, stride), (padding, padding))
    torch.testing.assert_close(actual, expected)
    for gradients in zip(
        *(torch.autograd.grad(y.square().sum(), (x, weight)) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(*gradients)


def test_matrix_products_are_for_supported_layers_in_training_only() -> None:
    model, x = network(), torch.randn(4, 3, 8, 8)
    assert set(faster_as_matmul(copy.deepcopy(model), x)) <= {"0", "3"}
    patched = copy.deepcopy(model)
    use_matmul(patched, ["0", "3"])
    assert patched.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(patched(x), model(x))
    patched.load_state_dict(model.state_dict())  # the running statistics differ by rounding
    assert torch.equal(patched.eval()(x), model.eval()(x))
    with pytest.raises(ValueError, match=r"1 is BatchNorm2d.*; expected a Conv2d without bias, groups or dilation"):
        use_matmul(patched, ["1"])


@pytest.mark.parametrize(
    "config",
    [StepConfig(channels_last=False), StepConfig(matmul_convs=("0", "3"))],
    ids=lambda config: config.name,
)
def test_every_step_trains_to_the_same_weights(config: StepConfig) -> None:
    torch.testing.assert_close(train(config), train(StepConfig()), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what torch.compile imports
@pytest.mark.slow
def test_a_compiled_step_trains_to_the_same_weights_and_the_choice_leaves_the_run_alone() -> None:
    torch.compiler.reset()
    torch.testing.assert_close(
        train(StepConfig(compile=True, matmul_convs=("0", "3"))), train(StepConfig()), rtol=1e-4, atol=1e-5
    )
    model = network()
    before, states = (
        copy.deepcopy(model.state_dict()),
        (torch.get_rng_state(), random.getstate(), np.random.get_state()),
    )
    choice = choose_step(model, RECIPE, batches(), compiled=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    np.testing.assert_equal(np.random.get_state(), states[2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model.get_submodule("0"))
    assert {"eager, channels_last", "eager, contiguous"} < set(choice.images_per_second)
    fastest = max(choice.images_per_second, key=lambda name: choice.images_per_second[name])
    assert choice.step.name in (fastest, StepConfig().name)


@pytest.mark.parametrize(("speed", "is_chosen"), [(104.0, False), (106.0, True)])
def test_a_step_that_is_hardly_faster_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, speed: float, is_chosen: bool
) -> None:
    default = StepConfig(threads=torch.get_num_threads())
    other = replace(default, channels_last=False)
    monkeypatch.setattr(step_config, "_measure_candidates", lambda *_: {default: 100.0, other: speed})
    choice = choose_step(network(), RECIPE, batches(), compiled=True)
    assert choice.step == (other if is_chosen else default)


@pytest.mark.parametrize(
    ("name", "spec", "replaced"),
    [
        ("shufflenet_v2_x0_5", "", 17),
        ("shufflenet_v2_x0_5", "pooling+excitation", 17),
        ("vanilla_cnn", "", 1),
        ("vanilla_cnn", "pooling", 0),
    ],
)
def test_kept_in_channels_last_a_model_trains_to_the_same_weights(name: str, spec: str, replaced: int) -> None:
    images, labels = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.arange(4)
    images = images.contiguous(memory_format=torch.channels_last)
    results = []
    for config in (StepConfig(), StepConfig(keep_channels_last=True)):
        torch.manual_seed(0)
        model = create_model(name, spec, num_classes=4).double()
        trainer, metrics = make_trainer(model, RECIPE, config), EpochMetrics()
        for _ in range(2):
            step(trainer, images, labels, RECIPE.lr, metrics)
        count = sum("forward" in vars(module) for module in model.modules())
        assert count == (replaced if config.keep_channels_last else 0)  # its blocks and the global average pooling
        results.append((metrics.mean_loss, list(model.state_dict().values()), model.eval()(images)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-7, atol=1e-9)


def test_interleaved_channels_and_their_gradients() -> None:
    first, second = (torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = Interleave.apply(first, second)  # type: ignore[no-untyped-call]
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, channel_shuffle(torch.cat((first, second), 1), 2))
    assert torch.autograd.gradcheck(Interleave.apply, (first, second))


def test_the_gradient_of_a_global_mean() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(GlobalMean.apply(x), F.adaptive_avg_pool2d(x, 1))  # type: ignore[no-untyped-call]
    assert torch.autograd.gradcheck(GlobalMean.apply, (x,))


def test_modules_that_are_observed_keep_their_own_forward() -> None:
    model = create_model("shufflenet_v2_x0_5")
    assert keep_channels_last(copy.deepcopy(model)) == 17
    block = model.get_submodule("stage2.0")
    block.register_forward_hook(lambda module, inputs, output: None)
    assert keep_channels_last(model) == 16
    assert "forward" not in vars(block)
    assert keep_channels_last(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.AdaptiveAvgPool2d((1, 1)))) == 1


def test_a_short_run_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_config, "_Candidates", None)
    choice = choose_step(network(), RECIPE, batches())
    assert choice == StepChoice(StepConfig(threads=torch.get_num_threads()))


def test_a_run_that_compiling_would_delay_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(step_config, "MIN_STEPS", 0)
    choice = choose_step(network(), RECIPE, batches())
    eager = StepConfig(), StepConfig(channels_last=False), StepConfig(keep_channels_last=True)
    assert set(choice.images_per_second) == {config.name for config in eager}


def test_without_a_compiler_the_run_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(torch, "compile", fail)
    assert not choose_step(network(), RECIPE, batches(), compiled=True).step.compile
    assert "torch.compile fails (No working C++ compiler found); the run continues without" in caplog.text
    resumed = step_config.without_failing_compiler(CHOICE, network(), RECIPE, batches())
    assert resumed.step == StepConfig()


def test_a_candidate_with_another_loss_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Threshold(100, 5.0), nn.Flatten(), nn.Linear(4, 4))

    monkeypatch.setattr(torch, "compile", wrong)
    assert not choose_step(network(), RECIPE, batches(), compiled=True).step.compile


def test_a_network_that_diverges_at_once_is_left_to_its_run() -> None:
    model = network()
    assert isinstance(model, nn.Sequential)
    model.append(NotFinite())
    choice = choose_step(model, RECIPE, batches(), compiled=True)
    assert choice.step == StepConfig(threads=torch.get_num_threads())
    assert choice.images_per_second == {}


def test_the_choice_of_a_row() -> None:
    stored = json.loads(json.dumps(CHOICE.metrics()))
    assert StepChoice.from_metrics(stored) == replace(CHOICE, seconds=0.0)
    assert StepChoice.from_metrics(StepChoice(StepConfig()).metrics()) is None  # nothing was measured
    for damaged in (None, "x", {}, {**stored, "threads": 0}, {**stored, "images_per_second": 3}):
        assert StepChoice.from_metrics(damaged) is None


def test_the_choice_is_stored_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert resume_or_choose(path, False, lambda: CHOICE) == CHOICE
    assert resume_or_choose(path, True, lambda: StepChoice(StepConfig())) == CHOICE
    for damaged in (b"nonsense", b'{"step": {"threads": 0}}', b'{"step": {"compile": "yes"}}', b"\xff"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is damaged .*; remove it and the checkpoint beside it"):
            resume_or_choose(path, True, lambda: CHOICE)
    assert resume_or_choose(path, False, lambda: CHOICE) == CHOICE  # no step was made yet: a fresh choice
    path.unlink()
    assert resume_or_choose(path, True, lambda: CHOICE).step == StepConfig(threads=torch.get_num_threads())
    assert not path.exists()
