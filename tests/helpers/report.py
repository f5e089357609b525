"""Rows as the experiments store them, and a reader of the page that is rendered from them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from deepsquare.paper.report import render
from deepsquare.results import Row, Store

BASE = (80.90, 81.00, 81.10, 81.00)
GAINS = (1.00, 1.02, 0.98, 1.00)  # of Square-Pooling


def row(
    spec: str, seed: int, accuracy: float | None, *, schedule: str = "short", epochs: int = 12, **changes: Any
) -> Row:
    """A row of CIFAR-10 as the grid stores it; ``accuracy`` in per cent."""
    final = None if accuracy is None else accuracy / 100
    curve = [] if final is None else [final * (1 - 0.5**k) for k in range(1, epochs)] + [final]
    recipe = {"model": "vanilla_cnn", "spec": spec, "schedule": schedule, "epochs": epochs, "weight_decay": 1e-4}
    metrics = {"accuracy": final, "diverged": None, "test_accuracy": curve, "train_loss": curve}
    values: dict[str, Any] = {"experiment": "cifar10", "row": spec or "Original", "date": "2025-11-01T00:00:00+00:00"}
    values |= {"hardware": "a CPU", "commit": "0123456789abcdef", "versions": {"torch": "2.13.0"}, **changes}
    recipe |= values.pop("recipe", {})
    metrics |= values.pop("metrics", {})
    return Row(**{"seed": seed, "recipe": recipe, "metrics": metrics, "seconds": 1800.0, **values})


def rows_of(spec: str, accuracies: Sequence[float | None], **changes: Any) -> list[Row]:
    return [row(spec, seed, accuracy, **changes) for seed, accuracy in enumerate(accuracies)]


def standard_rows() -> list[Row]:
    """Original and Square-Pooling over four seeds, short; the long schedule has only two of them."""
    gained = [base + gain for base, gain in zip(BASE, GAINS, strict=True)]
    long: dict[str, Any] = {"schedule": "long", "epochs": 80}
    rows = [*rows_of("", BASE), *rows_of("pooling", gained)]
    return [*rows, *rows_of("", BASE[:2], **long), *rows_of("pooling", gained[:2], **long)]


def write_store(rows: Sequence[Row], folder: Path, name: str = "cifar10.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Store(folder / name).replace(rows)
    return folder


class Page(HTMLParser):
    """The cells of each section's tables, the links and sources, and what is not closed."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tables: dict[str, list[list[str]]] = defaultdict(list)
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.section = ""
        self.feed(self.text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = values["id"] or ""
        elif tag == "tr":
            self.tables[self.section].append([])
        elif tag in ("td", "th"):
            self.tables[self.section][-1].append("")
        self.addresses += [values[name] or "" for name in ("href", "src", "xlink:href") if name in values]
        self.ids += [values["id"] or ""] if "id" in values else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[self.section][-1][-1] += data

    def line(self, section: str, label: str) -> list[str]:
        """The cells of a table's row, by the text of the first."""
        cells = [[" ".join(cell.split()) for cell in cells] for cells in self.tables[section]]
        return next(cells for cells in cells if cells and cells[0] == label)


RenderPage = Callable[..., Page]  # from rows and further folders; the fixture render_page


def render_rows(folder: Path, rows: Sequence[Row] = (), *more: Path, figures: Sequence[Path] = ()) -> Page:
    """The page of ``rows`` and of the stores in ``more``."""
    path = render([write_store(rows, folder / "results"), *more], figures, folder / "page")
    assert path == folder / "page" / "index.html"
    return Page(path)
