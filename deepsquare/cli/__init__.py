"""The command line: one file per verb, one parser for all of them."""

import contextlib
import difflib
import functools
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata

import tyro

from deepsquare._files import explain_full
from deepsquare._memory import explain_memory
from deepsquare._terminal import printable_lines
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
    verbs: dict[str, Callable[..., None]] = {"info": info_command, "train": train_command, "eval": eval_command}
    verbs |= {"export": export_command, "predict": predict_command}
    groups = {"reproduce": reproduce.commands(), "bench": bench.commands()}
    verb, name, *_ = [*(sys.argv[1:] if args is None else args), "", ""]
    for word, names in ((verb, [*verbs, *groups, "report", "help"]), (name, groups.get(verb, ()))):
        nearest = difflib.get_close_matches(word, names, n=1)
        if nearest and nearest != [word] and not word.startswith("-"):  # tyro answers what resembles no subcommand
            raise ValueError(f"no subcommand is called {word!r}; did you mean {nearest[0]}? All: {', '.join(names)}")
    refusal = io.StringIO()
    with contextlib.ExitStack() as parsing:
        app = _group(verbs, parsing)
        for group, module in (("reproduce", reproduce), ("bench", bench)):
            app.command(_group(groups[group], parsing), name=group, help=module.__doc__)
        app.command(name="report")(_called_after(parsing, report_command))
        app.command(name="help", is_default=True)(_called_after(parsing, help_command))
        parsing.enter_context(contextlib.redirect_stderr(refusal))
        try:
            app.cli(prog="deepsquare", description="DeepSquare modules for CNNs.", args=args)
        except SystemExit as end:
            if end.code and refusal.getvalue():
                raise ValueError(_in_one_line(refusal.getvalue())) from None
            raise


def _group(commands: dict[str, Callable[..., None]], parsing: contextlib.ExitStack) -> tyro.extras.SubcommandApp:
    group = tyro.extras.SubcommandApp()
    for name, command in commands.items():
        group.command(name=name)(_called_after(parsing, command))
    return group


def _called_after(parsing: contextlib.ExitStack, command: Callable[..., None]) -> Callable[..., None]:
    """The command, which closes ``parsing`` first: what it prints is its own."""

    @functools.wraps(command)
    def call(*args: object, **kwargs: object) -> None:
        parsing.close()
        command(*args, **kwargs)

    return call


def _in_one_line(box: str) -> str:
    """What tyro says of arguments that it refuses, in a box of several lines and with what else it has to say."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    first, *others = map(str.strip, re.split(r"─{4,}", " ".join(filter(None, lines))))
    said = [first, *(section for section in others if section.startswith("Available subcommands"))]
    usage = re.search(r"(?:run|see):? *(deepsquare.*--help)", " ".join(others))
    text = re.sub(r" Arguments are applied to the [^;]*", "", "; ".join(said))
    return f"{text.rstrip('.')}; see {usage[1] if usage else 'deepsquare --help'}"


class _Formatter(logging.Formatter):
    """The message, as the handler of last resort prints it, without what a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def _print_note(message: Warning | str, *_: object, **__: object) -> None:
    print(f"deepsquare: note: {printable_lines(str(message))}", file=sys.stderr)


def main() -> None:
    """Entry point; a caller's mistake ends in one clear line, not in a traceback."""
    warnings.showwarning = _print_note
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for a character that it lacks
    try:
        hint = "reduce the batch or input size, or run less at the same time"
        with explain_memory("this command", hint), explain_full("the output"):
            _run()
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: deepsquare info … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, TypeError, OSError, MemoryError) as error:
        message = str(error) or repr(error)
        message = message.replace("input_shape=(channels, height, width)", "--input-shape CHANNELS HEIGHT WIDTH")
        print(f"deepsquare: error: {printable_lines(message)}", file=sys.stderr)
        sys.exit(2)
