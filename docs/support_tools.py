"""Which models start at the identity, and which tools take them: the second half of the support matrix.

For every term that a model has a site for, on random images, in evaluation mode:

- *identity*: with γ and the bias of every normalization drawn at random, ``equip(…, init="identity")`` changes the
  outputs by at most 1e-6 of the largest; β has a finite, nonzero gradient at the first step, and the module's own
  parameters have one at the second.
- *fx*: ``torch.fx.symbolic_trace`` gives a graph with the outputs of the equipped model, if it takes the base model.
- *trace*: so does ``torch.jit.trace``, saved and loaded.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepsquare as ds
from deepsquare.results import Row
from deepsquare.surgery import PREFIX, Sites
from deepsquare.surgery.techniques import TECHNIQUES

PAPER_TERMS = ("pooling", "softmin", "excitation", "encoding")  # for fx and trace; the other poolings act at one site
COLUMNS = ("identity", "fx", "trace")
LIMIT = 1e-6
NOT_THE_BASE, BASE_IS_DEAD = "not the base model", "no gradient in the base model"


def check_tools(model: nn.Module, present: Sites, images: Tensor, terms: list[str]) -> dict[str, dict[str, str]]:
    """The outcome of every check by column and term; terms without a site are left out."""
    model.eval().requires_grad_(False)  # gradients of β and of the modules are enough
    randomize(model)
    with torch.no_grad():
        before = logits_of(model(images))
    bases = {column: outcome(check, model, images, before) for column, check in TRACERS.items()}
    outcomes: dict[str, dict[str, str]] = {column: {} for column in COLUMNS}
    for term in terms:
        kind = TECHNIQUES[term].kind
        if kind is None or not present.of_kind(kind):
            continue
        outcomes["identity"][term] = outcome(identity, model, images, before, term)
        if term not in PAPER_TERMS:
            continue
        with equipped(model, term, images):
            halfway(model)
            with torch.no_grad():
                expected = logits_of(model(images))
            for column, check in TRACERS.items():
                taken = bases[column] == "works"
                outcomes[column][term] = outcome(check, model, images, expected) if taken else NOT_THE_BASE
    return outcomes


def outcome(check: Callable[..., str | None], *args: Any) -> str:
    """``works``, or why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(*args) or "works"
    except Exception as error:
        first = str(error).strip().split("\n")[0][:160]
        return f"fails: {type(error).__name__}: {first}"


def logits_of(output: Any) -> Tensor:
    """The first tensor of an output."""
    return output if isinstance(output, Tensor) else logits_of(output[0])


def randomize(model: nn.Module) -> None:
    """Draw γ and the bias of every normalization at random, and every other weight that starts at 0."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            bias = name.endswith("bias")
            if (value.ndim == 1 and name in ("weight", "bias", "gamma")) or not (bias or bool(value.any())):
                low, high = (0.0, 0.1) if bias else (0.2, 0.6)  # with a negative bias many a ReLU is dead
                nn.init.uniform_(value, low, high, generator=generator)


def halfway(model: nn.Module) -> None:
    """β away from 0, where the module acts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if PREFIX in name and name.endswith(".beta"):
                parameter.fill_(0.1)


@contextmanager
def equipped(model: nn.Module, term: str, images: Tensor) -> Iterator[None]:
    """Equip the model in place for a while: the largest take gigabytes."""
    ds.equip(model, term, init="identity", input_shape=images.shape[1:])
    try:
        yield
    finally:
        ds.unequip(model)


def identity(model: nn.Module, images: Tensor, before: Tensor, term: str) -> str | None:
    """Why the model does not start at the identity, if so."""
    with equipped(model, term, images):
        with torch.no_grad():
            error = float((logits_of(model(images)) - before).abs().max() / before.abs().max())
        if not error <= LIMIT:
            return f"fails: the outputs differ by {error:.1e}"
        if missing_gradient(model, images) is None:
            return None
    with equipped(model, term, images):
        try:
            return missing_gradient(model.double(), images.double())  # a deep network's gradients may underflow
        finally:
            model.float()


def missing_gradient(model: nn.Module, images: Tensor) -> str | None:
    """Two training steps of β and of the modules' own parameters; which of them has no gradient when, if any."""
    own = {name: parameter for name, parameter in model.named_parameters() if PREFIX in name}
    betas = {name for name in own if name.endswith(".beta")}
    optimizer = torch.optim.Adam(own.values(), lr=1e-3)  # its steps do not vanish with the gradients
    for step in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, images))
        for name in sorted(betas if step == 0 else own.keys() - betas):
            grad = own[name].grad
            if grad is None or not bool(grad.isfinite().all()) or not bool(grad.any()):
                dead = is_dead(model, images, name.split(f".{PREFIX}")[0])
                return BASE_IS_DEAD if dead else f"fails: no gradient of {name} at step {step + 1}"
        optimizer.step()
    return None


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    """Cross-entropy; the classes are the numbers of the images."""
    return F.cross_entropy(logits_of(model(images)).flatten(1), torch.arange(len(images)))


def is_dead(model: nn.Module, images: Tensor, path: str) -> bool:
    """Whether the layer of the base model at ``path`` has no gradient: behind it a ReLU is 0 everywhere."""
    weight = model.get_submodule(path)._parameters.get("weight")
    if weight is None:
        return False
    (grad,) = torch.autograd.grad(loss_of(model, images), weight.requires_grad_(), allow_unused=True)
    weight.requires_grad_(False)
    return grad is None or not bool(grad.any())


def symbolic(model: nn.Module, images: Tensor, expected: Tensor) -> str | None:
    """Why torch.fx does not take the model, if so."""
    return compare(torch.fx.symbolic_trace(model), images, expected)


def traced(model: nn.Module, images: Tensor, expected: Tensor) -> str | None:
    """Why torch.jit.trace does not take the model, if so."""
    with tempfile.NamedTemporaryFile() as file:
        torch.jit.save(torch.jit.trace(model, images, check_trace=False, strict=False), file.name)  # type: ignore[no-untyped-call]
        return compare(torch.jit.load(file.name), images, expected)  # type: ignore[no-untyped-call]


TRACERS = {"fx": symbolic, "trace": traced}


def compare(model: Callable[[Tensor], Any], images: Tensor, expected: Tensor) -> str | None:
    """How the outputs differ, if they do."""
    with torch.no_grad():
        error = float((logits_of(model(images)) - expected).abs().max() / expected.abs().max())
    return None if error <= 1e-4 else f"fails: the outputs differ by {error:.1e}"


HEADER = """
## Start at the identity, and tools

*Identity*: the number of terms with which, at `init="identity"`, outputs differ from the base model's by at most 1e-6
of the largest (γ drawn at random), β has a gradient at the first step and the module's own parameters at the second (in
float64 where those of float32 underflow); **dead** where the layer at the site has none in the base model either.
*fx* and *trace*: the number of {terms} with which `torch.fx.symbolic_trace`, and `torch.jit.trace` saved and
loaded, give the equipped model's outputs; **base** where they do not take the base model.

{totals}

| family | model | identity | fx | trace |
|---|---|---|---|---|
"""


def section(rows: Sequence[Row]) -> str:
    """The part of the page that the rows make."""
    counts = {column: [0, 0] for column in COLUMNS}
    for row in rows:
        for column in COLUMNS:
            results = row.metrics[column].values()
            counts[column][0] += sum(result == "works" for result in results)
            counts[column][1] += sum(result.startswith("fails") for result in results)
    totals = "; ".join(f"{column}: {works} pairs work, {failing} fail" for column, (works, failing) in counts.items())
    lines = [
        f"| {row.recipe['family']} | {row.row.split('/')[1]} | "
        + " | ".join(_cell(row.metrics[column]) for column in COLUMNS)
        + " |\n"
        for row in sorted(rows, key=lambda row: row.row.replace("torchvision/", " "))
    ]
    failures = [
        f"- {row.row}, {term}, {column}: {result}\n"
        for row in rows
        for column in COLUMNS
        for term, result in row.metrics[column].items()
        if result.startswith("fails")
    ]
    text = HEADER.format(terms=", ".join(PAPER_TERMS), totals=totals) + "".join(lines)
    return text + ("\n" + "".join(failures) if failures else "")


def fails(row: Row) -> bool:
    """Whether a check of the model failed."""
    return any(result.startswith("fails") for column in COLUMNS for result in row.metrics[column].values())


def _cell(outcomes: dict[str, str]) -> str:
    if not outcomes:
        return "–"
    if set(outcomes.values()) == {NOT_THE_BASE}:
        return "base"
    failing = [term for term, result in outcomes.items() if result.startswith("fails")]
    dead = [term for term, result in outcomes.items() if result == BASE_IS_DEAD]
    works = str(sum(result == "works" for result in outcomes.values()))
    return f"**fails**: {', '.join(failing)}" if failing else f"{works}, dead: {', '.join(dead)}" if dead else works
