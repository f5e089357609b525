"""Fixtures that several files of tests use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# One thread for each of pytest-xdist's workers and for the processes that tests start: threads that spin for more cores
# than there are make everything several times slower. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from helpers.shell import Shell

if TYPE_CHECKING:
    from helpers.report import RenderPage

    from deepsquare.cost import Cost


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    """The command line, run in this process."""
    return Shell(monkeypatch, capfd)


@pytest.fixture(scope="module")
def placeholder_costs() -> Iterator[Cost]:
    """On the page, a placeholder for the costs of the networks: those of the large ones take a minute to count."""
    from deepsquare.cost import Cost

    costs = Cost(parameters=1_234_567, macs=2_000_000_000, elementwise_muls=1000, activation_bytes=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepsquare.paper.report.page.cost_of", lambda model, spec: costs)
        yield costs


@pytest.fixture
def render_page(tmp_path: Path) -> RenderPage:
    """Render a page from rows and further folders."""
    from helpers.report import render_rows

    return partial(render_rows, tmp_path)
