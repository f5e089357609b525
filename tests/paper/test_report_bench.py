"""The report: the rows of the benchmarks on the page."""

import re
from dataclasses import asdict
from typing import Any

import pytest
from helpers.report import BASE, RenderPage, rows_of

from deepsquare.cost import Cost
from deepsquare.paper.bench.activations import FUSED, PLAIN
from deepsquare.paper.report.bench import GEM_FORMS
from deepsquare.paper.tables import TABLE_6
from deepsquare.results import Row

pytestmark = pytest.mark.usefixtures("placeholder_costs")


def models_row(seed: int, date: str, own: dict[str, float], n: int = 9, name: str = "models/resnet50") -> Row:
    """A row of ``bench models``: what each spec takes relative to the plain network; 1.2 without kernels."""
    cost = asdict(Cost(100, 1000, 10, 400))
    dearer = asdict(Cost(110, 1500, 20, 800))
    metrics: dict[str, Any] = {"": {"cost": cost}}
    for spec, ratio in own.items():
        times = {"own": [2 * ratio] * n, "base": [2.0] * n}
        if "excitation" in spec:
            times["without_kernels"] = [2 * 1.2] * n
        metrics[spec] = {"cost": dearer, "seconds": {"inference, batch 1": times, "training step": times}}
    return Row("bench", name, seed, {"threads": 2}, metrics, 1.0, date=date, commit=f"{seed}abcdefgh", hardware="a CPU")


TABLE_6_TIMES = {entry.spec: 1.3 for entry in TABLE_6.entries} | {"pooling+excitation": 1.1, "se": 1.15}


def test_a_table_of_costs_has_one_run(render_page: RenderPage) -> None:
    bench = [
        models_row(1, "2025-01-01", {"se": 1.5, "gsop1": 1.5}),
        models_row(2, "2025-01-02", {"se": 1.25}, n=5),  # without gsop1, so that row 1 keeps a table of its own
        models_row(3, "2025-01-03", {"ge_theta": 1.4}),
        models_row(4, "2025-01-04", {"ge_theta": 1.6, "mpn_cov": 1.7}),  # replaces row 3
    ]
    rows = [*rows_of("", BASE), *rows_of("bilinear(size=32)", [value + 1 for value in BASE])]
    page = render_page([*reversed(bench), *rows])
    shown = re.findall(r"<summary>resnet50, 2 threads: ([^<]*)</summary>", page.text)
    assert shown == [f"2025-01-0{k}, commit {k}abcdef, a CPU" for k in (4, 2, 1)]
    times = [line[1:] for line in page.tables["baselines"] if line[0] == "Squeeze-and-Excitation"]
    assert times == [["10+10%", "+50%", "+100%", *[time] * 2] for time in ("1.250[1.25, 1.25]", "1.500[1.50, 1.50]")]
    assert page.text.count("<small>range of 5 iterations</small>") == 2
    assert "Table 6: the paper’s accuracy" not in page.text  # no run measured all of its methods
    assert page.line("cifar-baselines", "Bilinear (C=32)")[-1].startswith("+1.00")
    assert "reproduced" not in page.line("cifar-baselines", "Bilinear (C=32)")[-1]  # the paper claims nothing


def test_the_times_of_table_6_are_of_one_run(render_page: RenderPage) -> None:
    less = {spec: 9.0 for spec in TABLE_6_TIMES if spec != "se"}
    rows = [
        models_row(1, "2025-01-01", {**TABLE_6_TIMES, "se": 7.0}),
        models_row(2, "2025-01-02", TABLE_6_TIMES),
        models_row(3, "2025-01-03", less),
        models_row(4, "2025-01-04", TABLE_6_TIMES, name="models/resnet18"),
    ]
    page = render_page(rows)
    assert "SE: 76.71% at 1.15 times the time" in page.text
    assert "2025-01-02, commit 2abcdef, a CPU;\neach network in rounds of its own" in page.text
    workload = "inference, batch 195% interval"
    assert page.line("baselines", "with our kernels")[1:3] == [workload, "✓ holds"]
    assert page.line("baselines", "in plain operations")[1:3] == [workload, "✗ SE adds less"]
    assert page.line("baselines", "with our kernels")[7] == "1.045[1.05, 1.05]"
    assert sum(line[0] == "with our kernels" for line in page.tables["baselines"]) == 1  # of inference alone
    page = render_page([models_row(5, "2025-01-05", TABLE_6_TIMES, n=5)])
    assert page.line("baselines", "with our kernels")[2].startswith("? undecided: MPN-COV, iSQRT-COV")


def test_fused_and_compiled_networks_beside_the_others(render_page: RenderPage) -> None:
    row = models_row(1, "2025-01-01", {"se": 1.2, "pooling+excitation": 1.05})
    inference: dict[str, Any] = {"base": [2.0] * 9, "fused": [1.6] * 9, "compiled": [1.0] * 9}
    row.metrics[""]["seconds"] = {"inference, batch 1": inference, "training step": {"base": [2.0] * 9}}
    row.metrics["se"]["seconds"]["inference, batch 1"]["compiled"] = [1.1] * 9
    row.metrics["pooling+excitation"]["skipped"] = {"compiled": "no C++ compiler"}
    page = render_page([row])
    assert page.line("baselines", "plain, block ends fused")[2:] == ["0.800[0.80, 0.80]", "–"]
    assert page.line("baselines", "plain, compiled")[2:] == ["0.500[0.50, 0.50]", "–"]
    beside = [line for line in page.tables["baselines"] if line[0].startswith("beside the plain network with fused")]
    assert [line[2] for line in beside] == ["1.500[1.50, 1.50]", "1.312[1.31, 1.31]"]
    compiled = [line[2:] for line in page.tables["baselines"] if line[0].startswith("compiled, beside")]
    assert compiled == [["1.100[1.10, 1.10]", "–"]]
    assert "Not measured: Square-Pooling &amp; Square-Excitation, compiled: no C++ compiler." in page.text


def test_layouts_and_devices_have_tables_of_their_own(render_page: RenderPage) -> None:
    rows = [models_row(k, f"2025-01-0{k}", {"se": 1 + k / 10}) for k in (1, 2, 3)]
    rows[1].recipe["memory"] = "contiguous"  # type: ignore[index]
    rows[2].recipe["device"] = "a GPU"  # type: ignore[index]
    page = render_page(rows)
    shown = re.findall(r"<summary>(resnet50[^:]*), 2 threads: ([^<]*)</summary>", page.text)
    assert [name for name, _ in shown] == ["resnet50", "resnet50, contiguous", "resnet50, a GPU"]
    assert [text.endswith("a CPU, a GPU") for _, text in shown] == [False, False, True]


def test_functions_beside_their_limits(render_page: RenderPage) -> None:
    def row(name: str, **ratios: float) -> Row:
        medians = {key: [value, value - 0.1, value + 0.1] for key, value in ratios.items()}
        times = {"seconds": [1e-3] * 3, "limit": [5e-4] * 3, "allocated": {"ours": 1, "formula": 1}, **medians}
        times |= {f"{other} / ours": [1.0] * 3 for other in ("formula", "compiled")}
        maps = {"64×56×56": {"forward": times, "bytes": 1_000_000}}
        recipe = {"rounds": 9, "threads": 2, "batch_size": 1}
        return Row("bench", f"ops/square_excitation/{name}", 0, recipe, maps, 1.0, commit="0123456789")

    older = row("contiguous/float32", **{"ours / limit": 1.0})
    newer = row("channels_last/bfloat16", **{"ours / limit": 1.3, "ours / contiguous": 1.2, "ours / float32": 0.6})
    page = render_page([older, newer])
    lines = [line[1:] for line in page.tables["ops"] if line[0] == "Square-Excitation"]
    assert lines == [
        ["contiguous", "float32", "one copy", "1.00[0.90, 1.10]"],
        ["channels_last", "bfloat16", "one copy", "1.30[1.20, 1.40]"],
        ["channels_last", "bfloat16", "contiguous", "1.20[1.10, 1.30]"],
        ["channels_last", "bfloat16", "float32, per byte", "1.20[1.00, 1.40]"],
    ]


def test_functions_on_the_page(render_page: RenderPage) -> None:
    times = {
        "seconds": [1e-3, 1e-3, 1e-3],
        "limit": [5e-4, 4e-4, 6e-4],
        "ours / limit": [2.0, 1.5, 2.5],
        "formula / ours": [3.0, 3.0, 3.0],
        "compiled / ours": [1.5, 1.5, 1.5],
        "allocated": {"ours": 1_000_000, "formula": 3_000_000},
    }
    case = {"forward": times, "forward + backward": times, "bytes": 1_000_000}
    metrics = {"64×56×56": case, "64×28×28": {**case, "bytes": 250_000}}
    recipe = {"rounds": 9, "threads": 2, "batch_size": 1}
    of: dict[str, Any] = {"date": "2025-01-01", "commit": "0123456789"}
    page = render_page([Row("bench", "ops/square_excitation/contiguous/float32", 0, recipe, metrics, 1.0, **of)])
    assert page.line("ops", "64×56×56")[1:4] == ["2.00[1.50, 2.50]", "3.00", "1.50"]
    assert page.line("ops", "64×56×56")[-2:] == ["1.00", "3.00"]
    assert "Square-Excitation, on the largest map: limit 4 GB/s, ours 2 GB/s" in page.text
    assert "9 rounds (95% interval), 2 threads; 2025-01-01, commit 0123456" in page.text
    assert "GeM" not in "".join(page.text.partition('id="ops"')[2:]).partition("</section>")[0]


def test_gem_beside_square_pooling(render_page: RenderPage) -> None:
    def case(gem: float) -> dict[str, Any]:
        ratios = {f"{name} / ours": [gem + k, 0.0, 9.0] for k, name in enumerate(GEM_FORMS)}
        ratios |= {name: [1.0, 1.0, 1.0] for name in ("ours / limit", "compiled / ours")}
        times = {"seconds": [1e-3] * 3, "limit": [1e-3] * 3, **ratios, "allocated": {"ours": 1, "formula": 1}}
        return {"forward": times, "forward + backward": times, "bytes": 1_000_000}

    recipe = {"rounds": 9, "threads": 2, "batch_size": 1}
    metrics = {"64×56×56": case(3.0), "64×28×28": {**case(2.0), "bytes": 250_000}}
    page = render_page([Row("bench", "ops/square_pooling/contiguous/float32", 0, recipe, metrics, 1.0)])
    assert page.line("ops", "Square-Pooling by our kernel, then a square root")[1:] == ["2.00 to 3.00"] * 2
    assert page.line("ops", "GeM by our gem_pooling")[1:] == ["5.00 to 6.00"] * 2


def test_deployed_networks_on_the_page(render_page: RenderPage) -> None:
    def deployed(experiment: str, name: str, kind: str, precision: str, **metrics: Any) -> Row:
        return Row(experiment, name, 0, {"runtime": kind, "precision": precision}, metrics, 1.0)

    time = {"seconds": [5e-3, 5e-3, 5e-3], "ratio": [1.02, 0.99, 1.03]}
    one = {"bytes": 9_100_000, "memory": 20_000_000, "1": time, "2": time}
    recipe = {"rounds": 9, "input": 224, "batch_size": 1}
    measured = {"": one, "pooling": one, "again": one}
    slower = measured | {"softmin": {**one, "bytes": 5_000_000}}
    bench = [
        Row("bench", "deploy/a/onnx/int8", 0, recipe, measured, 1.0, commit="aaaaaaaaaa"),
        Row("bench", "deploy/a/onnx/float32", 0, {**recipe, "rounds": 3}, slower, 1.0, commit="bbbbbbbbbb"),
    ]
    parity: dict[str, Any] = {"refused": None, "max_rel_error": 1e-6, "fp32_error": 2e-6, "top1_agreement": 1.0}
    parity["undelegated_muls"] = 0
    worse = {**parity, "max_rel_error": 3e-5, "top1_agreement": 0.75}
    page = render_page(
        [
            *bench,
            deployed("int8", "net+softmin", "onnx", "float32", accuracy=0.7, overflows=3),
            deployed("int8", "net+softmin", "executorch", "int8", accuracy=0.69, overflows=0),
            deployed("int8", "net", "onnx", "int8", accuracy=0.69, overflows=0),  # nothing to compare with
            deployed("parity", "net", "onnx", "float32", **parity),
            deployed("parity", "net+pooling", "onnx", "float32", **worse),
            deployed("parity", "net+gsop", "executorch", "float32", refused="no such operation"),
        ]
    )
    cells = ["5.00+2.0% [−1.0, +3.0]", "5.00+2.0% [−1.0, +3.0]", "9.10", "20.0"]
    assert page.line("deployment", "Square-Pooling")[1:] == cells
    assert len(page.line("deployment", "Square-Softmin")) == 5  # a table has one measurement
    assert "onnxruntime, int8: 9 rounds (95% interval); commit aaaaaaa</summary>" in page.text
    assert "onnxruntime, float32: 3 rounds (range of 3 rounds); commit bbbbbbb</summary>" in page.text
    assert (
        "onnxruntime, int8, time added with one thread: plain +2.0%, Square-Pooling +2.0%, plain, again +2.0%"
        in page.text
    )
    assert page.line("deployment", "net+softmin")[2:] == ["70.003 images overflow", "no run yet", "69.00−1.00"]
    assert page.line("deployment", "net") == ["net", "2", "2.0e-06", "3.0e-05", "75%", "not exported", "0"]
    assert page.line("deployment", "net+gsop")[2:4] == ["–", "not exported"]
    assert "net+gsop, ExecuTorch: no such operation" in page.text


def test_the_newest_cost_of_the_activations(render_page: RenderPage) -> None:
    older = {"relu": (1, 1), "relu_square": (2, 3), "softplus": (9, 8), "tanh": (8, 7), "sigmoid": (4, 2.4)}
    relative = {name: {"forward": first, "forward_backward": second} for name, (first, second) in older.items()}
    recipe = {"elements": 1048576, "repeats": 40}
    spirals = Row("spirals", "activation cost", 0, recipe, {"relative_to_relu": relative}, 1.0, date="2025-01-01")
    page = render_page([spirals])
    assert page.line("spirals", "sigmoid")[1:] == ["4.00", "2.40"]
    statements = [line[1:] for line in page.tables["spirals"] if line[0] == "plain operations"]
    assert statements[0] == ["forward", "? undecided", "softplus 4.50, tanh 4.00, sigmoid 2.00"]
    assert statements[1][2] == "softplus 2.67, tanh 2.33, sigmoid 0.80"
    assert "the least of 40 times" in page.text
    assert not [line for line in page.tables["spirals"] if line[0] == "fused kernel"]

    def passes(sigmoid: float) -> dict[str, Any]:
        relu = {"relu": 1, PLAIN: 2, FUSED: 1, "softplus": 8, "tanh": 6, "sigmoid": sigmoid}
        ratios = {name: {f"/ {o}": [t / relu[o]] * 3 for o in ("relu", PLAIN, FUSED)} for name, t in relu.items()}
        return {"forward": ratios, "forward + backward": ratios}

    sizes = {"64": passes(3), "128": passes(1.5)}
    bench = Row("bench", "activations", 0, {"rounds": 6}, sizes, 1.0, date="2025-01-02")
    page = render_page([bench, spirals])
    assert page.line("spirals", "ReLU-Square, fused kernel")[1:] == ["1.00"] * 4
    assert page.line("spirals", "fused kernel")[2:] == ["✓ holds", "softplus 8.00, tanh 6.00, sigmoid 1.50 to 3.00"]
    assert page.line("spirals", "plain operations")[2] == "✗ not for sigmoid"
    assert "median over 6 rounds (95% interval)" in page.text
