"""The registry of experiments: their options, light imports, and the extra that they need."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.shell import Shell

from deepsquare.cli import reproduce
from deepsquare.paper import experiments
from deepsquare.paper.experiments import EXPERIMENTS
from deepsquare.paper.options import OutputFolders

HEAVY = ("scipy", "matplotlib", "jinja2")


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


def test_help_imports_nothing_of_the_extra_and_shows_only_what_applies(tmp_path: Path) -> None:
    code = f"""
import sys
from deepsquare.cli import main
sys.argv = ["deepsquare", "reproduce", "fig2", "--help"]
try:
    main()
except SystemExit:
    pass
import deepsquare.paper.tables, deepsquare.paper.imagenet.hours
print("imported:", [name for name in {HEAVY} if name in sys.modules])
"""
    output = python(code, tmp_path).stdout
    assert "--networks" in output
    assert "--report" in output
    assert "--schedule" not in output
    assert "imported: []" in output


@pytest.mark.parametrize("missing", HEAVY)
def test_a_missing_package_of_the_extra_is_named(
    missing: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    code, out, err = shell.run("reproduce fig2")
    assert (code, out) == (2, "")
    expected = f"the experiments and the report need {missing}: pip install 'deepsquare[paper]'"
    assert err == f"deepsquare: error: {expected}\n"
    assert list(tmp_path.iterdir()) == []


def test_every_experiment_ends_with_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []

    def record(name: str) -> None:
        monkeypatch.setitem(EXPERIMENTS, name, lambda *, output: calls.append(f"{name} {output.results}"))

    for name in EXPERIMENTS:
        record(name)
    monkeypatch.setattr(reproduce, "print_report", lambda results, figures, page: calls.append(f"{results[0]} {page}"))
    output = OutputFolders(tmp_path / "rows", tmp_path / "figures", tmp_path / "page")
    for command in reproduce.commands().values():
        command(output=output)
    expected = [(f"{name} {tmp_path / 'rows'}", f"{tmp_path / 'rows'} {tmp_path / 'page'}") for name in EXPERIMENTS]
    assert calls == [call for pair in expected for call in pair]


def test_all_fails_early(tmp_path: Path) -> None:
    output = OutputFolders(tmp_path / "rows", tmp_path / "figures", tmp_path / "page")
    with pytest.raises(ValueError, match="no row is called DeepSquare9"):
        experiments.everything(rows=("DeepSquare9",), output=output)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        experiments.everything(data=tmp_path / "nowhere", output=output)
    assert list(tmp_path.iterdir()) == []
