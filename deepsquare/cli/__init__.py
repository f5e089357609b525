"""The command line: one file per verb, one parser for all of them."""

import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata

import tyro

from deepsquare.cli import bench, reproduce
from deepsquare.cli.eval import eval_command
from deepsquare.cli.export import export_command
from deepsquare.cli.info import info_command
from deepsquare.cli.predict import predict_command
from deepsquare.cli.report import report_command
from deepsquare.cli.train import train_command


def help_command(*, version: tyro.conf.FlagCreatePairsOff[bool] = False) -> None:
    """Show this help; with --version, the version.

    Args:
        version: Show the version instead.
    """
    if version:
        print(f"deepsquare {metadata.version('deepsquare')}")
    else:
        _run(["--help"])


def _run(args: Sequence[str] | None = None) -> None:
    """Parse the arguments and call the verb that they name; without a verb, show the help."""
    app = tyro.extras.SubcommandApp()
    app.command(name="info")(info_command)
    app.command(name="train")(train_command)
    app.command(name="eval")(eval_command)
    app.command(name="export")(export_command)
    app.command(name="predict")(predict_command)
    app.command(_group(reproduce.commands()), name="reproduce", help=reproduce.__doc__)
    app.command(_group(bench.commands()), name="bench", help=bench.__doc__)
    app.command(name="report")(report_command)
    app.command(name="help", is_default=True)(help_command)
    app.cli(prog="deepsquare", description="DeepSquare modules for CNNs.", args=args)


def _group(commands: dict[str, Callable[..., None]]) -> tyro.extras.SubcommandApp:
    group = tyro.extras.SubcommandApp()
    for name, command in commands.items():
        group.command(name=name)(command)
    return group


def main() -> None:
    """Entry point; a caller's mistake ends in one clear line, not in a traceback."""
    warnings.showwarning = lambda message, *_, **__: print(f"deepsquare: note: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for a character that it lacks
    try:
        _run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: deepsquare info … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, TypeError, OSError, MemoryError) as error:
        message = str(error) or "not enough memory; reduce the batch or input size"
        message = message.replace("input_shape=(channels, height, width)", "--input-shape CHANNELS HEIGHT WIDTH")
        print(f"deepsquare: error: {message}", file=sys.stderr)
        sys.exit(2)
