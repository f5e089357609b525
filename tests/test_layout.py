"""The layout: imports point one way, ``import deepsquare`` is light, torchvision can be imported beside any torch."""

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import deepsquare

ROOT = Path(deepsquare.__file__).parent
ORDER = (
    "_archive",
    "_dry_run",
    "_files",
    "_memory",
    "_compat",
    "_terminal",
    "_threads",
    "kernels",
    "functional",
    "nn",
    "baselines",
    "surgery",
    "models",
    "preprocessing",
    "timm_models",
    "header",
    "checkpoint",
    "cost",
    "batchnorm",
    "data",
    "results",
    "training",
    "export",
    "paper",
    "cli",
    "__main__",
)  # fmt: skip


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of deepsquare that are imported in ``tree``, inside functions too; ``""`` for the package itself."""
    for node in ast.walk(tree):
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


def imported_at_import(tree: ast.Module) -> Iterator[str]:
    """As :func:`imported`, but only what is imported when the module itself is: not inside functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imported(node)


@pytest.fixture(scope="module")
def sources() -> dict[Path, ast.Module]:
    files = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def test_the_reader_of_imports_sees_every_form() -> None:
    tree = ast.parse("""
import torch, deepsquare.cost
from deepsquare import nn as dsnn, surgery
from deepsquare.models import create_model
def late():
    import deepsquare
    from deepsquare.paper.fig2.experiment import run
""")
    assert sorted(imported(tree)) == ["", "cost", "models", "nn", "paper", "surgery"]
    assert sorted(imported_at_import(tree)) == ["cost", "models", "nn", "surgery"]


def test_imports_point_one_way(sources: dict[Path, ast.Module]) -> None:
    parts = {path: path.parts[0].removesuffix(".py") for path in sources}
    assert set(parts.values()) == set(ORDER), "every file has a position in the order"
    rank = {name: position for position, name in enumerate(ORDER)}
    wrong = [
        f"{path} imports {name or 'the package'}"
        for path, tree in sources.items()
        for name in imported(tree)
        if rank.get(name, len(ORDER)) > rank[parts[path]]
    ]
    assert not wrong


def test_only_the_command_line_imports_the_paper_and_only_inside_functions(sources: dict[Path, ast.Module]) -> None:
    wrong = [
        str(path)
        for path, tree in sources.items()
        if path.parts[0] != "paper" and "paper" in (imported_at_import if path.parts[0] == "cli" else imported)(tree)
    ]
    assert not wrong


def test_no_file_is_longer_than_350_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.rglob("*.py")}
    assert {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 350} == {}


def run(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light_and_changes_nothing_in_torch() -> None:
    code = """
import json, sys, torch
from torch.nn.modules import module
names = [name for name in vars(module) if name.startswith("_global_") and hasattr(getattr(module, name), "keys")]
hooks = {name: len(getattr(module, name)) for name in names}
import deepsquare
heavy = ["torchvision", "timm", "matplotlib", "scipy", "jinja2", "rich", "tyro", "deepsquare.paper", "deepsquare.cli"]
loaded = [name for name in heavy if name in sys.modules]
deepsquare.equip, deepsquare.nn, deepsquare.functional, deepsquare.create_model, deepsquare.load
after = {name: len(getattr(module, name)) for name in hooks}
print(json.dumps([loaded, [name for name in heavy if name in sys.modules], hooks == after, len(hooks) > 5]))
"""
    assert json.loads(run(code)) == [[], [], True, True]


def test_the_public_names() -> None:
    code = """
import deepsquare, deepsquare.cost
from deepsquare import *
assert set(deepsquare.__all__) <= set(dir(deepsquare))
modules = {"baselines", "functional", "nn"}
print(all(callable(getattr(deepsquare, name)) for name in set(deepsquare.__all__) - modules))
"""
    assert run(code) == "True"
    with pytest.raises(AttributeError, match="module 'deepsquare' has no attribute 'equipp'"):
        _ = deepsquare.equipp  # type: ignore[attr-defined]


def test_deepsquare_works_without_timm() -> None:
    code = """
import sys
sys.modules["timm"] = None  # import timm now raises ImportError
import deepsquare
print(type(deepsquare.create_model("vgg11", num_classes=3)).__module__)
"""
    assert run(code) == "torchvision.models.vgg"


@pytest.fixture(scope="module")
def repair() -> ModuleType:
    """The import hook of the development set-up, loaded from ``tools``."""
    spec = importlib.util.spec_from_file_location("repair", ROOT.parent / "tools" / "torchvision_repair.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.meta_path.copy()
    spec.loader.exec_module(module)
    sys.meta_path[:] = before
    return module


@pytest.mark.parametrize("order", ["torch, deepsquare, torchvision", "timm, torchvision, deepsquare, torch"])
def test_torchvision_can_be_imported_in_any_order(order: str) -> None:
    code = f"""
import {order}
import torchvision
print(torchvision.models.alexnet(num_classes=3)(torch.zeros(1, 3, 64, 64)).shape[1])
"""
    assert run(code) == "3"


def test_the_import_hook_imports_nothing_when_python_starts() -> None:
    code = "import sys; print(any(name in sys.modules for name in ('torch', 'torchvision', 'numpy')))"
    assert run(code) == "False"


def test_the_import_hook_handles_torchvision_only(repair: ModuleType) -> None:
    assert repair.TorchvisionFinder.find_spec("torch") is None
    assert repair.TorchvisionFinder.find_spec("torchvision.models") is None
    spec = repair.TorchvisionFinder.find_spec("torchvision")
    assert (spec.name, type(spec.loader)) == ("torchvision", repair.RepairingLoader)
    assert spec.submodule_search_locations


@pytest.mark.parametrize(("loads", "declared"), [(True, []), (False, ["torchvision::nms", "torchvision::qnms"])])
def test_operators_are_declared_only_if_the_library_does_not_load(
    repair: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loads: bool, declared: list[str]
) -> None:
    calls: list[tuple[str, str]] = []
    executed: list[str] = []
    package = ModuleType("torchvision")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setattr(torch.library, "define", lambda name, schema: calls.append((name, schema)))
    monkeypatch.setattr(torch.ops, "torchvision", object())
    monkeypatch.setattr(repair, "library_loads", lambda folder: folder == str(tmp_path) and loads)
    monkeypatch.setattr(repair.SourceFileLoader, "exec_module", lambda self, module: executed.append(module.__name__))
    repair.RepairingLoader("torchvision", str(tmp_path / "__init__.py")).exec_module(package)
    assert [name for name, _ in calls] == declared
    assert {schema for _, schema in calls} <= {"(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"}
    assert executed == ["torchvision"]


def test_a_library_that_is_missing_or_broken_does_not_load(repair: ModuleType, tmp_path: Path) -> None:
    assert not repair.library_loads(str(tmp_path))
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert not repair.library_loads(str(tmp_path))


def test_operators_that_exist_are_not_declared_again(repair: ModuleType) -> None:
    import torchvision  # noqa: F401

    repair.declare_operators()  # torch raises if an operator is declared twice
