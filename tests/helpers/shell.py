"""The command line in the process of the test."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deepsquare.cli import main


class Shell:
    """Calls ``deepsquare`` with arguments and captures what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd
        monkeypatch.setenv("COLUMNS", "160")

    def __call__(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit code, and stdout followed by stderr."""
        code, out, err = self._run(*arguments)
        return code, out + err

    def run(self, line: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of ``deepsquare`` followed by ``line``."""
        return self._run(*line.split())

    def json(self, line: str) -> dict[str, Any]:
        """The JSON that ``line`` prints."""
        code, out, err = self.run(f"{line} --json")
        assert (code, err) == (0, "")
        parsed: dict[str, Any] = json.loads(out)
        return parsed

    def _run(self, *arguments: str | Path) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["deepsquare", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self.capfd.readouterr()
        return code, captured.out, captured.err
