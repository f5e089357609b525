"""The command line: what it prints, what it writes, and how it ends on a mistake."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepsquare.cli import main


class Shell:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        monkeypatch.setenv("COLUMNS", "160")

    def run(self, line: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of ``deepsquare`` followed by ``line``."""
        self.monkeypatch.setattr(sys, "argv", ["deepsquare", *line.split()])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, line: str) -> dict[str, Any]:
        """The JSON that ``line`` prints."""
        code, out, err = self.run(f"{line} --json")
        assert (code, err) == (0, "")
        parsed: dict[str, Any] = json.loads(out)
        return parsed


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def test_resnet50_as_json(shell: Shell) -> None:
    shown = shell.json("info resnet50 pooling+excitation")
    assert (shown["model"], shown["spec"]) == ("resnet50", "pooling+excitation")
    assert shown["input_shape"] == [3, 224, 224]
    assert shown["base"]["parameters"] == 25_557_032
    assert shown["base"]["macs"] == shown["equipped"]["macs"] == 4_089_184_256
    assert shown["equipped"]["parameters"] == 25_557_048
    assert shown["added"]["parameters"] == 16
    assert (
        shown["added"]["elementwise_muls"]
        == shown["equipped"]["elementwise_muls"] - shown["base"]["elementwise_muls"]
        > 0
    )
    kinds = [site["kind"] for site in shown["sites"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "pooling": 1, "logits": 1, "branch_end": 16, "last_spatial_conv": 16
    }  # fmt: skip
    words = {(site["kind"], site["word"]) for site in shown["sites"]}
    expected = {("pooling", "pooling"), ("logits", ""), ("branch_end", "excitation"), ("last_spatial_conv", "")}
    assert words == expected
    assert shown["missing"] == {}


def test_options_reach_the_model(shell: Shell) -> None:
    shown = shell.json("info vanilla_cnn softmin(scale='channel') --num-classes 3 --input-shape 3 64 64")
    assert shown["base"]["parameters"] == 94_762 - 7 * 129
    assert shown["added"]["parameters"] == 3
    assert shown["base"]["macs"] == 4 * (2_581_760 - 1280) + 128 * 3  # four times the area of Table 1's image
    assert shown["input_shape"] == [3, 64, 64]
    assert set(shown["missing"]) == {"branch_end", "last_spatial_conv"}


def test_without_a_spec_nothing_is_added(shell: Shell) -> None:
    shown = shell.json("info vanilla_cnn")
    assert shown["base"] == shown["equipped"]
    assert set(shown["added"].values()) == {0}
    assert shown["base"]["macs"] == 2_581_760
    code, out, err = shell.run("info vanilla_cnn")
    assert (code, err) == (0, "")
    assert "94,762" in out
    assert "added" not in out


def test_tables(shell: Shell) -> None:
    code, out, err = shell.run("info resnet50 pooling+excitation")
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    table = {row[0]: row[1:] for row in rows}
    assert table["branch_end"][0] == "16"
    assert table["branch_end"][-1] == "excitation"
    assert "layer1.0.bn3" in table["branch_end"][1]
    assert "layer4.2.bn3" in table["branch_end"][1]
    assert table["pooling"] == ["1", "input of avgpool", "pooling"]
    assert table["parameters"][0] in ("25,557,032", "25.56 M")
    assert table["parameters"][2] == "+16"
    assert any(cells[0] in ("4,089,184,256", "4.089 G") and cells[2] == "+0" for cells in table.values())
    assert "3×224×224" in out


def test_all_sites(shell: Shell) -> None:
    code, out, _ = shell.run("info resnet18 encoding --all-sites")
    assert code == 0
    filled = [
        line for line in out.splitlines() if "last_spatial_conv" in line and line.rstrip("│ ").endswith("encoding")
    ]
    paths = [re.search(r"input of (\S+) ", line) for line in filled]
    expected = [f"layer{stage}.{block}.conv2" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert [path and path[1] for path in paths] == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("info resnet5", "no model named 'resnet5'; the nearest names are .*resnet50"),
        ("info hub/resnet18", "unknown zoo 'hub'"),
        ("info vgg16", "'vgg16' names different networks.*'torchvision/vgg16' or 'timm/vgg16'"),
        ("info vanilla_cnn squares", "unknown word 'squares'.*pooling, softmin"),
        ("info vanilla_cnn pooling+", "not a spec: 'pooling\\+'"),
        ("info vanilla_cnn excitation", "VanillaCNN has no branch_end site for the word 'excitation'"),
        ("info vit_b_16 pooling", "VisionTransformer is not a CNN"),
        ("info resnet18 --input-shape 1 64 64", r"ResNet could not be run on an input of shape \(2, 1, 64, 64\)"),
        ("info vanilla_cnn --num-classes -1", "vanilla_cnn.*num_classes.*-1"),
        ("reproduce fig2 --networks 0", "networks is 0; expected at least 1"),
        ("reproduce table2 --seeds 0", "seeds is 0; expected at least 1"),
        ("reproduce table3 --rows DeepSquare1", "no row is called DeepSquare1; the rows are Original, GeM"),
        ("reproduce table2 --data nowhere", "nowhere"),
        ("bench train --rounds 0", "rounds is 0"),
        ("bench data", "bench data needs images; give --data DIR"),
    ],
)
def test_a_mistake_ends_in_one_line(shell: Shell, line: str, message: str) -> None:
    code, out, err = shell.run(line)
    assert (code, out) == (2, "")
    assert re.match(rf"deepsquare: error: .*{message}", err), err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("line", ["nonsense", "info", "info resnet18 --nonsense", "reproduce fig99", "bench speed"])
def test_a_wrong_command_line(shell: Shell, line: str) -> None:
    code, out, err = shell.run(line)
    assert code == 2
    assert "Traceback" not in out + err
    assert err


def test_reproduce(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = shell.run("reproduce fig2 --networks 50")
    assert (code, err) == (0, "")
    assert out
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["out/figures/fig2.png", "out/results/fig2.json"]
    assert (tmp_path / "out/figures/fig2.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    record = json.loads((tmp_path / "out/results/fig2.json").read_text(encoding="utf-8"))
    assert record["seed"] == 0
    assert {row["drawn"] for row in record["rows"]} == {50}
    assert all(claim["holds"] for claim in record["claims"])


def test_report(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = shell.run("report")
    assert code == 0
    page = Path(out.strip().removeprefix("The report is "))
    assert page == tmp_path / "out/report/index.html"
    assert "deepsquare reproduce table2" in page.read_text(encoding="utf-8")


def test_the_installed_command(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("deepsquare")), "info", "vanilla_cnn", "bogus"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("deepsquare: error: unknown word 'bogus'")
    assert len(done.stderr.splitlines()) == 1
