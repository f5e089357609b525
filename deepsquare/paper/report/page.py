"""The page: all results and figures in one HTML file that needs no network, and the numbers as Markdown."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from deepsquare._files import atomic_write, ensure_writable
from deepsquare.cost import cost, cost_of, format_count
from deepsquare.models import vanilla_cnn
from deepsquare.paper import verdict
from deepsquare.paper.fig2.experiment import summarize
from deepsquare.paper.imagenet.continued import MARGIN
from deepsquare.paper.report import activations, bench, charts, figures
from deepsquare.paper.report.ablations import ablations
from deepsquare.paper.report.after_training import after_training
from deepsquare.paper.report.continued import before_training, continued_networks
from deepsquare.paper.report.evidence import RunResult, TableFindings, grouped, read_stores, table_findings
from deepsquare.paper.report.ledger import Evidence, counts, ledger
from deepsquare.paper.report.study import study_families
from deepsquare.paper.simulation import POWER, undecidable
from deepsquare.paper.spirals import regimes as spiral_regimes
from deepsquare.paper.spirals.draw import SCHEDULES
from deepsquare.paper.tables import BASELINES_TABLE, TABLES
from deepsquare.results import Row, Store

PAPER_LAYERS = (  # Table 1: the type of each layer and its output
    ("Conv3×3s2", "16×16×32"),
    ("Conv3×3s2", "8×8×64"),
    ("Conv3×3s2", "4×4×128"),
    ("GAP", "1×1×128"),
    ("FC", "10"),
)
TEMPLATES = Environment(
    loader=PackageLoader("deepsquare.paper.report"),
    autoescape=select_autoescape(enabled_extensions=("html.j2",), default=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"signed": charts.signed, "short": format_count}


def render(results: Sequence[Path], figures: Sequence[Path], output: Path) -> Path:
    """Write ``index.html`` and ``summary.md`` into ``output``; returns the path of the page.

    Args:
        results: folders with stores; a run that is in several of them is taken from the first.
        figures: folders with images; an image that is in several of them is taken from the first.
        output: folder of the page, created if missing.
    """
    ensure_writable(Path(output))
    context = template_context(results, figures)
    for name in ("summary.md", "index.html"):
        text = TEMPLATES.get_template(f"{name}.j2").render(context)
        with atomic_write(Path(output) / name) as path:
            path.write_text(text, encoding="utf-8")
    return Path(output) / "index.html"


def template_context(results: Sequence[Path], images: Sequence[Path]) -> dict[str, Any]:
    """Everything the templates show."""
    rows, notes = read_stores(results)
    by_backbone, table_6 = bench.backbones(rows), bench.table_6(rows)
    functions = bench.op_times(rows)
    latencies = bench.latencies(rows)
    fig2 = next((found for folder in results if (found := Store(Path(folder) / "fig2.jsonl").rows())), [])
    spirals = {row.row: row.metrics for row in reversed(rows) if row.experiment == "spirals"}  # the first of a label
    costs = activations.activation_costs(rows)
    evidence = Evidence(rows, summarize(fig2) if fig2 else [], spirals, by_backbone, table_6, costs)
    entries = ledger(evidence)
    tables = [table_findings(table, rows, evidence.by_schedule()) for table in TABLES]
    baselines = table_findings(BASELINES_TABLE, rows, evidence.by_schedule())
    cifar = [findings for findings in tables if findings.table.data == "CIFAR-10"]
    return {
        "rule": verdict,
        "ledger": entries,
        "verdicts": counts(entries),
        "error_rates": [row for row in rows if row.experiment == "error_rates"],
        "undecidable": undecidable(rows),
        "power_needed": POWER,
        "figures": [
            {
                "number": number,
                "title": title,
                "image": figures.figure_data_uri(f"fig{number}.png", images),
                "counts": summarize(fig2) if fig2 and number == 2 else [],
                "finals": figures.spiral_results(spirals, task, smoothness) if task else None,
            }
            for number, (title, task, smoothness) in figures.FIGURES.items()
        ],
        "regimes": spiral_regimes.judgements(rows),
        "regimes_image": figures.figure_data_uri("spirals_regimes.png", images),
        "schedules": SCHEDULES,
        "settings_image": figures.figure_data_uri("spirals_settings.png", images),
        "labels": figures.LABELS,
        "activation_costs": costs,
        "activation_titles": activations.TITLES,
        "spirals": spirals,
        "table_1": table_1(),
        "cifar": [(findings, charts.forest(findings), charts.learning_curves(findings)) for findings in cifar],
        "imagenet": [(findings, _costs(findings)) for findings in tables if findings not in cifar],
        "before_training": before_training(rows),
        "continued": continued_networks(rows),
        "margin": MARGIN,
        "study": study_families(rows, evidence.against_plain()),
        "ablations": ablations(rows),
        "after_training": after_training(rows),
        "backbones": by_backbone,
        "table_6": table_6,
        "accuracy_against_time": charts.accuracy_against_time(table_6),
        "baselines": (baselines, _costs(baselines)),
        "ops": functions,
        "limits": bench.limits(functions),
        "gem": bench.gem_costs(functions),
        "rooflines": charts.rooflines(functions),
        "bench": bench,
        "deployed_backbones": [(name, group, charts.latency_charts(name, group)) for name, group in latencies.items()],
        "int8": bench.int8_accuracies(rows),
        "parities": bench.parities(rows),
        "notes": [*notes, *dict.fromkeys(note for findings in tables for note in findings.notes)],
        "candidates": recipe_candidates(rows),
        "conditions": conditions([*fig2[:1], *rows]),
    }


def table_1() -> list[dict[str, Any]]:
    """The layers of the vanilla CNN: the paper's output size and ours, and what each costs."""
    layers = []
    with torch.device("meta"):
        x = torch.empty(1, 3, 32, 32)
        for (kind, paper), layer in zip(PAPER_LAYERS, vanilla_cnn().children(), strict=True):
            x = x.flatten(1) if kind == "FC" else x
            layer_cost = cost(layer, x.shape[1:])
            x = layer(x)
            channels, *sides = x.shape[1:]
            output = "×".join(map(str, (*sides, channels)))
            layers.append({"kind": kind, "paper": paper, "output": output, **asdict(layer_cost)})
    return layers


def _costs(findings: TableFindings) -> list[dict[str, Any]]:
    """Parameters and multiply-accumulates of each row, with what it adds to its base."""
    costs = []
    for entry in (row.entry for row in findings.rows):
        cost, base = cost_of(entry.model, entry.spec), cost_of(entry.model, "")
        costs.append({"cost": cost, "added": cost.added_to(base), "more": cost.parameters / base.parameters - 1})
    return costs


def recipe_candidates(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The candidates for the recipe of CIFAR-10, the best first, and which one is used."""

    def common(row: Row) -> dict[str, Any]:
        return {k: v for k, v in row.recipe.items() if k not in ("schedule", "epochs", "spec")}

    used = [common(row) for row in rows if row.experiment == "cifar10"]
    candidates = [RunResult.from_row(row) for row in rows if row.experiment == "cifar10-recipe"]
    trained = [run for run in candidates if run and not run.diverged]
    return [
        {"name": run.row.row, "accuracy": run.accuracy, "epochs": run.schedule.epochs, "used": common(run.row) in used}
        for run in sorted(trained, key=lambda run: -(run.accuracy or 0))
    ]


def conditions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The runs, hardware, versions and commits of each experiment of the page."""
    shown = [
        row
        for row in rows
        if row.experiment in ("fig2", "spirals", spiral_regimes.EXPERIMENT) or RunResult.from_row(row)
    ]
    experiments = []
    for experiment, group in sorted(grouped(shown, lambda row: row.experiment).items()):
        dates = sorted(row.date[:10] for row in group if row.date)
        networks = max(row.recipe.get("seeds", 0) for row in group)  # where one row holds all seeds of a network
        seeds = ", ".join(map(str, sorted({row.seed for row in group})))
        versions = {", ".join(f"{name} {value}" for name, value in row.versions.items() if value) for row in group}
        summary = {
            "experiment": experiment,
            "runs": len(group),
            "seeds": f"{networks} a network" if networks else seeds,
            "hours": sum(row.seconds for row in group) / 3600,
            "dates": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "–",
            "hardware": sorted({row.hardware for row in group} - {""}),
            "versions": sorted(versions - {""}),
            "commits": sorted({row.commit[:10] for row in group if row.commit}),
        }
        experiments.append(summary)
    return experiments
