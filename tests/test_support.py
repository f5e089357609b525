"""The support matrix: its rows are complete, its page is made of them, and small models confirm them here and now."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec import json

from deepsquare.results import Row

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support_matrix", ROOT / "docs" / "support_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(script: ModuleType) -> dict[str, dict[str, Row]]:
    table: dict[str, dict[str, Row]] = {}
    for row in script.STORE.rows():
        table.setdefault(row.recipe["model"], {})[row.recipe["term"]] = row
    return table


def sound(terms: dict[str, Row]) -> bool:
    return not any(row.metrics["outcome"].startswith("fails") for row in terms.values())


def test_every_cnn_of_torchvision_takes_every_word_it_has_a_site_for(script: ModuleType, rows: dict[str, Any]) -> None:
    for _, name in script.torchvision_models():
        assert set(rows[name]) == set(script.TERMS), name
        assert sound(rows[name]), name


def test_nine_in_ten_of_timms_families_do(script: ModuleType, rows: dict[str, Any]) -> None:
    models = {name: terms for name, terms in rows.items() if name.startswith("timm/")}
    modules = {terms["pooling"].recipe["family"].split("/")[0] for terms in models.values()}
    timm = pytest.importorskip("timm")
    assert modules == set(timm.list_modules()) - script.OTHER_NETWORKS - {"timm_models"}
    assert all(set(terms) == set(script.TERMS) for terms in models.values())
    assert sum(map(sound, models.values())) >= 0.9 * len(models)


def test_the_page_is_made_of_the_rows(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PAGE", tmp_path / "support.md")
    script.render()
    assert (tmp_path / "support.md").read_text() == (ROOT / "docs" / "support.md").read_text()


SMALL = [
    "torchvision/mobilenet_v3_small",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/squeezenet1_1",
    "timm/ghostnet_050",
    "timm/test_convnext",
    "timm/test_mambaout",
    "timm/test_nfnet",
    "timm/test_resnet",
]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.slow
def test_small_models(script: ModuleType, rows: dict[str, Any], name: str) -> None:
    threads = torch.get_num_threads()
    computed = {row.recipe["term"]: row for row in script.rows_of("", name, script.TERMS)}
    torch.set_num_threads(threads)
    assert sound(computed), [row.metrics["outcome"] for row in computed.values()]
    outcomes = {term: row.metrics for term, row in computed.items()}
    assert outcomes["softmin"] == {"outcome": "works", "sites": 1}
    if name in rows:
        assert outcomes == {term: row.metrics for term, row in rows[name].items()}
    assert [json.decode(row.to_json(), type=Row).row for row in computed.values()] == [
        row.row for row in computed.values()
    ]


def test_every_model_starts_at_the_identity_and_tools_take_it(script: ModuleType, rows: dict[str, Any]) -> None:
    tools = {row.row: row for row in script.TOOLS.rows()}
    assert tools.keys() == rows.keys()
    assert not [name for name, row in tools.items() if script.support_tools.fails(row)]
    for name, row in tools.items():  # every pair that trains was checked
        with_site = {term for term, trained in rows[name].items() if trained.metrics["outcome"] == "works"}
        assert row.metrics["identity"].keys() >= with_site, name


@pytest.mark.parametrize("name", ["timm/test_convnext", "timm/test_nfnet", "timm/test_resnet"])
@pytest.mark.slow
def test_small_models_with_tools(script: ModuleType, name: str) -> None:
    threads = torch.get_num_threads()
    (row,) = script.tools_row("", name, script.TERMS)
    torch.set_num_threads(threads)
    assert set(row.metrics["identity"]) == set(script.TERMS)
    assert {outcome for column in row.metrics.values() for outcome in column.values()} == {"works"}
