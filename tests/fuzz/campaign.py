"""The search over all targets: ``make fuzz``, or with options ``make fuzz FUZZ="--minutes 60 --seed 7"``.

Each target runs under Atheris in a process of its own, with a limit of time and memory for a case. A case that breaks
is kept in ``--output`` with what it printed, and the target goes on with another seed. The last lines count what was
found; the exit code is 1 if there was anything.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.one import SECONDS
from fuzz.targets import TARGETS

CORPUS, TESTS = Path(__file__).parent / "corpus", Path(__file__).parent.parent
MEMORY = 4096  # MB of a case and the process around it
LARGEST = 2**20  # bytes of a case
KINDS = {"crash": "tracebacks", "timeout": "hangs", "slow": "slow", "oom": "out of memory", "abort": "aborts"}


@dataclass
class Outcome:
    """What the search of a target found."""

    cases: int = 0
    seconds: float = 0.0
    found: Counter[str] = field(default_factory=Counter)


def write_seeds(name: str, corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed{number}").write_bytes(data)


def search(name: str, seconds: float, seed: int, folder: Path) -> Outcome:
    """Search a target for ``seconds``, in as many processes as it breaks."""
    outcome, start = Outcome(), time.monotonic()
    draw = random.Random(f"{seed} {name}")
    while (left := seconds - (time.monotonic() - start)) > 1:
        before = outcome.found.total()
        outcome.cases += run(name, left, draw.randrange(1, 2**31), folder, outcome.found)
        if before and outcome.found.total() == before:
            break  # a case from before again, which breaks before anything else is tried
    outcome.seconds = time.monotonic() - start
    return outcome


def run(name: str, seconds: float, seed: int, folder: Path, found: Counter[str]) -> int:
    """One process, until it breaks or the time is over; the number of cases."""
    count = folder / "count"
    count.write_text("0")
    known, start = set(folder.iterdir()), time.time()
    options: dict[str, int | str] = {
        "max_total_time": max(1, round(seconds)),
        "seed": seed,
        "timeout": SECONDS,
        "rss_limit_mb": MEMORY,
    }
    options |= {"artifact_prefix": f"{folder}/", "max_len": LARGEST, "verbosity": 0}
    paths = [folder / "corpus", *([CORPUS / name] if (CORPUS / name).is_dir() else [])]
    command = [sys.executable, "-m", "fuzz.one", name, *(f"-{key}={value}" for key, value in options.items())]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path[1:]),
        "FUZZ_COUNT": str(count),
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [*command, *map(str, paths)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    printed = done.stdout.decode(errors="replace")
    cases = {path for path in folder.iterdir() if path.name.partition("-")[0] in KINDS and not path.suffix}
    written = {case for case in cases if case.stat().st_mtime >= start - 1}  # the clock of files is coarser
    for case in written - known:
        kind = case.name.partition("-")[0]
        python = "Uncaught Python exception" in printed
        found[KINDS[kind if kind != "crash" or python else "abort"]] += 1
        case.with_name(f"{case.name}.txt").write_text(printed, encoding="utf-8")
    if done.returncode and not written and "Uncaught Python exception" in printed:  # killed before it was written
        found[KINDS["crash"]] += 1
        (folder / f"crash-{found.total()}-not-written.txt").write_text(printed, encoding="utf-8")
    elif done.returncode and not written:
        raise RuntimeError(f"{name} ended with {done.returncode} and without a case:\n{printed[-3000:]}")
    return int(count.read_text() or 0)


def last_line(printed: str) -> str:
    """The error that ended a process."""
    lines = [line for line in printed.splitlines() if re.match(r"[\w.]*(Error|Exception)\b|==\d+== ", line)]
    return (lines or printed.splitlines() or ["?"])[0][:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5, help="of the whole search, on all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--output", type=Path, default=Path("out/fuzz"))
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    each = 60 * given.minutes * min(cores, len(given.targets)) / len(given.targets)
    output = given.output / f"seed{given.seed}"
    for name in given.targets:
        write_seeds(name, output / name / "corpus")
    with ThreadPoolExecutor(cores) as pool:
        searches = {name: pool.submit(search, name, each, given.seed, output / name) for name in given.targets}
        outcomes = {name: future.result() for name, future in searches.items()}
    print(f"{'target':12} {'cases':>9} {'seconds':>8}  " + "  ".join(f"{kind:>13}" for kind in KINDS.values()))
    for name, outcome in outcomes.items():
        counts = "  ".join(f"{outcome.found[kind]:13}" for kind in KINDS.values())
        print(f"{name:12} {outcome.cases:9,} {outcome.seconds:8.0f}  {counts}")
    texts = sorted(output.glob("*/*.txt"))
    for text in texts:
        print(f"{text.with_suffix('')}: {last_line(text.read_text(encoding='utf-8'))}")
    if texts:
        print("Run a case again: PYTHONPATH=tests .venv/bin/python -m fuzz.one --replay FILE")
    sys.exit(bool(texts))


if __name__ == "__main__":
    main()
