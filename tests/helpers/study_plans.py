"""Small plans of a study, and rows of their runs."""

from pathlib import Path
from typing import Any

from deepsquare.paper.cifar10.experiment import table_runs
from deepsquare.paper.tables import TABLE_2
from deepsquare.results import Row, Store

TINY = """
[[family]]
name = "tiny"
experiment = "tiny_imagenet"
schedule = "64 px"
model = "shufflenet_v2_x0_5"
rows = { "plain" = "", "SP" = "pooling" }
seeds = 5
looks = [3, 5]
alpha = [0.01, 0.04]
hours = 1.0
"""
CIFAR = """
[[family]]
name = "cifar"
experiment = "cifar10"
schedule = "long"
rows = ["Original", "DeepSquare3"]
seeds = 2
looks = [2]
alpha = [0.05]
hours = 2.0
"""
ABLATION = """
[[family]]
name = "ablation"
experiment = "cifar10_ablation"
schedule = "lr × 1"
rows = { "Original" = "", "GAP × 2" = "" }
row_recipe = { "GAP × 2" = { pool_factor = 2.0 } }
more_schedules = { "lr × 4" = { lr = 0.4 } }
seeds = 2
looks = [2]
alpha = [0.05]
hours = 1.0
"""


def write(path: Path, *parts: str, budget: float = 100) -> Path:
    path.write_text(f"budget = {budget:.1f}\n" + "".join(parts))
    return path


def append(results: Path, *, seeds: int, row: str = "Original", spec: str = "", **metrics: Any) -> None:
    for seed in range(seeds):
        (run,) = (run for run in table_runs([TABLE_2], "long", seeds, [row]) if run.seed == seed)
        stored = Row("cifar10", row, seed, run.to_recipe(), {"accuracy": 0.8, **metrics}, 3600.0)
        Store(results / "cifar10.jsonl").append(stored)
