"""The spec as a key of the state_dict, so that equipped weights do not load silently into another model.

Most techniques have no parameters, and their models the same keys as the base model. So the state_dict of an equipped
model has one key more, ``deepsquare_spec_…``, which names the spec. A plain model refuses it when loading strictly, as
any unexpected key. The value is an empty tensor: ``torch.save`` and safetensors store it, and averages of weights leave
it as it is. It is neither parameter nor buffer, so optimizers, EMA, DDP and exporters do not see it.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from deepsquare.surgery.insertion import PREFIX
from deepsquare.surgery.spec import parse_spec

SPEC = PREFIX + "spec_"


def spec_key(spec: str) -> str:
    """The key for ``spec``, the same for every order of its terms.

    An identifier, and an attribute of the model: torch splits keys at dots, and looks some of them up in the model.
    """
    terms = sorted(str(term).replace("-", "minus_") for term in parse_spec(spec))
    return SPEC + "_and_".join(re.sub(r"\W+", "_", term).strip("_") for term in terms)


def is_spec_key(key: str) -> bool:
    """Whether a key of a state_dict, with the path of the model before it, names a spec."""
    return key.rpartition(".")[2].startswith(SPEC)


def add_spec_key(model: nn.Module, spec: str) -> None:
    """Let the state_dict of ``model`` tell its spec."""
    model.__dict__[spec_key(spec)] = torch.empty(0)
    model.register_state_dict_post_hook(_write)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_check)  # type: ignore[no-untyped-call]


def remove_spec_key(model: nn.Module) -> None:
    """Undo :func:`add_spec_key`."""
    for key in _own(model):
        del model.__dict__[key]
    for hooks in (model._state_dict_hooks, model._load_state_dict_pre_hooks):
        for index, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (_write, _check):
                del hooks[index]


def _own(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.__dict__.items() if key.startswith(SPEC)}


def _write(model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    state_dict.update({prefix + key: value for key, value in _own(model).items()})


def _check(
    model: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Accept weights of this spec and those without one; torch reports the key of another spec as unexpected."""
    own = [prefix + key for key in _own(model)]
    given = [key for key in state_dict if key.startswith(prefix + SPEC)]
    if given and given != own:
        missing += own
    for key in own:
        state_dict.pop(key, None)
