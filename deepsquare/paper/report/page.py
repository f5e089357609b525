"""The page: everything found in the stores and figures, in one HTML file that asks nothing of the network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from deepsquare._files import atomic_write, ensure_writable
from deepsquare.cost import cost_of, short
from deepsquare.paper import verdict
from deepsquare.paper.report import baselines, curves, deployment, figures, network, ops, spirals
from deepsquare.paper.report.evidence import Findings, Line, RunResult, Schedule, find, load_rows
from deepsquare.paper.tables import BASELINES_TABLE, CONTINUED, TABLES
from deepsquare.paper.verdict import Verdict
from deepsquare.results import Row


@dataclass(frozen=True)
class Claim:
    """A claim of a table in the summary; a network that stands in two tables is one."""

    table: int
    line: Line
    schedule: Schedule | None
    verdict: Verdict | None  # None: no run yet
    enough: bool  # there are seeds enough


def render(results: Sequence[Path], figures: Sequence[Path], output: Path) -> Path:
    """Write ``index.html`` and ``summary.md`` into ``output``; returns the path of the page.

    Args:
        results: folders with stores; a run that several of them have is taken from the first.
        figures: folders with images; the first that has one gives it.
        output: folder of the page, made if missing.
    """
    ensure_writable(Path(output))
    content = gather(results, figures)
    templates = Environment(
        loader=PackageLoader("deepsquare.paper.report"),
        autoescape=select_autoescape(enabled_extensions=("html.j2",), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "signed": curves.number,
        "short": short,
        "share": share,
        "recipe": recipe,
    }
    for name in ("summary.md", "index.html"):
        text = templates.get_template(f"{name}.j2").render(content)
        with atomic_write(Path(output) / name) as path:
            path.write_text(text, encoding="utf-8")
    return Path(output) / "index.html"


def gather(results: Sequence[Path], images: Sequence[Path]) -> dict[str, Any]:
    """Everything the templates show."""
    rows, notes = load_rows(results)
    tables = [find(table, rows) for table in TABLES]
    cifar = [findings for findings in tables if findings.table.data == "CIFAR-10"]
    claims = summary(cifar)
    measured = baselines.backbones(rows)
    found_peers = find(BASELINES_TABLE, rows)
    functions = ops.measured(rows)
    return {
        "rule": verdict,
        "claims": claims,
        "verdicts": [(kind, [claim for claim in claims if claim.verdict is kind]) for kind in (*Verdict, None)],
        "judged_on": Counter(claim.schedule.label for claim in claims if claim.schedule and claim.enough).most_common(),
        "too_few": sum(claim.verdict is not None and not claim.enough for claim in claims),
        "figures": [_figure(figure, rows, results, images) for figure in figures.FIGURES],
        "settings_image": figures.image("spirals_settings.png", images),
        "spirals": spirals,
        "activation_costs": spirals.costs(rows),
        "ablations": spirals.ablations(rows),
        "table_1": network.table_1(),
        "cifar": [(f, curves.forest(f), curves.learning_curves(f)) for f in cifar],
        "imagenet": [(f, [_cost(line) for line in f.lines]) for f in tables if f not in cifar],
        "continued": find(CONTINUED, rows),
        "backbones": measured,
        "accuracy_against_time": baselines.accuracy_against_time(measured.get("resnet50")),
        "peers": (found_peers, [_cost(line) for line in found_peers.lines]),
        "ops": functions,
        "rooflines": ops.rooflines(functions),
        "deploy": deployment,
        "deployed": [(name, ways, deployment.latencies(ways)) for name, ways in deployment.timed(rows).items()],
        "quantised": deployment.quantised(rows),
        "parities": deployment.parities(rows),
        "notes": [*notes, *dict.fromkeys(note for findings in tables for note in findings.notes)],
        "candidates": candidates(rows),
        "conditions": conditions([*figures.fig2_row(results), *rows]),
    }


def summary(tables: Sequence[Findings]) -> list[Claim]:
    """The claims of the tables, each network once, with the verdict that counts."""
    claims: dict[tuple[str, str], Claim] = {}
    for findings in tables:
        for line in findings.lines:
            if not line.is_base:
                schedule, result = line.summary or (None, None)
                kind, enough = (result.verdict, result.judged) if result else (None, False)
                claim = Claim(findings.table.number, line, schedule, kind, enough)
                claims.setdefault((line.entry.model, line.entry.spec), claim)
    return list(claims.values())


def _figure(
    figure: figures.Figure, rows: Sequence[Row], results: Sequence[Path], images: Sequence[Path]
) -> dict[str, Any]:
    counts = figures.fig2_counts(results) if figure.number == 2 else []
    finals = spirals.finals(rows, figure.task, figure.smoothness) if figure.task else None
    image = figures.image(figure.file, images)
    return {"figure": figure, "image": image, "counts": counts, "finals": finals}


def _cost(line: Line) -> dict[str, Any]:
    """Parameters and multiply-accumulates of a line, with what it adds to its base."""
    cost, base = (cost_of(line.entry.model, spec) for spec in (line.entry.spec, ""))
    return {"cost": cost, "added": cost.added_to(base), "more": cost.parameters / base.parameters - 1}


def candidates(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How the recipe of CIFAR-10 was chosen: the candidates, the best first, and which one is used."""
    varying = ("schedule", "epochs", "spec")
    used = [{k: v for k, v in row.recipe.items() if k not in varying} for row in rows if row.experiment == "cifar10"]
    found = [
        {
            "name": row.row,
            "accuracy": 100 * row.metrics["accuracy"],
            "epochs": row.recipe["epochs"],
            "used": {k: v for k, v in row.recipe.items() if k not in varying} in used,
        }
        for row in rows
        if row.experiment == "cifar10-recipe" and RunResult.of(row) and not row.metrics.get("diverged")
    ]
    return sorted(found, key=lambda candidate: -candidate["accuracy"])


def conditions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What each experiment of the page ran on, and how much of it."""
    found = []
    rows = [row for row in rows if row.experiment in ("fig2", "spirals") or RunResult.of(row)]
    for experiment in sorted({row.experiment for row in rows}):
        mine = [row for row in rows if row.experiment == experiment]
        dates = sorted(row.date[:10] for row in mine if row.date)
        found.append(
            {
                "experiment": experiment,
                "runs": len(mine),
                "seeds": _seeds(mine),
                "hours": sum(row.seconds for row in mine) / 3600,
                "dates": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "–",
                "hardware": sorted({row.hardware for row in mine} - {""}),
                "versions": sorted({_versions(row) for row in mine} - {""}),
                "commits": sorted({row.commit[:10] for row in mine if row.commit}),
            }
        )
    return found


def _seeds(rows: Sequence[Row]) -> str:
    """The seeds, or how many a network has where a row holds all of them."""
    many = max((row.recipe.get("seeds", 0) for row in rows), default=0)
    return f"{many} a network" if many else ", ".join(map(str, sorted({row.seed for row in rows})))


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row.versions.items() if version)


def share(fraction: float) -> str:
    """In per cent; what is too small to show says so."""
    return f"{fraction:.3%}" if fraction >= 5e-6 else "less than 0.001%"


def recipe(text: str) -> str:
    """A stored recipe in a line for a reader; model and name stand elsewhere."""
    values = {name: value for name, value in json.loads(text).items() if name not in ("model", "schedule")}
    said = {True: "yes", False: "no"}
    return ", ".join(
        f"{name.replace('_', ' ')} {said[value] if isinstance(value, bool) else value}"
        for name, value in values.items()
    )
