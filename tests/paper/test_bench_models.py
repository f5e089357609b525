"""``bench models``: which networks run beside each other, what is compared, and the guard."""

import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tables import cells
from torch import nn

from deepsquare.kernels import cpu, without_kernels
from deepsquare.paper.bench import _common, models, networks
from deepsquare.paper.bench.guard import NEW, NOT_SLOWER, SLOWER, UNDECIDED, compare
from deepsquare.paper.bench.networks import BASE, COMPILED, FUSED, INFERENCE, OWN, TRAINING, WITHOUT_KERNELS, WORKLOADS
from deepsquare.paper.bench.ratios import iteration_counts, relative_times
from deepsquare.paper.report.bench import backbones
from deepsquare.results import Row, Store, conditions

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built here: no C compiler")
CPU = networks.Setting(_common.CPU, "channels_last")
TINY = "timm/test_resnet"


def bench_rows(folder: Path) -> list[Row]:
    return Store(folder / "bench.jsonl").rows()


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The networks whose block ends were to be fused, which a stand-in leaves as they are."""
    models_fused: list[nn.Module] = []

    def fuse(model: nn.Module) -> int:
        models_fused.append(model)
        return 4

    monkeypatch.setattr("deepsquare.surgery.blocks.fuse_plain_blocks", fuse, raising=False)
    monkeypatch.setattr(models, "ROUND_SECONDS", 0)  # one iteration per round
    monkeypatch.setattr(networks, "INPUT", 64)
    return models_fused


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], fused: list[nn.Module]) -> None:
    models.run([TINY], ["pooling", "se"], rounds=2, results=tmp_path, memory_format="contiguous")
    assert "time relative to the plain network" in " ".join(capsys.readouterr().out.split())
    (row,) = bench_rows(tmp_path)
    shown = cells(models._table(TINY, row.metrics, 2))
    beside_fused = "beside the plain network with fused block ends"
    assert list(shown) == ["plain, block ends fused", "pooling", "without our kernels", beside_fused, "se"]
    assert (row.row, row.recipe["memory"], row.recipe["device"]) == (f"models/{TINY}", "contiguous", "cpu")
    (run,) = backbones([row])[f"{TINY}, contiguous"]
    times = run["specs"]["se"]
    assert times["parameters"] > 0
    assert set(times["times"]) == set(WORKLOADS)
    assert all(time.low <= time.value <= time.high for time in times["times"].values())
    stored = {spec: set(row.metrics[spec]["seconds"][INFERENCE[0]]) for spec in ("", "pooling", "se")}
    assert stored == {"": {BASE, FUSED}, "pooling": {BASE, OWN, WITHOUT_KERNELS}, "se": {BASE, OWN}}
    assert set(row.metrics[""]["seconds"][TRAINING]) == {BASE, FUSED}
    base, other = (row.metrics[spec]["seconds"][TRAINING][BASE] for spec in ("pooling", "se"))
    assert base == other  # all networks are compared with the same iterations of the plain one
    assert len(fused) == 1


def test_the_networks_of_a_run(monkeypatch: pytest.MonkeyPatch, fused: list[nn.Module]) -> None:
    compiled: list[types.FunctionType] = []

    def compile_one(function: types.FunctionType, **_: Any) -> types.FunctionType:
        compiled.append(function)
        if len(compiled) == 2:
            raise RuntimeError("InvalidCxxCompiler: no compiler\nand much more")
        return function

    monkeypatch.setattr(torch, "compile", compile_one)
    setting = networks.Setting(_common.CPU, "contiguous", compiled=True)
    of, skipped = networks.build(TINY, ["se", "pooling"], setting)
    assert list(of) == [
        ("", BASE), ("", COMPILED), ("se", OWN), ("pooling", OWN), ("pooling", WITHOUT_KERNELS), ("pooling", COMPILED),
        ("", FUSED),
    ]  # fmt: skip
    assert all(set(of[key]) == set(INFERENCE if key[1] == COMPILED else WORKLOADS) for key in of)
    assert skipped == {"se": {COMPILED: "RuntimeError: InvalidCxxCompiler: no compiler"}}
    assert len({id(function.__code__) for function in compiled}) == 3  # code of its own for each network


def test_no_block_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepsquare.surgery.blocks.fuse_plain_blocks", lambda model: 0)
    of, skipped = networks.build(TINY, [], CPU)
    assert list(of) == [("", BASE)]
    assert skipped == {"": {FUSED: "no block's end can be fused"}}
    with without_kernels():
        assert networks.build(TINY, [], CPU)[1] == {"": {FUSED: "needs the C kernels"}}


def test_all_networks_run_in_each_round() -> None:
    calls: list[Any] = []
    keys = [("", BASE), ("se", OWN), ("excitation", OWN), ("", COMPILED)]
    of: networks.Networks = {
        key: {
            workload: partial(calls.append, (workload, key))
            for workload in (INFERENCE if key[1] == COMPILED else WORKLOADS)
        }
        for key in keys
    }
    times = models._time(of, 4, CPU, "")
    in_rounds = calls[2 * len(WORKLOADS) :]  # without the choice of the number of iterations
    orders: dict[str, list[list[tuple[str, str]]]] = {}
    while in_rounds:
        workload = in_rounds[0][0]
        turn = 4 if workload in INFERENCE else 3
        assert {name for name, _ in in_rounds[:turn]} == {workload}
        orders.setdefault(workload, []).append([key for _, key in in_rounds[:turn]])
        del in_rounds[:turn]
    assert {workload: len(of_workload) for workload, of_workload in orders.items()} == dict.fromkeys(WORKLOADS, 4)
    assert all(sorted(order) == sorted(keys) for workload in INFERENCE for order in orders[workload])
    assert all(sorted(order) == sorted(keys[:3]) for order in orders[TRAINING])
    assert len({tuple(order) for order in orders[INFERENCE[0]]}) > 1
    assert all(len(values) == 4 for by_key in times.values() for values in by_key.values())


def metrics_of(own: float, n: int = 9, spread: float = 0.0, **plain: float) -> dict[str, Any]:
    """One spec at ``own`` times the plain network, alternately ``spread`` more and less."""
    base = [2.0] * n
    times = [2 * (own + spread * (-1) ** k) for k in range(n)]
    beside = {name: [2 * ratio] * n for name, ratio in plain.items()}
    of_spec = {BASE: base, OWN: times} | ({COMPILED: [0.9] * n} if COMPILED in plain else {})
    return {"": {"seconds": {"w": {BASE: base, **beside}}}, "se": {"seconds": {"w": of_spec}}}


def test_what_is_relative_to_what() -> None:
    metrics = metrics_of(1.2, fused=0.8, compiled=0.5)
    assert {kind: ratio["w"].value for kind, ratio in relative_times(metrics, "").items()} == {
        FUSED: 0.8,
        COMPILED: 0.5,
    }
    of_spec = {kind: round(ratio["w"].value, 3) for kind, ratio in relative_times(metrics, "se").items()}
    assert of_spec == {OWN: 1.2, FUSED: 1.5, COMPILED: 0.9}
    del metrics[""]["seconds"]  # a row of an older version
    assert list(relative_times(metrics, "se")) == [OWN]
    assert relative_times(metrics, "") == {}
    assert iteration_counts(metrics) == {"w": 9}


def committed(own: float, date: str = "2025-01-01", **changes: Any) -> Row:
    recipe = {"threads": 2, "input": 224, "memory": "channels_last", "interleaved": "all networks"}
    metrics = metrics_of(own, changes.pop("n", 9), changes.pop("spread", 0.0))
    recipe |= changes.pop("recipe", {})
    values: dict[str, Any] = {"row": "models/a", "hardware": "a CPU, AVX2", "date": date, **changes}
    return Row(experiment="bench", seed=0, recipe=recipe, metrics=metrics, seconds=1.0, **values)


@pytest.mark.parametrize(
    ("now", "spread", "before", "spread_before", "verdict"),
    [
        (1.10, 0.01, 1.05, 0.01, SLOWER),  # [1.09, 1.11] above [1.04, 1.06]
        (1.10, 0.03, 1.05, 0.03, NOT_SLOWER),  # the intervals overlap
        (1.00, 0.01, 1.05, 0.01, NOT_SLOWER),  # faster
        (1.05, 0.00, 1.05, 0.00, NOT_SLOWER),
    ],
)
def test_slower_beyond_both_intervals(
    now: float, spread: float, before: float, spread_before: float, verdict: str
) -> None:
    (one,) = compare(metrics_of(now, spread=spread), [committed(before, spread=spread_before)])
    assert (one.spec, one.workload, one.verdict) == ("se", "w", verdict)


def test_the_guard_needs_a_ratio_and_iterations() -> None:
    assert [one.verdict for one in compare(metrics_of(2.0), [])] == [NEW]
    assert [one.verdict for one in compare(metrics_of(2.0, n=5), [committed(1.0)])] == [UNDECIDED]
    assert [one.verdict for one in compare(metrics_of(2.0), [committed(1.0, n=5)])] == [UNDECIDED]
    newest_without = committed(1.0)
    del newest_without.metrics["se"]  # type: ignore[attr-defined]
    (one,) = compare(metrics_of(2.0), [newest_without, committed(3.0), committed(1.0)])
    assert one.verdict == NOT_SLOWER  # beside the newest row that has the spec


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """``bench models`` measures "se" at these ratios, one a run, on "a CPU, AVX2"."""
    ratios: list[float] = []
    monkeypatch.setattr(models, "measure", lambda *_: metrics_of(ratios.pop(0)))
    monkeypatch.setattr(models, "conditions", lambda: {**conditions(), "hardware": "a CPU, AVX2"})
    monkeypatch.setattr(models, "cost_of", lambda *_: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(networks, "INPUT", 224)
    monkeypatch.setattr(models, "_table", lambda *_: "")
    return ratios  # type: ignore[return-value]


def test_the_guard_fails_on_what_became_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_a_cpu: list[float]
) -> None:
    Store(tmp_path / "bench.jsonl").replace(
        [
            committed(1.0, "2025-01-02"),
            committed(9.0, "2025-01-01"),  # older
            committed(9.0, "2025-01-03", hardware="another CPU, AVX2"),
            committed(9.0, "2025-01-03", recipe={"threads": 1}),
            committed(9.0, "2025-01-03", recipe={"memory": "contiguous"}),
            committed(9.0, "2025-01-03", recipe={"device": "a GPU"}),
        ]
    )
    on_a_cpu += [1.0, 1.1]
    run: Callable[..., None] = models.run
    run(["a"], ["se"], rounds=9, results=tmp_path / "first", guard=True, committed=tmp_path)
    assert "not slower" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        run(["a"], ["se"], rounds=9, results=tmp_path / "second", guard=True, committed=tmp_path)
    assert stopped.value.code == 1
    assert "slower" in capsys.readouterr().out
    assert len(bench_rows(tmp_path / "second")) == 1  # a guarded run is stored too


def test_the_guard_without_a_row_fails_before_it_measures(tmp_path: Path, on_a_cpu: list[float]) -> None:
    with pytest.raises(ValueError, match=r"there are no committed rows to compare with: no file .*bench\.jsonl"):
        models.run(["a"], ["se"], results=tmp_path, guard=True, committed=tmp_path)
    Store(tmp_path / "bench.jsonl").replace([committed(1.0, hardware="a CPU")])
    with pytest.raises(ValueError, match=r"has no row of models/a .*\(a CPU, AVX2, cpu, 2 threads, channels_last\)"):
        models.run(["a"], ["se"], results=tmp_path, guard=True, committed=tmp_path)
    assert on_a_cpu == []


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="PyTorch finds no GPU here"):
        models.run([TINY], [], results=tmp_path, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_common, "kernels_on", lambda device: "none")
    with pytest.raises(ValueError, match="the Triton kernels do not run here"):
        models.run([TINY], [], results=tmp_path, device="cuda")


def test_a_gpu_has_finished_when_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"wait for {device}"))
    monkeypatch.setattr("time.perf_counter", lambda: float(len(events)))
    seconds = _common.time_call(lambda: events.append("call"), 2, torch.device("cuda", 1))
    assert events == ["wait for cuda:1", "call", "call", "wait for cuda:1"]
    assert seconds == 3 / 2  # two calls and the wait after them
    events.clear()
    _common.time_call(lambda: events.append("call"), 2)
    assert events == ["call", "call"]


def test_a_row_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(_common, "backend_for", lambda x: types.ModuleType("deepsquare.kernels.gpu"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert _common.describe_device(torch.device("cuda")) == {"device": "a GPU", "kernels": "Triton"}
    monkeypatch.setattr(_common, "backend_for", lambda x: None)
    assert _common.describe_device(_common.CPU) == {"device": "cpu", "kernels": "none"}
