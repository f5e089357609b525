"""The command line: one file for each verb."""

from __future__ import annotations

import io
import os
import sys
import warnings
from importlib import metadata

import tyro

from deepsquare.cli.bench import bench
from deepsquare.cli.info import info
from deepsquare.cli.report import write_report
from deepsquare.cli.reproduce import reproduce

app = tyro.extras.SubcommandApp()
app.command(info)
app.command(reproduce)
app.command(name="report")(write_report)
app.command(bench)


def _note(message: Warning | str, *_: object, **__: object) -> None:
    print(f"deepsquare: note: {message}", file=sys.stderr)


def _add_commands() -> None:
    """The commands of other files, when they are asked for: the others need not wait for their imports."""
    helping = sys.argv[1:2] in ([], ["--help"], ["-h"])
    if helping or sys.argv[1] in ("export", "predict"):
        from deepsquare.cli.export import export_command
        from deepsquare.cli.predict import predict_command

        app.command(name="export")(export_command)
        app.command(name="predict")(predict_command)
    if helping or sys.argv[1] in ("train", "eval"):
        from deepsquare.cli.eval import evaluation_command
        from deepsquare.cli.train import training_command

        app.command(name="train")(training_command(sys.argv[1:]))
        app.command(name="eval")(evaluation_command)


def main() -> None:
    """Entry point; a caller's mistake ends in one clear line, not in a traceback."""
    warnings.showwarning = _note
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of ASCII shows ? where it has no sign
    if sys.argv[1:] == ["--version"]:
        print(f"deepsquare {metadata.version('deepsquare')}")
        return
    try:
        _add_commands()
        app.cli(prog="deepsquare", description="DeepSquare modules for CNNs.")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: deepsquare info … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, TypeError, OSError, MemoryError) as error:
        print(f"deepsquare: error: {error or 'there is not enough memory; ask for less'}", file=sys.stderr)
        sys.exit(2)
