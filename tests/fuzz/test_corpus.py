"""What the search found before stays mended, and the search notices what it should."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuzz.containers import CONTAINERS
from fuzz.functions import FUNCTIONS, check_functions
from fuzz.targets import TARGETS, FindingError, Target, check

CORPUS = Path(__file__).parent / "corpus"
EXPORTED = ("onnx", "executorch")  # whose seeds take seconds to write


def test_cases_from_before_are_read_or_refused_in_one_line() -> None:
    cases = sorted(path for path in CORPUS.glob("*/*") if path.parent.name in TARGETS)
    assert len(cases) == sum(1 for path in CORPUS.rglob("*") if path.is_file())
    command = [sys.executable, "-m", "fuzz.one", "--replay", *map(str, cases)]
    done = subprocess.run(command, cwd=CORPUS.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(cases)


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in EXPORTED])
def test_seeds_are_valid(name: str) -> None:
    seeds = list(TARGETS[name].seeds())
    assert seeds
    container = CONTAINERS.get(TARGETS[name].container)
    for seed in seeds:
        assert check(name, seed) == "read"
        if container and (name != "image" or seed.startswith(b"\x89PNG")) and not seed.startswith(b"\x80"):
            assert check(name, container.pack(container.unpack(seed))) == "read"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("name"), "KeyError"),
        (ValueError("of another library"), "ValueError of .*test_corpus.py"),
        (OSError(""), "not one clear line"),
        (OSError("two\nlines"), "not one clear line"),
    ],
)
def test_what_is_a_finding(error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes, folder: Path) -> None:
        raise error

    monkeypatch.setitem(TARGETS, "broken", Target(read, lambda: []))
    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            check("broken", b"")
    else:
        with pytest.raises(FindingError, match=expected):
            check("broken", b"")


@pytest.mark.parametrize("name", ["square_pooling", "excitation", "block_end"])
def test_a_wrong_function_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FUNCTIONS[name]

    def wrong(*given: Tensor) -> Tensor:
        return right(*given) * (1 + 0.05 * (given[0].dtype != torch.float64))

    monkeypatch.setattr("fuzz.functions.FUNCTIONS", {name: wrong})

    def search() -> None:
        for number in range(20):
            check_functions(bytes([number]))

    with pytest.raises(AssertionError, match=name):
        search()
