"""What several files of tests use as a fixture."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepsquare import cli


@pytest.fixture
def deepsquare(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command line: a call's exit code, and all that it says."""

    def call(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["deepsquare", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = int(error.code or 0)
        return code, "".join(capfd.readouterr())

    return call
