"""Checkpoints from which a model can be rebuilt: safetensors with the model's name, spec and kwargs in the header.

Unpickling a file can run code, so pickled files are refused; :func:`load_pretrained` reads the weights of one without.
"""

import copy
import importlib.util
import logging
import math
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepsquare._archive import check_archive
from deepsquare._files import atomic_write
from deepsquare.header import NO_HEADER, Header, PathLike, RunInfo, is_pickled, read_header
from deepsquare.models import WEIGHT_KWARGS, ModelConfig, create_model, create_on_meta
from deepsquare.preprocessing import Preprocessing
from deepsquare.surgery import (
    PREFIX,
    TECHNIQUES,
    Init,
    equip_record,
    fold,
    intact_record,
    is_folded,
    is_spec_key,
    parse_spec,
    refuse_sharded,
    sites,
    spec_key,
    unwrap,
)
from deepsquare.surgery.inputs import example_shape, float_tensor
from deepsquare.surgery.insertion import BETA

__all__ = ["RunInfo", "load", "load_pretrained", "load_weights", "read_header", "save"]
logger = logging.getLogger("deepsquare")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # that weights may have in a file
MAX_TRIED = 2**22  # values of an input on which a model with several types is tried
VALUES = 2**24, 4  # of a model: those that any may have, and for each in its file; heads differ, and fold drops some
CALLS = 50_000, 200  # of torch to build a model: those for any, and for each of its tensors; networks take about ten


def save(
    model: nn.Module, path: PathLike, preprocessing: Preprocessing | None = None, run: RunInfo | None = None
) -> None:
    """Write ``model`` to a safetensors file from which :func:`load` rebuilds it.

    A model that :func:`deepsquare.create_model` did not build is saved with its spec, but without its name; load it
    with :func:`load_weights`. ``preprocessing`` says how an image becomes the model's input; evaluation, export and
    prediction read it from the file. The file is written to a temporary path and renamed, so it is never incomplete.
    """
    model = unwrap(model)
    record = intact_record(model)
    refuse_sharded(model, "save")
    config: ModelConfig | None = getattr(model, "deepsquare_config", None)
    header = Header(
        name=config.name if config else None,
        kwargs=config.kwargs if config else {},
        spec=record.spec if record else "",
        dropout=record.dropout if record else None,
        input_shape=record.sites.input_shape if record else None,
        folded=is_folded(model),
        init=record.init if record else "paper",
        preprocessing=preprocessing,
        run=run,
    )
    metadata = header.dumps()
    state = {key: value for key, value in model.state_dict().items() if not is_spec_key(key)}
    if missing := next((key for key, value in state.items() if value.is_meta), None):
        raise ValueError(
            f"{type(model).__name__} has no weights to save: {missing} is on the meta device; load them first"
        )
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    first = {value.untyped_storage().data_ptr(): key for key, value in reversed(tensors.items())}
    for key, value in tensors.items():
        if first[value.untyped_storage().data_ptr()] != key:  # a tensor that two keys share
            tensors[key] = value.clone()
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"could not write {path}: {error}") from error


def load(path: PathLike, spec: str | None = None, init: Init | None = None) -> nn.Module:
    """Rebuild the model that :func:`save` wrote.

    ``spec`` and ``init`` equip it otherwise than the checkpoint says; parameters that the file lacks are logged.
    """
    header = read_header(path)
    if header.name is None:
        equipped = header.spec or header.dropout is not None
        starting = f", init={header.init!r}" if header.init != "paper" else ""
        equipping = f", call deepsquare.equip(model, {header.spec!r}, dropout={header.dropout}{starting})"
        equipping = equipping if equipped else ""
        folding = ", fold it" if header.folded else ""
        raise ValueError(
            f"{path} holds a model that create_model did not build, so it cannot be rebuilt by name; build the model "
            f"yourself{equipping}{folding}, then call deepsquare.load_weights(model, path)"
        )
    if header.name.startswith("timm/deepsquare_") and importlib.util.find_spec("timm") is not None:
        from deepsquare import timm_models  # noqa: F401  # registers the name with timm
    kwargs = {key: value for key, value in header.kwargs.items() if key not in WEIGHT_KWARGS}
    tensors, terms = _read_tensors(path), {term.name for term in parse_spec(header.spec)}
    kwargs |= {"dropout": header.dropout, "input_shape": header.input_shape, "init": init or header.init}
    stored = sum(value.numel() for value in tensors.values())
    build = partial(_build, header, header.spec if spec is None else spec, kwargs, path, stored)
    # First without memory: a header may name any size, and the file shows whether it is true.
    dry_run = partial(create_on_meta, max_calls=CALLS[0] + CALLS[1] * len(tensors))
    _require_fit(build(dry_run), tensors, path, header, terms)
    model = build(create_model)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if key in tensors and (tensors[key].dtype in FLOATS or not value.is_floating_point()):
            value.data = value.data.to(tensors[key].dtype)
    _fill(model, tensors, path, header, terms)
    _check_dtypes(model, tensors, path)
    return model


def load_weights(model: nn.Module, path: PathLike) -> list[str]:
    """Load a safetensors file into ``model`` and return the keys that the file lacks.

    Only DeepSquare's own keys may be missing (the file holds the base model); any other mismatch is an error.
    """
    header = read_header(path)
    tensors, terms = _take_spec(_read_tensors(path), model, path, header)
    return _fill(unwrap(model), tensors, path, header, terms)


def load_pretrained(model: nn.Module, path: PathLike) -> list[str]:
    """Start ``model`` from trained weights: as :func:`load_weights`, but for other classes too.

    A classifier that has another shape in the file, or is missing there, keeps its initial values and is logged. The
    file may also be a ``state_dict`` that ``torch.save`` wrote.
    """
    path, model = Path(path), unwrap(model)
    if path.is_file() and is_pickled(path):
        header, tensors = NO_HEADER, _read_state_dict(path)
    else:
        header, tensors = read_header(path), _read_tensors(path)
    tensors, terms = _take_spec(tensors, model, path, header)
    expected = model.state_dict()
    # torchvision sets the auxiliary classifiers that a model is built without to None.
    if left_out := [key for key in tensors if getattr(model, key.split(".")[0], "") is None]:
        logger.warning("%s: left out, as the model is built without: %s", path, ", ".join(left_out))
        tensors = {key: value for key, value in tensors.items() if key not in left_out}
    # Files of before torch 0.4.1 have no counts, and torch loads them too.
    tensors |= {key: expected[key] for key in expected.keys() - tensors.keys() if key.endswith("num_batches_tracked")}
    other = {key for key, value in expected.items() if key not in tensors or tensors[key].shape != value.shape}
    if any(PREFIX not in key for key in other):
        classifier = f"{sites(model).classifier}."
        if anew := [key for key in other if key.startswith(classifier) and (key in tensors or PREFIX not in key)]:
            logger.warning("%s: another classifier; initialized anew: %s", path, ", ".join(sorted(anew)))
            tensors |= {key: expected[key] for key in anew}
    return _fill(model, tensors, path, header, terms)


def _take_spec(
    tensors: dict[str, Tensor], model: nn.Module, path: PathLike, header: Header
) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors without the key that names a spec, and its terms; warns if it is another one than the model's."""
    record = equip_record(model)
    spec = record.spec if record else ""
    named = [key for key in tensors if is_spec_key(key)]  # by save_file or save_model of safetensors
    stored = [spec_key(header.spec)] if header.spec else [key.rpartition(".")[2] for key in named]
    if stored and stored != [spec_key(spec)]:  # not each has keys of its own
        logger.warning("%s holds a model with spec %r; this one has spec %r", path, header.spec or stored[0], spec)
    terms = {term.name for term in parse_spec(header.spec)}
    terms |= {name for name in TECHNIQUES for key in stored if re.search(rf"_{name}(_|$)", key)}
    return {key: value for key, value in tensors.items() if key not in named}, terms


def _read_tensors(path: PathLike) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose header was read."""
    try:
        return load_file(path)
    except Exception as error:  # a type of numbers that this torch lacks, or a file that another program changes
        raise ValueError(f"the tensors of {path} cannot be read ({error}); fetch or save it again") from error


def _build(
    header: Header, spec: str, kwargs: dict[str, Any], path: PathLike, stored: int, create: Callable[..., nn.Module]
) -> nn.Module:
    """The model of a header, by ``create``, if it has no more values than a file with ``stored`` may have."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* with γ = 0")  # the weights are loaded later
            model = create(header.name, spec, **kwargs)
    except MemoryError:
        raise
    except Exception as error:  # kwargs that the builder does not check can fail anywhere
        raise ValueError(f"{path} holds {header.name}, which cannot be built: {error}") from error
    values = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if values > VALUES[0] + VALUES[1] * stored:
        raise ValueError(
            f"{path} does not fit its header: {header.name} with spec {spec!r} and kwargs {header.kwargs} has "
            f"{values} values, the file {stored}; fetch or save it again"
        )
    return fold(model.eval()) if header.folded else model


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled ``state_dict``, alone or as ``state_dict`` or ``model`` in a training checkpoint."""
    check_archive(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or unsafe file makes torch and pickle fail in many ways
        raise ValueError(
            f"{path} cannot be read as a state_dict without running code from it, or is damaged; expected what "
            "torch.save(model.state_dict(), path) writes"
        ) from error
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not state or not all(map(_is_entry, state, state.values())):
        raise ValueError(f"{path} holds no state_dict; expected what torch.save(model.state_dict(), path) writes")
    return {key.removeprefix("module."): value for key, value in state.items()}  # of DistributedDataParallel


def _is_entry(key: object, value: object) -> bool:
    """Whether both are of a state_dict, with values that can be read: not on the meta device, sparse or quantized."""
    if not isinstance(key, str) or not isinstance(value, Tensor):
        return False
    return not (value.is_meta or value.is_quantized or value.layout != torch.strided)


def _add_betas(tensors: dict[str, Tensor], model: nn.Module, path: PathLike, terms: set[str]) -> dict[str, Tensor]:
    """With β = 1 for the modules of a file without β: it was trained with them as the paper's."""
    record, full = equip_record(model), {}
    for key, value in model.state_dict().items():
        module, _, name = key.rpartition(".")
        if name == BETA and key not in tensors and module.rpartition(PREFIX)[2] in terms:
            full[key] = torch.ones_like(value)
    if full and record is not None and record.init == "anneal":
        raise ValueError(
            f"{path} was trained with its modules as the paper's (init='paper'), and annealing starts without them; "
            "load it into a model with init='paper', or 'identity' to let it learn how far they act"
        )
    return tensors | full


def _require_fit(
    model: nn.Module, tensors: dict[str, Tensor], path: PathLike, header: Header, terms: set[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors for the state of ``model``, and its keys that the file, with these terms, lacks; or an error."""
    tensors, expected = _add_betas(tensors, model, path, terms), _state(model)
    new = [key for key in expected if key not in tensors and PREFIX in key and not header.folded]
    problems = [f"{key} is missing" for key in expected if key not in tensors and key not in new]
    unknown = (key for key in tensors if key not in expected)
    problems += [f"{key if key.isprintable() else repr(key)} is not part of the model"[-200:] for key in unknown]
    for key, value in expected.items():
        if key in tensors and tensors[key].shape != value.shape:
            problems.append(f"{key} is {tuple(tensors[key].shape)} in the file, {tuple(value.shape)} in the model")
        elif key in tensors and value.is_floating_point() and tensors[key].dtype not in FLOATS:
            problems.append(f"{key} is {tensors[key].dtype} in the file, {value.dtype} in the model")
    if problems:
        listed = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        name = header.name or "a model without a name"
        raise ValueError(
            f"{path} does not fit {_describe(model)}: {listed}. The file holds {name} with spec {header.spec!r}, "
            f"init={header.init!r} and kwargs {header.kwargs}: build and equip the model as it was saved, with later "
            "changes, and use deepsquare.load_weights; load weights of a base model before equipping it with a "
            "technique that widens its classifier"
        )
    return tensors, new


def _state(model: nn.Module) -> dict[str, Tensor]:
    expected = model.state_dict()
    for key in filter(is_spec_key, list(expected)):
        del expected[key]
    return expected


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: PathLike, header: Header, terms: set[str]) -> list[str]:
    """Load ``tensors`` into ``model``, all or none; return the keys that the file, with these terms, lacks."""
    tensors, new = _require_fit(model, tensors, path, header, terms)
    before = copy.deepcopy(_state(model))
    state = OrderedDict(tensors)
    state._metadata = before._metadata  # type: ignore[attr-defined]  # the modules' versions: MNASNet needs them
    try:
        model.load_state_dict(state, strict=False)
    except ValueError as error:
        model.load_state_dict(before)
        raise ValueError(f"{path}: {error}") from error
    if new:
        more = f" and {len(new) - 4} more" if len(new) > 4 else ""
        logger.warning(
            "%s: loaded %d tensors; new in %s and left at their initial values: %s%s",
            path, len(tensors), _describe(model), ", ".join(new[:4]), more,
        )  # fmt: skip
    return new


def _check_dtypes(model: nn.Module, tensors: dict[str, Tensor], path: PathLike) -> None:
    """Run a model with several types of floats once: batch normalization may have another one, a convolution not."""
    counts = Counter(value.dtype for value in tensors.values() if value.is_floating_point())
    if len(counts) < 2:
        return
    (usual, _), *_, (rare, _) = counts.most_common()
    key = next(key for key, value in tensors.items() if value.dtype == rare)
    shape, training = example_shape(model), model.training
    try:
        if math.prod(shape) > MAX_TRIED:
            raise ValueError(f"{shape} is a large input to try them on")
        with torch.no_grad():
            model.eval()(torch.zeros((1, *shape), dtype=float_tensor(model).dtype))
    except Exception as error:
        raise ValueError(
            f"{path} has tensors of other types, such as {key} of {rare} among others of {usual}, and the model does "
            f"not run with both ({error}); save it again, or build it and call deepsquare.load_weights, which converts"
        ) from error
    finally:
        model.train(training)


def _describe(model: nn.Module) -> str:
    record = equip_record(model)
    return type(model).__name__ + (f" equipped with {record.spec!r}" if record else "")
