"""which term works on which model: equips every CNN of torchvision and the smallest of each CNN family of timm.

    python docs/support_matrix.py            # run what results/support.jsonl does not have yet, write docs/support.md
    python docs/support_matrix.py --render   # only write docs/support.md

A term *works* on a model if ``equip`` finds its sites, a training step (forward and backward pass on random images,
cross-entropy) gives finite gradients everywhere and nonzero ones for every new parameter (the second step, where the
base model starts its branches at zero), and ``unequip`` gives back the outputs of the base model bit by bit.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from typing import Any

import support_tools
import torch
from rich.progress import track
from torch import nn
from torch.nn import functional as F

import deepsquare as ds
from deepsquare.results import Row, Store, conditions
from deepsquare.surgery import PREFIX, TECHNIQUES, Sites
from deepsquare.surgery.techniques import BASELINES

ROOT = Path(__file__).parent.parent
STORE, TOOLS = (Store(ROOT / "results" / name) for name in ("support.jsonl", "support_tools.jsonl"))
PAGE = ROOT / "docs" / "support.md"
TERMS = [term for term, technique in TECHNIQUES.items() if technique.kind is not None and term not in BASELINES]
TRANSFORMERS = ("vit_", "swin_", "maxvit_")
# timm's modules of transformers, of hybrids with attention or state-space layers, and of MLPs. All others are CNNs.
OTHER_NETWORKS = {
    "beit", "byoanet", "cait", "coat", "convit", "cpubone", "crossvit", "csatv2", "davit", "deepseek_vit", "deit",
    "edgenext", "efficientformer", "efficientformer_v2", "efficientvim", "efficientvit_mit", "efficientvit_msra", "eva",
    "fastvit", "gcvit", "gemma4_vit", "hiera", "hieradet_sam2", "iformer", "levit", "lowformer", "maxxvit", "mlp_mixer",
    "mobilenetv5", "mobilevit", "mvitv2", "naflexvit", "nest", "nextvit", "pit", "pvt_v2", "qwen3_vit", "sequencer",
    "shvit", "swiftformer", "swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr", "tiny_vit", "tnt",
    "twins", "visformer", "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos",
    "vision_transformer_sam", "vitamin", "volo", "xcit",
}  # fmt: skip

TERMS_BEYOND = ("pooling", "softmin", "excitation", "encoding")
# Networks that are no plain classifiers: the part to equip, and its sites for TERMS_BEYOND, which
# tests/surgery/test_backbones.py counts.
BEYOND: dict[str, tuple[str, tuple[int, int, int, int]]] = {
    "torchvision/fasterrcnn_resnet50_fpn": ("backbone", (0, 0, 16, 16)),
    "torchvision/fasterrcnn_mobilenet_v3_large_fpn": ("backbone", (0, 0, 10, 10)),
    "torchvision/maskrcnn_resnet50_fpn": ("backbone", (0, 0, 16, 16)),
    "torchvision/keypointrcnn_resnet50_fpn": ("backbone", (0, 0, 16, 16)),
    "torchvision/retinanet_resnet50_fpn": ("backbone", (0, 0, 16, 16)),
    "torchvision/fcos_resnet50_fpn": ("backbone", (0, 0, 16, 16)),
    "torchvision/ssdlite320_mobilenet_v3_large": ("backbone", (0, 0, 10, 10)),
    "torchvision/ssd300_vgg16": ("backbone", (0, 0, 0, 0)),
    "torchvision/deeplabv3_resnet50": ("", (0, 0, 16, 16)),
    "torchvision/deeplabv3_mobilenet_v3_large": ("", (0, 0, 10, 10)),
    "torchvision/fcn_resnet50": ("", (0, 0, 16, 16)),
    "torchvision/lraspp_mobilenet_v3_large": ("", (0, 0, 10, 10)),
    "torchvision/r3d_18": ("", (1, 1, 8, 8)),
    "torchvision/mc3_18": ("", (1, 1, 8, 8)),
    "torchvision/r2plus1d_18": ("", (1, 1, 8, 8)),
    "torchvision/s3d": ("", (1, 0, 0, 0)),
    "torchvision/create_feature_extractor(resnet18)": ("", (0, 0, 8, 8)),
    "timm/resnet18(features_only=True)": ("", (0, 0, 8, 8)),
    "timm/resnet18(num_classes=0)": ("", (1, 0, 8, 8)),
    "transformers/ResNetForImageClassification": ("", (1, 1, 16, 16)),
    "segmentation_models_pytorch/Unet(resnet18)": ("", (0, 0, 8, 8)),
    "segmentation_models_pytorch/DeepLabV3Plus(resnet18)": ("", (0, 0, 8, 8)),
    "segmentation_models_pytorch/FPN(resnet18)": ("", (0, 0, 8, 8)),
}


def torchvision_models() -> Iterator[tuple[str, str]]:
    """(family, name) of every CNN classifier of torchvision."""
    import torchvision

    for name in torchvision.models.list_models(module=torchvision.models):
        if not name.startswith(TRANSFORMERS):
            yield re.match(r"[a-z]+", name).group(), f"torchvision/{name}"  # type: ignore[union-attr]


def timm_models() -> Iterator[tuple[str, str]]:
    """(family, name) of the smallest model of each CNN family of timm: of each module and first letters of a name."""
    import timm

    for module in timm.list_modules():
        if module in OTHER_NETWORKS or module == "timm_models":
            continue
        names = [name for name in timm.list_models(module=module) if not name.startswith(("test_", "caformer"))]
        stem = re.compile(r"[a-z]+")
        for prefix, members in groupby(sorted(names), key=lambda name: stem.match(name).group()):  # type: ignore[union-attr]
            sizes = {}
            for name in members:
                with torch.device("meta"):
                    sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            yield f"{module}/{prefix}", f"timm/{min(sizes, key=lambda name: sizes[name])}"


def smallest_input(model: nn.Module) -> tuple[torch.Tensor, Sites]:
    """Two random images as small as the model takes, with more than one position left at its pooling, and the sites."""
    best = None
    for size in (64, 96, 128, 160, 224, 256, 299):
        try:
            present = ds.sites(model, (3, size, size))
            images = torch.randn(2, 3, size, size)
            with torch.no_grad():
                model.train()(images)
        except (RuntimeError, ValueError, AssertionError):
            continue
        best = images, present
        pooling = present.of_kind("pooling")
        if not pooling or math.prod(pooling[0].shape) > pooling[0].channels:
            break
    if best is None:
        raise RuntimeError(f"{type(model).__name__} took no size from 64 to 299")
    return best


def train_step(model: nn.Module, images: torch.Tensor) -> tuple[bool, bool]:
    """A training step; whether outputs and gradients are finite, and whether every new parameter has a gradient."""
    model.train().zero_grad(set_to_none=True)
    for module in model.modules():
        if type(module).__name__ in ("StochasticDepth", "DropPath"):
            module.eval()  # with two images it often drops a branch for both, and with it every gradient there
    output = model(images)
    logits = output if isinstance(output, torch.Tensor) else output[0]
    torch.autograd.backward(F.cross_entropy(logits, torch.tensor([0, 1])))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    new = [name for name, _ in model.named_parameters() if PREFIX in name]
    finite = bool(logits.isfinite().all()) and all(bool(g.isfinite().all()) for g in grads.values())
    alive = all(name in grads and bool(grads[name].any()) for name in new)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return finite, alive


def try_term(model: nn.Module, present: Sites, term: str, images: torch.Tensor) -> tuple[str, int]:
    """Equip, train, unequip: the outcome, and the number of sites."""
    with torch.no_grad():
        before = model.eval()(images)
    state = copy.deepcopy(model.state_dict())
    kind = TECHNIQUES[term].kind
    assert kind is not None
    if not present.of_kind(kind):
        return f"no site: {present.missing[kind]}", 0
    ds.equip(model, term, input_shape=images.shape[1:])
    finite, alive = train_step(model, images)
    if finite and not alive:  # a gain that the base model starts at zero (NFNet's) has to move first
        finite, alive = train_step(model, images)
    ds.unequip(model).load_state_dict(state)  # as before the step
    with torch.no_grad():
        same = torch.equal(model.eval()(images).nan_to_num(), before.nan_to_num())
    outcome = "works" if finite and alive and same else f"fails: finite={finite}, new gradients={alive}, undone={same}"
    return outcome, len(present.of_kind(kind))


def open_model(name: str) -> tuple[nn.Module, torch.Tensor, Sites]:
    """The model with random weights, two images and its sites."""
    slow = name in ("torchvision/googlenet", "torchvision/inception_v3")  # their own initialisation takes minutes
    kwargs: dict[str, Any] = {"init_weights": False} if slow else {}
    model = ds.create_model(name, **kwargs)
    return model, *smallest_input(model)


def tools_row(family: str, name: str, terms: list[str]) -> list[Row]:
    """The row of :mod:`support_tools` for a model; runs in its own process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    start, size = time.perf_counter(), None
    metrics: dict[str, Any]
    try:
        model, images, present = open_model(name)
        size = images.shape[-1]
        metrics = support_tools.check_tools(model, present, images, terms)
    except Exception as error:
        metrics = {"identity": dict.fromkeys(terms, f"fails: {type(error).__name__}: {error}"), "fx": {}, "trace": {}}
    seconds = round(time.perf_counter() - start, 1)
    recipe = {"model": name, "family": family, "input_size": size}
    return [Row("support_tools", name, 0, recipe, metrics, seconds, **conditions() | {"versions": versions()})]


def rows_of(family: str, name: str, terms: list[str]) -> list[Row]:
    """One row per term; runs in its own process. The seconds are those of all its terms together."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    start = time.perf_counter()
    size, outcomes = None, {}
    try:
        model, images, present = open_model(name)
        size = images.shape[-1]
    except Exception as error:
        outcomes = dict.fromkeys(terms, (f"fails: {error}", 0))
    for term in terms if not outcomes else ():
        try:
            outcomes[term] = try_term(model, present, term, images)
        except Exception as error:
            outcomes[term] = f"fails: {type(error).__name__}: {error}", 0
    seconds = round(time.perf_counter() - start, 1)
    shared = {"model": name, "family": family, "input_size": size}
    current = conditions() | {"versions": versions()}
    return [
        Row(
            "support",
            f"{name}+{term}",
            0,
            {**shared, "term": term},
            {"outcome": outcome, "sites": count},
            seconds,
            **current,
        )
        for term, (outcome, count) in outcomes.items()
    ]


def versions() -> dict[str, str]:
    """What the rows depend on."""
    import timm
    import torchvision

    return {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}


def fails(row: Row) -> bool:
    """Whether the model has the site, but something went wrong."""
    return bool(row.metrics["outcome"].startswith("fails"))


def run(match: str) -> None:
    """Run what is missing, storing each model's rows as soon as they are there in place of older ones."""
    good = (row for row in STORE.rows() if row.versions == versions() and not fails(row))
    have = {(row.recipe["model"], row.recipe["term"]) for row in good}
    with_tools = {row.row for row in TOOLS.rows() if row.versions == versions() and not support_tools.fails(row)}
    jobs: list[tuple[Store, Callable[..., list[Row]], str, str, list[str]]] = []
    for family, name in [*torchvision_models(), *timm_models()]:
        terms = [term for term in TERMS if (name, term) not in have]
        if terms and match in name:
            jobs.append((STORE, rows_of, family, name, terms))
        if name not in with_tools and match in name:
            jobs.append((TOOLS, tools_row, family, name, TERMS))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        waiting = {pool.submit(check, *of_model): store for store, check, *of_model in jobs}
        for done in track(as_completed(waiting), total=len(waiting), description="models"):
            store = waiting[done]
            rows = {row.row: row for row in (*store.rows(), *done.result())}
            store.replace(rows.values())


def render() -> None:
    """Write the page from the rows."""
    table: dict[str, dict[str, Row]] = {}
    for row in STORE.rows():
        table.setdefault(row.recipe["model"], {})[row.recipe["term"]] = row
    parts = [HEADER.format(**next(iter(next(iter(table.values())).values())).versions)]
    for library in ("torchvision", "timm"):
        models = {name: terms for name, terms in sorted(table.items()) if name.startswith(library + "/")}
        rows = [row for terms in models.values() for row in terms.values()]
        works, failing = sum(row.metrics["outcome"] == "works" for row in rows), sum(map(fails, rows))
        sound = sum(not any(map(fails, terms.values())) for terms in models.values())
        parts.append(
            f"\n## {library}\n\n{sound} of {len(models)} models take every term whose site they have: {works} pairs of "
            f"model and term work, {failing} fail.\n\n"
            f"| family | model | {' | '.join(TERMS)} |\n|---|---|{'---|' * len(TERMS)}\n"
        )
        for name, terms in models.items():
            cells = [_cell(terms[term]) if term in terms else "?" for term in TERMS]
            family = next(iter(terms.values())).recipe["family"]
            parts.append(f"| {family} | {name.split('/')[1]} | {' | '.join(cells)} |\n")
    parts.append(support_tools.section(TOOLS.rows()))
    parts.append(BEYOND_HEADER.format(" | ".join(TERMS_BEYOND), "---|" * len(TERMS_BEYOND)))
    for name, (part, counts) in BEYOND.items():
        parts.append(f"| {name} | {part or 'the model'} | {' | '.join(str(n or '–') for n in counts)} |\n")
    failures = [
        f"- {name}, {term}: {row.metrics['outcome']}\n"
        for name, terms in sorted(table.items())
        for term, row in terms.items()
        if fails(row)
    ]
    parts.append("\n## Failures\n\n" + ("".join(failures) or "None.\n"))
    PAGE.write_text("".join(parts))
    print(f"wrote {PAGE.relative_to(ROOT)} from {STORE.path.name}")


HEADER = """# Support matrix

Made by `make support` (`docs/support_matrix.py`) with torch {torch}, torchvision {torchvision}, timm {timm}: every CNN
classifier of torchvision, and the smallest model of each CNN family of timm. A number says that the term works, and at
how many sites: `equip`, a training step with finite gradients everywhere and nonzero ones for every new parameter (the
second step, where the base model starts its branches at zero), `unequip` back to bit-identical outputs. **–** : the
architecture has no such site (no global average pooling before the classifier; no building block in which a nonlinear
main branch with a spatial convolution meets a shortcut); `deepsquare info MODEL` gives the reason. A family of timm is
one of its modules and the first letters of a name. Transformers, hybrids with attention and MLPs are left out: where
they are no CNN, `equip` refuses them.
"""

BEYOND_HEADER = """
## Beyond classifiers

A backbone, a segmentation network or an embedding has some of the sites: `equip` fills those that there are and says
what is missing for the others. The forward pass of a detector depends on the values of its input, so its backbone is
equipped: `equip(model.backbone, "excitation", input_shape=(3, 800, 800))`; weights are saved from there (`save`,
`load_weights`) or with the whole `state_dict`. The numbers are the sites of each term, counted by the tests.

| network | part | {} |
|---|---|{}
"""


def _cell(row: Row) -> str:
    if row.metrics["outcome"] == "works":
        return str(row.metrics["sites"])
    return "**fails**" if fails(row) else "–"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--match", default="", help="only models whose name contains this")
    options = parser.parse_args()
    if not options.render:
        run(options.match)
    render()
