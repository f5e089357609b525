"""``deepsquare info``: the sites of a model, and what it costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from deepsquare.cost import Cost, cost, short
from deepsquare.models import create_model
from deepsquare.surgery import KINDS, Sites, equip, sites


def info(
    model: tyro.conf.Positional[str],
    spec: tyro.conf.Positional[str] = "",
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    all_sites: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Show the sites of a model and what it costs, with what a spec adds.

    Args:
        model: A name of torchvision or timm, or vanilla_cnn.
        spec: Words joined by +, such as pooling+excitation.
        input_shape: Shape of one input, channels first; guessed when not given.
        num_classes: Number of classes, if not the model's own.
        all_sites: List every site with its module instead of a count.
        as_json: Print JSON instead of tables.
    """
    kwargs: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    base = create_model(model, **kwargs)
    shape = sites(base, input_shape).input_shape
    base_cost = cost(base, shape)
    equipped = equip(base, spec, input_shape=shape)
    equipped_cost = cost(equipped, shape)
    found = sites(equipped, shape)
    if as_json:
        print(json.dumps(_as_json(model, spec, shape, found, base_cost, equipped_cost), indent=2))
        return
    console = Console()
    console.print(_site_table(found, equipped, all_sites))
    console.print(_cost_table(model, spec, shape, base_cost, equipped_cost))


def _as_json(model: str, spec: str, shape: tuple[int, ...], found: Sites, base: Cost, equipped: Cost) -> dict[str, Any]:
    return {
        "model": model,
        "spec": spec,
        "input_shape": shape,
        "base": asdict(base),
        "equipped": asdict(equipped),
        "added": equipped.added_to(base),
        "sites": [asdict(site) for site in found],
        "missing": found.missing,
    }


def _site_table(found: Sites, model: nn.Module, every: bool) -> Table:
    table = Table(title=f"Sites of {type(model).__name__}", title_justify="left")
    for column in ("site", "count", "where", "filled by"):
        table.add_column(column, justify="right" if column == "count" else "left", overflow="fold")
    for kind in KINDS:
        places = found.of(kind)
        if not places:
            table.add_row(kind, "0", f"[dim]{found.missing[kind]}[/dim]", "")
        elif every:
            for place in places:
                shape = "×".join(map(str, place.shape))
                table.add_row(kind, "1", f"{place.position} of {place.path} ({shape})", place.term)
        else:
            ends = dict.fromkeys((places[0].path, places[-1].path))
            table.add_row(kind, str(len(places)), f"{places[0].position} of {' … '.join(ends)}", places[0].term)
    for place in found.of("named"):
        table.add_row("named", "1", f"{place.position} of {place.path}", place.term)
    return table


def _cost_table(name: str, spec: str, shape: tuple[int, ...], base: Cost, equipped: Cost) -> Table:
    title = f"{name}{' with ' + spec if spec else ''}: cost of one image of {'×'.join(map(str, shape))}"
    table = Table(title=title, title_justify="left")
    for column in ["", "base", *(["equipped", "added", "of base"] if spec else [])]:
        table.add_column(column, justify="left" if column == "" else "right")
    added = equipped.added_to(base)
    # An elementwise product is compared with the multiply-accumulates, of which it is about one.
    for label, key, whole in (
        ("parameters", "parameters", base.parameters),
        ("MACs of conv and FC", "macs", base.macs),
        ("elementwise products", "elementwise_muls", base.macs),
        ("bytes for backward", "activation_bytes", base.activation_bytes),
    ):
        before, after = getattr(base, key), getattr(equipped, key)
        more = [short(after), f"{added[key]:+,}", f"{added[key] / whole:+.3%}"] if spec else []
        table.add_row(label, short(before), *more)
    return table
