"""One target in one process: mutated by Atheris, or each of the given files once.

``python -m fuzz.one TARGET [libFuzzer's options] CORPUS`` searches; ``python -m fuzz.one --replay FILE …`` runs the
files, each in the folder of its target, and prints one line for each.
"""

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 10, 6 * 2**30  # of one case: time, and the address space of the process

# The mutations that reach new lines of these are kept and mutated further.
INSTRUMENTED = (
    "deepsquare.checkpoint", "deepsquare.data", "deepsquare.preprocessing", "deepsquare.results",
    "deepsquare.surgery.spec", "deepsquare.training.loop", "tarfile",
)  # fmt: skip


def main(name: str, *arguments: str) -> None:
    if name == "--replay":
        replay([Path(file) for file in arguments])
    else:
        search(name, arguments)


def replay(files: list[Path]) -> None:
    """Run each file; the first that breaks ends the process: by its error, by SIGALRM, or by the signal it caused."""
    from fuzz.targets import check

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for file in files:
        print(f"{file.parent.name}/{file.name}", end=": ", flush=True)
        signal.alarm(SECONDS)
        print(check(file.parent.name, file.read_bytes()), flush=True)
        signal.alarm(0)


def search(name: str, arguments: tuple[str, ...]) -> None:
    """Run mutations until the time is over or one breaks; their number is in the file that FUZZ_COUNT names."""
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from fuzz import containers, targets
    target = targets.TARGETS[name]
    container = containers.CONTAINERS.get(target.container)
    count = Path(os.environ["FUZZ_COUNT"])

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if target.words and draw.random() < 0.2:
            at = draw.randrange(len(data) + 1)
            return (data[:at] + draw.choice(target.words).encode() + data[at + draw.choice((0, 0, 4)) :])[:most]
        if container and draw.random() < 0.7:
            try:
                parts = container.unpack(data)
                if parts:
                    number = draw.randrange(len(parts))
                    changed: bytes = atheris.Mutate(parts[number], len(parts[number]) + 64)
                    return container.pack([*parts[:number], changed, *parts[number + 1 :]])[:most]
            except ValueError:
                pass
        mutated: bytes = atheris.Mutate(data, most)
        return mutated

    runs, last = 0, 0.0

    def once(data: bytes) -> None:
        nonlocal runs, last
        runs += 1
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            count.write_text(str(runs))
        targets.check(name, data)

    corpus = next(Path(argument) for argument in arguments if not argument.startswith("-"))
    targets.check(name, (corpus / "seed0").read_bytes())  # imports what a case needs, which is no part of its time
    options: Any = {} if name == "functions" else {"custom_mutator": mutate}
    atheris.Setup([sys.argv[0], *arguments], once, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
