"""The layout: imports point one way, and torchvision can be imported beside any torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import deepsquare
from deepsquare import _torchvision

ROOT = Path(deepsquare.__file__).parent
ORDER = (
    "_files",
    "_bits",
    "_compat",
    "_threads",
    "_torchvision",
    "kernels",
    "functional",
    "nn",
    "baselines",
    "surgery",
    "models",
    "preprocessing",
    "checkpoint",
    "timm_models",
    "cost",
    "data",
    "results",
    "training",
    "export",
    "paper",
    "cli",
    "__main__",
)  # fmt: skip


def imported(source: str) -> Iterator[str]:
    """The parts of deepsquare that ``source`` imports, inside functions too; ``""`` for the package itself."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "deepsquare" else [module]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "deepsquare":
                yield rest.partition(".")[0]


def test_the_reader_of_imports_sees_every_form() -> None:
    source = """
import torch, deepsquare.cost
from deepsquare import nn as dsnn, surgery
from deepsquare.models import create_model
def late():
    import deepsquare
    from deepsquare.paper.fig2.experiment import run
"""
    assert sorted(imported(source)) == ["", "cost", "experiments", "models", "nn", "surgery"]


def test_imports_point_one_way() -> None:
    files = {path.relative_to(ROOT): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"}
    parts = {path: path.parts[0].removesuffix(".py") for path in files}
    assert set(parts.values()) == set(ORDER), "a new file has a place in the order"
    rank = {name: place for place, name in enumerate(ORDER)}
    wrong = [
        f"{path} imports {name or 'the package'}"
        for path, file in files.items()
        for name in imported(file.read_text(encoding="utf-8"))
        if rank.get(name, len(ORDER)) > rank[parts[path]]
    ]
    assert not wrong


def run(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_works_after_deepsquare() -> None:
    code = """
import deepsquare, torch, torchvision
print(torchvision.models.alexnet(num_classes=3)(torch.zeros(1, 3, 64, 64)).shape[1])
"""
    assert run(code) == "3"


def test_deepsquare_works_without_timm() -> None:
    code = """
import sys
sys.modules["timm"] = None  # import timm now raises ImportError
import deepsquare
print(type(deepsquare.create_model("vgg11", num_classes=3)).__module__)
"""
    assert run(code) == "torchvision.models.vgg"


@pytest.mark.parametrize(
    ("already_imported", "compiled_part", "declared"),
    [(True, False, []), (False, True, []), (False, False, ["torchvision::nms", "torchvision::qnms"])],
)
def test_operators_are_declared_only_when_they_are_missing(
    monkeypatch: pytest.MonkeyPatch, already_imported: bool, compiled_part: bool, declared: list[str]
) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.library, "define", lambda name, schema: calls.append((name, schema)))
    monkeypatch.setattr(_torchvision, "_compiled_part_loads", lambda: compiled_part)
    if already_imported:
        monkeypatch.setitem(sys.modules, "torchvision", ast)
    else:
        monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    _torchvision.prepare()
    assert [name for name, _ in calls] == declared
    assert {schema for _, schema in calls} <= {"(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"}
