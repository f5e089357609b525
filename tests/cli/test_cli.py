"""The command line: output, files, exit codes and error messages."""

import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from helpers.shell import Shell

from deepsquare import cli
from deepsquare.cost import Cost
from deepsquare.results import Store


def test_resnet50_as_json(shell: Shell) -> None:
    summary = shell.json("info resnet50 pooling+excitation")
    assert (summary["model"], summary["spec"]) == ("resnet50", "pooling+excitation")
    assert summary["input_shape"] == [3, 224, 224]
    assert summary["base"]["parameters"] == 25_557_032
    assert summary["base"]["macs"] == summary["equipped"]["macs"] == 4_089_184_256
    assert summary["equipped"]["parameters"] == 25_557_048
    assert summary["added"]["parameters"] == 16
    muls = {key: summary[key]["elementwise_muls"] for key in ("added", "equipped", "base")}
    assert muls["added"] == muls["equipped"] - muls["base"] > 0
    kinds = [site["kind"] for site in summary["sites"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "pooling": 1, "logits": 1, "branch_end": 16, "last_spatial_conv": 16
    }  # fmt: skip
    terms = {(site["kind"], site["term"]) for site in summary["sites"]}
    expected = {("pooling", "pooling"), ("logits", ""), ("branch_end", "excitation"), ("last_spatial_conv", "")}
    assert terms == expected
    assert summary["missing"] == {}


def test_options_reach_the_model(shell: Shell) -> None:
    summary = shell.json("info vanilla_cnn softmin(scale='channel') --num-classes 3 --input-shape 3 64 64")
    assert summary["base"]["parameters"] == 94_762 - 7 * 129
    assert summary["added"]["parameters"] == 3
    assert summary["base"]["macs"] == 4 * (2_581_760 - 1280) + 128 * 3  # four times the area of Table 1's image
    assert summary["input_shape"] == [3, 64, 64]
    assert set(summary["missing"]) == {"branch_end", "last_spatial_conv"}


def test_without_a_spec_nothing_is_added(shell: Shell) -> None:
    summary = shell.json("info vanilla_cnn")
    assert summary["base"] == summary["equipped"]
    assert set(summary["added"].values()) == {0}
    assert summary["base"]["macs"] == 2_581_760
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
        ("info hub/resnet18", "unknown library 'hub'"),
        ("info vgg16", "'vgg16' names different networks.*'torchvision/vgg16' or 'timm/vgg16'"),
        ("info vanilla_cnn squares", "unknown term 'squares'.*pooling, softmin"),
        ("info vanilla_cnn pooling+", "not a spec: 'pooling\\+'"),
        ("info vanilla_cnn excitation", "VanillaCNN has no branch_end site for the term 'excitation'"),
        ("info vit_b_16 pooling", "VisionTransformer is not a CNN"),
        (
            "info resnet18 --input-shape 1 64 64",
            r"ResNet could not be run on an input of shape \(2, 1, 64, 64\).* as --input-shape CHANNELS HEIGHT WIDTH$",
        ),
        ("info vanilla_cnn --num-classes -1", "vanilla_cnn.*num_classes.*-1"),
        ("reproduce fig2 --networks 0", "networks is 0; expected at least 1"),
        ("reproduce table2 --seeds 0", "seeds is 0; expected at least 1"),
        ("reproduce table3 --rows DeepSquare1", "no row is called DeepSquare1; the rows are Original, GeM"),
        ("reproduce table2 --data nowhere", "nowhere"),
        ("reproduce tabel2", "no subcommand is called 'tabel2'; did you mean table2\\? All: fig2, .*, all$"),
        ("trian resnet18", "no subcommand is called 'trian'; did you mean train\\?"),
        ("bench train --rounds 0", "rounds is 0"),
        ("bench models --rounds 0", "rounds is 0"),
        ("bench ops --rounds 0", "rounds is 0"),
        ("bench activations --rounds 0", "rounds is 0"),
        ("bench deployment --rounds 0", "rounds is 0"),
        ("bench excitation-onnx --forms fast", "the form is 'fast'; expected one of maps, global_average,"),
        ("bench data --data nowhere", "nowhere"),
        ("report --results nowhere", "nowhere is not a folder; expected one that holds rows or figures"),
    ],
)
def test_a_mistake_ends_in_one_line(shell: Shell, line: str, message: str) -> None:
    code, out, err = shell.run(line)
    assert (code, out) == (2, "")
    assert re.match(rf"deepsquare: error: .*{message}", err), err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "Available subcommands: info, train"),
        ("--nonsense", "--nonsense"),
        ("info", "required"),
        ("info resnet18 --nonsense", "--nonsense"),
        ("reproduce fig99", "fig99"),
        ("bench", "train, models, ops, activations, data, deployment, excitation-onnx"),
        ("bench speed", "train, models, ops, activations, data, deployment, excitation-onnx"),
        ("bench ops --steps 3", "--steps"),
        ("bench data", "--data PATH"),
    ],
)
def test_a_wrong_command_line(shell: Shell, line: str, message: str) -> None:
    code, out, err = shell.run(line)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_without_arguments_it_prints_the_help(shell: Shell) -> None:
    code, out, err = shell.run("")
    assert (code, err) == (0, "")
    assert out == shell.run("--help")[1]
    for verb in ("info", "train", "eval", "export", "predict", "reproduce", "bench", "report"):
        assert f"• {verb} " in out


def test_version(shell: Shell) -> None:
    assert shell.run("--version") == (0, f"deepsquare {metadata.version('deepsquare')}\n", "")


def test_the_help_of_a_subcommand_shows_its_own_options_only(shell: Shell) -> None:
    code, out, err = shell.run("bench ops --help")
    assert (code, err) == (0, "")
    assert {"--device", "--rounds", "--functions", "--results"} == set(re.findall("--[a-z]+", out)) - {"--help"}
    _, out, _ = shell.run("bench --help")
    for subject in ("train", "models", "ops", "data", "deployment"):
        assert f"• {subject} " in out
    assert "--rounds" not in out


def test_the_help_says_that_all_rows_are_the_default(shell: Shell) -> None:
    for name in ("table2", "proxy", "int8", "parity"):
        text = " ".join(shell.run(f"reproduce {name} --help")[1].split())
        assert "(default: all)" in text
        assert "(default: )" not in text


def test_importing_the_command_line_is_light() -> None:
    code = """
import sys
from deepsquare.cli import main
print(*sorted({"torchvision", "timm", "scipy", "matplotlib", "jinja2", "onnx"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("line", ["report", "bench ops", "bench deployment"])
def test_a_missing_extra_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)  # as if it were not installed
    code, out, err = shell.run(line)
    assert (code, out) == (2, "")
    expected = "the experiments and the report need scipy: pip install 'deepsquare[paper]'"
    assert err == f"deepsquare: error: {expected}\n"


def test_warnings_and_interrupts(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        warnings.warn("almost done", stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert shell.run("info resnet18") == (130, "", "deepsquare: note: almost done\n")


@pytest.mark.slow
def test_reproduce(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deepsquare.paper.report.page.cost_of", lambda *_: Cost(1, 1, 1, 1))  # takes half a minute
    code, out, err = shell.run("reproduce fig2 --networks 50")
    assert (code, err) == (0, "")
    assert out.endswith(f"The report is {tmp_path / 'out/report/index.html'}\n")
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    report = ["out/report/index.html", "out/report/summary.md"]
    assert files == ["out/figures/fig2.png", *report, "out/results/fig2.jsonl"]
    assert (tmp_path / "out/figures/fig2.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = Store(tmp_path / "out/results/fig2.jsonl").rows()
    assert {(row.seed, row.recipe["drawn"]) for row in rows} == {(0, 50)}


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
    assert done.stderr.startswith("deepsquare: error: unknown term 'bogus'")
    assert len(done.stderr.splitlines()) == 1
