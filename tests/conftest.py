"""Fixtures that several files of tests use."""

import os

import pytest

# One thread for each of pytest-xdist's workers and for the processes that tests start: threads that spin for more cores
# than there are make everything several times slower. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from helpers.shell import Shell


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    """The command line, run in this process."""
    return Shell(monkeypatch, capfd)
