"""``deepsquare info``: the sites of a model, and its cost."""

import json
from dataclasses import asdict
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepsquare.cli._common import AsJson
from deepsquare.cost import Cost, cost, format_count
from deepsquare.models import create_model
from deepsquare.surgery import KINDS, Sites, equip, sites


def info_command(
    model: tyro.conf.Positional[str],
    spec: tyro.conf.Positional[str] = "",
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    all_sites: bool = False,
    as_json: AsJson = False,
) -> None:
    """Show the sites of a model and its cost, with what a spec adds.

    Args:
        model: A model name of torchvision or timm, or vanilla_cnn.
        spec: Terms joined by +, such as pooling+excitation.
        input_shape: Shape of one input, channels first; inferred if not given.
        num_classes: Number of classes; the model's default if not given.
        all_sites: List every site with its module instead of a count.
    """
    kwargs: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    network = create_model(model, **kwargs)
    shape = sites(network, input_shape).input_shape
    base_cost = cost(network, shape)
    equip(network, spec, input_shape=shape)
    equipped_cost, model_sites = cost(network, shape), sites(network, shape)
    if as_json:
        summary = {
            "model": model,
            "spec": spec,
            "input_shape": shape,
            "base": asdict(base_cost),
            "equipped": asdict(equipped_cost),
            "added": equipped_cost.added_to(base_cost),
            "sites": [asdict(site) for site in model_sites],
            "missing": model_sites.missing,
        }
        print(json.dumps(summary, indent=2))
        return
    console = Console(markup=False)  # brackets in a name are no style
    console.print(_site_table(f"Sites of {type(network).__name__}", model_sites, all_sites))
    title = f"{model}{f' with {spec}' if spec else ''}: cost of one image of {'×'.join(map(str, shape))}"
    console.print(_cost_table(title, base_cost, equipped_cost if spec else None))


def _site_table(title: str, model_sites: Sites, all_sites: bool) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("site", "count", "where", "filled by"):
        table.add_column(heading, justify="right" if heading == "count" else "left", overflow="fold")
    for kind in KINDS:
        group = model_sites.of_kind(kind)
        if not group:
            table.add_row(kind, "0", Text(model_sites.missing[kind], "dim"), "")
        elif all_sites:
            for site in group:
                shape = "×".join(map(str, site.shape))
                table.add_row(kind, "1", f"{site.position} of {site.path} ({shape})", site.term)
        else:
            ends = dict.fromkeys((group[0].path, group[-1].path))
            table.add_row(kind, str(len(group)), f"{group[0].position} of {' … '.join(ends)}", group[0].term)
    for site in model_sites.of_kind("named"):
        table.add_row("named", "1", f"{site.position} of {site.path}", site.term)
    return table


def _cost_table(title: str, base: Cost, equipped: Cost | None) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ["", "base", *(["equipped", "added", "of base"] if equipped else [])]:
        table.add_column(heading, justify="right" if heading else "left")
    # An elementwise product costs about as much as a multiply-accumulate: it is compared with their number.
    for label, key, total in (
        ("parameters", "parameters", base.parameters),
        ("MACs of conv and FC", "macs", base.macs),
        ("elementwise products", "elementwise_muls", base.macs),
        ("bytes for backward", "activation_bytes", base.activation_bytes),
    ):
        cells = [format_count(getattr(base, key))]
        if equipped:
            added = equipped.added_to(base)[key]
            cells += [format_count(getattr(equipped, key)), f"{added:+,}", f"{added / total:+.3%}"]
        table.add_row(label, *cells)
    return table
