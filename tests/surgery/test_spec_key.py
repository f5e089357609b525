"""The state_dict of an equipped model names its spec: it does not load silently into another model."""

import copy
import io
import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm.utils
import torch
from helpers.models import create, images, same_state
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel

import deepsquare as ds
from deepsquare.surgery import is_spec_key, spec_key

NO_KEYS = "softmin(scale='none')+pooling+square(after='layer1.conv')"  # techniques without parameters
KEY = "deepsquare_spec_pooling_and_softmin_scale_none_and_square_after_layer1_conv"


def stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Tensor] = torch.load(buffer, weights_only=True)
    return loaded


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """The mean of two state_dicts in float64, as scripts that average checkpoints compute it."""
    states = [model.state_dict(), copy.deepcopy(model).state_dict()]
    return {key: torch.stack([state[key].double() for state in states]).mean(0) for key in states[0]}


def averaged_model(model: nn.Module) -> dict[str, Tensor]:
    ema = AveragedModel(model, use_buffers=True)
    ema.update_parameters(model)
    ema.update_parameters(model)
    again = AveragedModel(copy.deepcopy(model), use_buffers=True)
    again.load_state_dict(ema.state_dict())
    state: dict[str, Tensor] = again.module.state_dict()
    return state


def timms_ema(model: nn.Module) -> dict[str, Tensor]:
    ema = timm.utils.ModelEmaV3(model)
    ema.update(model)
    state: dict[str, Tensor] = ema.module.state_dict()
    return state


def gathered(model: Any) -> dict[str, Tensor]:
    """By ``torch.distributed.checkpoint``, which looks up keys as attributes."""
    state: Any = get_model_state_dict(model)
    return dict(state)


STATES: dict[str, Callable[[nn.Module], Mapping[str, Tensor]]] = {
    "state_dict": lambda m: m.state_dict(),
    "torch.save": lambda m: stored(m.state_dict()),
    "pickled model": lambda m: pickle.loads(pickle.dumps(m)).state_dict(),
    "copied model": lambda m: copy.deepcopy(m).state_dict(),
    "AveragedModel": averaged_model,
    "ModelEmaV3": timms_ema,
    "average": averaged,
    "distributed checkpoint": gathered,
    "compiled": lambda m: gathered(torch.compile(m, backend="eager")),
    "unwrapped": lambda m: {k.removeprefix("0."): v for k, v in nn.Sequential(m).state_dict().items()},
}


@pytest.mark.parametrize("how", STATES)
def test_it_loads_only_where_the_spec_is_the_same(how: str) -> None:
    model = ds.equip(create("vanilla_cnn"), NO_KEYS)
    plain = list(create("vanilla_cnn").state_dict())
    state = STATES[how](model)
    assert sorted(state) == sorted([*plain, KEY])
    same = ds.equip(create("vanilla_cnn"), "square(after='layer1.conv')+pooling+softmin(scale='none')")
    assert str(same.load_state_dict(state)) == "<All keys matched successfully>"
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{KEY}"'):
        create("vanilla_cnn").load_state_dict(state)
    other = ds.equip(create("vanilla_cnn"), "pooling")
    with pytest.raises(RuntimeError, match=rf'Missing .*"deepsquare_spec_pooling"[^"]*Unexpected .*"{KEY}"'):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "0.{KEY}"'):
        nn.Sequential(create("vanilla_cnn")).load_state_dict({"0." + key: value for key, value in state.items()})
    assert other.load_state_dict(state, strict=False).unexpected_keys == [KEY]


def test_plain_weights_load_strictly_where_no_key_is_ours() -> None:
    model, state = ds.equip(create("vanilla_cnn"), NO_KEYS), create("vanilla_cnn").state_dict()
    for value in state.values():
        value.add_(1)
    model.load_state_dict(state)
    assert same_state(ds.unequip(model), state)
    with_keys = ds.equip(create("vanilla_cnn"), "softmin")
    assert with_keys.load_state_dict(state, strict=False).missing_keys == ["fc.deepsquare_softmin.root_scale"]


def test_it_is_no_parameter_and_no_buffer() -> None:
    plain, model = create("vanilla_cnn"), ds.equip(create("vanilla_cnn"), NO_KEYS)
    assert [k for k, _ in model.named_parameters()] == [k for k, _ in plain.named_parameters()]
    assert [k for k, _ in model.named_buffers()] == [k for k, _ in plain.named_buffers()]
    x = images(2, 32)
    model.eval()
    assert torch.equal(torch.func.functional_call(model, model.state_dict(), x), model(x))
    assert list(model.state_dict())[-1] == KEY
    assert list(ds.unequip(model).state_dict()) == list(plain.state_dict())
    assert not model._state_dict_hooks
    assert not model._load_state_dict_pre_hooks
    plain.load_state_dict(model.state_dict())
    assert not any(map(is_spec_key, ds.equip(plain, "", dropout=0.1).state_dict()))


def test_another_order_and_other_options() -> None:
    assert spec_key("pooling+softmin") == spec_key(" softmin + pooling") == "deepsquare_spec_pooling_and_softmin"
    specs = ["softmin", "softmin(sign=1)", "softmin(scale='none')", "gem", "gem(p=2.5)", "gem(p=25)", "gsop", "gsop1"]
    assert len({spec_key(spec) for spec in specs}) == len(specs)
    assert all(spec_key(spec).isidentifier() for spec in specs)


def test_safetensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = ds.equip(create("vanilla_cnn"), NO_KEYS), create("vanilla_cnn")
    save_model(model, str(tmp_path / "m"))
    missing, unexpected = load_model(ds.equip(create("vanilla_cnn"), NO_KEYS), str(tmp_path / "m"))
    assert not missing
    assert not unexpected
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{KEY}"'):
        load_model(plain, str(tmp_path / "m"))
    save_file(model.state_dict(), tmp_path / "f")
    with caplog.at_level(logging.WARNING, logger="deepsquare"):
        assert ds.load_weights(model, tmp_path / "f") == ds.load_weights(model, tmp_path / "m") == []
        assert not caplog.messages
        assert ds.load_weights(plain, tmp_path / "f") == []
    assert [f"holds a model with spec '{KEY}'; this one has spec ''" in message for message in caplog.messages] == [
        True
    ]


def test_the_files_of_save_are_as_before(tmp_path: Path) -> None:
    model = ds.equip(create("vanilla_cnn"), NO_KEYS)
    ds.save(model, tmp_path / "m")
    assert set(load_file(tmp_path / "m")) == set(create("vanilla_cnn").state_dict())
    assert ds.load_weights(model, tmp_path / "m") == []


def test_set_model_state_dict() -> None:
    model, target = ds.equip(create("vanilla_cnn"), NO_KEYS), ds.equip(create("vanilla_cnn"), NO_KEYS)
    state = get_model_state_dict(model)
    for value in state.values():
        assert isinstance(value, Tensor)
        value.add_(1)
    set_model_state_dict(target, state)
    assert same_state(target, model.state_dict())
