"""Parameter groups: what decays, by the kind of its layer, and that an optimizer does it."""

import pytest
import torch
from torch import nn

import deepsquare as ds

DECAY, LAYERS = 0.1, (nn.Conv2d, nn.Linear)


def network(init: ds.surgery.Init = "identity") -> nn.Module:
    torch.manual_seed(0)
    return ds.create_model("resnet18", "pooling+softmin+excitation", init=init, num_classes=3)


def names(model: nn.Module, **options: bool) -> dict[float, set[str]]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = ds.param_groups(model, DECAY, **options)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(by_id), "every parameter is in one group"
    return {group["weight_decay"]: {by_id[id(parameter)] for parameter in group["params"]} for group in groups}


def test_only_the_weights_of_layers_decay() -> None:
    model = network()
    layers = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, LAYERS)}
    groups = names(model)
    assert groups[DECAY] == layers
    assert len(layers) == 21
    inserted = {name.rsplit("deepsquare_", 1)[-1] for name in groups[0.0] if "deepsquare_" in name}
    assert inserted == {
        "pooling.beta", "softmin.root_scale", "softmin.beta", "excitation.alpha", "excitation.beta",
    }  # fmt: skip
    assert {"bn1.weight", "bn1.bias", "fc.bias"} < groups[0.0]


def test_beta_never_decays() -> None:
    model = network()
    assert names(model, decay_1d=True)[0.0] == {name for name, _ in model.named_parameters() if name.endswith("beta")}
    other = nn.Sequential(nn.Linear(2, 2))
    other.register_parameter("beta", nn.Parameter(torch.ones(1)))  # of a model's own: not ours
    assert names(other, decay_1d=True) == {DECAY: {"beta", "0.weight", "0.bias"}}


def test_with_the_paper_s_init_one_group_has_the_parameters_in_their_order() -> None:
    model = network("paper")
    (group,) = ds.param_groups(model, DECAY, decay_1d=True)
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_without_gradients_shrinks_what_decays(kind: type[torch.optim.Optimizer]) -> None:
    model = network()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    kind(ds.param_groups(model, DECAY), lr=0.5).step()  # type: ignore[call-arg]
    for name, value in model.named_parameters():
        expected = before[name] * (1 - 0.5 * DECAY if value.ndim > 1 else 1)
        torch.testing.assert_close(value.detach(), expected, msg=name)


def test_what_is_no_model_or_no_weight_decay_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a model \(nn\.Module\), got 'resnet18'"):
        ds.param_groups("resnet18", 0.1)  # type: ignore[arg-type]
    for value in (-1, float("nan"), "a"):
        with pytest.raises(ValueError, match=r"weight_decay is .*; expected a number of at least 0"):
            ds.param_groups(torch.nn.Linear(1, 1), value)  # type: ignore[arg-type]
