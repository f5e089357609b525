"""Running statistics computed anew: against the mean over batches by hand, and against torch's own function."""

import copy
from typing import Any

import pytest
import torch
from helpers.models import copied_state, create, images, same_state
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import deepsquare as ds

BATCHES = [images(4, 16, seed) for seed in range(3)]


class Small(nn.Module):
    """Dropout before a normalization, one that only training calls, and one without running statistics."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.dropout = nn.Dropout(dropout)
        self.bn = nn.BatchNorm2d(6, momentum=0.3)
        self.auxiliary = nn.BatchNorm2d(6)
        self.untracked = nn.BatchNorm2d(6, track_running_stats=False)
        nn.init.ones_(self.auxiliary.running_mean)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.dropout(self.conv(x)))
        out: Tensor = self.untracked(self.auxiliary(x) if self.training else x)
        return out


def test_the_statistics_are_the_mean_over_batches_and_nothing_else_changes() -> None:
    torch.manual_seed(0)
    model = Small()
    model.bn.eval()
    before, modes = copied_state(model), [m.training for m in model.modules()]
    assert ds.recalibrate_batchnorm(model, ((x, torch.zeros(4)) for x in BATCHES)) is model
    maps = [model.conv(x).detach() for x in BATCHES]  # no dropout
    mean = torch.stack([x.mean((0, 2, 3)) for x in maps]).mean(0)
    variance = torch.stack([x.var((0, 2, 3)) for x in maps]).mean(0)
    torch.testing.assert_close(model.bn.running_mean, mean)
    torch.testing.assert_close(model.bn.running_var, variance)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert ([m.training for m in model.modules()], model.bn.momentum) == (modes, 0.3)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("sync", [False, True])
def test_it_agrees_with_torch_where_nothing_else_depends_on_the_mode(sync: bool) -> None:
    model: Any = ds.equip(create("cifar"), "pooling+excitation+encoding", input_shape=(3, 32, 32))
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    expected, batches = copy.deepcopy(model), [images(4, 32, seed) for seed in range(3)]
    update_bn(batches, expected)
    assert same_state(ds.recalibrate_batchnorm(model, batches), expected.state_dict())


class FailsLate(Small):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("out of memory")
        return super().forward(x)


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = FailsLate()
    before = copied_state(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        ds.recalibrate_batchnorm(model, BATCHES)
    with pytest.raises(ValueError, match=r"^batches is empty; recalibration needs at least one batch$"):
        ds.recalibrate_batchnorm(model, [])
    with pytest.raises(TypeError, match=r"^batches is one tensor; expected an iterable of batches, as \[images\]"):
        ds.recalibrate_batchnorm(model, BATCHES[0])
    wrong: tuple[Any, ...] = ({"image": BATCHES[0]}, [], ([BATCHES[0]], 0))
    for batch in wrong:
        with pytest.raises(TypeError, match=r"^a batch is a (dict|list|tuple); expected a tensor of images, or"):
            ds.recalibrate_batchnorm(model, [batch])
    with pytest.raises(TypeError, match=r"^expected a model \(nn.Module\), got 'resnet18'$"):
        ds.recalibrate_batchnorm("resnet18", BATCHES)  # type: ignore[type-var]
    assert same_state(model, before)
    assert (model.training, model.bn.momentum) == (True, 0.3)


def test_square_encoding_overflows_in_eval_mode_until_it_is_recalibrated() -> None:
    x = images(4)
    model = ds.equip(create("resnet50"), "encoding", input_shape=(3, 64, 64)).eval()
    with torch.no_grad():
        assert not bool(model(x).isfinite().all())
        assert bool(ds.recalibrate_batchnorm(model, [x])(x).isfinite().all())


@pytest.mark.parametrize("spec", ["encoding", "square(after='layer1.0.bn1')"])
def test_equip_warns_of_the_statistics_of_a_trained_model(spec: str) -> None:
    shape, trained = (3, 32, 32), ds.recalibrate_batchnorm(create("cifar"), [images(size=32)])
    with pytest.warns(UserWarning, match="statistics of 9 layers .* without the squares .*recalibrate_batchnorm"):
        ds.equip(trained, spec, input_shape=shape)
    ds.equip(ds.unequip(trained), spec, init="identity", input_shape=shape)
    ds.equip(ds.unequip(trained), "pooling+excitation", input_shape=shape)
    ds.equip(create("cifar"), spec, input_shape=shape)


def test_statistics_that_are_not_finite_are_refused_and_undone() -> None:
    model = create("cifar")
    before = copied_state(model)
    with pytest.raises(ValueError, match=r"statistics of \d+ layers, first \S+, are not finite"):
        ds.recalibrate_batchnorm(model, [images(4, 32), images(4, 32) * float("nan")])
    assert same_state(model, before)
    with pytest.raises(TypeError, match=r"the images are of type torch\.uint8; expected floating point"):
        ds.recalibrate_batchnorm(model, [images(4, 32).to(torch.uint8)])
    assert same_state(model, before)
