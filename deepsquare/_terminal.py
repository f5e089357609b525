"""Text on a terminal, which obeys what the names of files and classes may contain."""

import re
import sys
from typing import TextIO

# ESC and other control characters move the cursor, color, clear or type; marks of direction reorder what one reads, and
# separators end a line; a surrogate stands for a byte of a file name that is not in UTF-8.
UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with unsafe characters as in Python's strings: ``\x1b`` for ESC; all scripts and emoji stay."""
    return UNSAFE.sub(lambda unsafe: unsafe[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which stay."""
    return "\n".join(map(printable, text.split("\n")))


def show(*lines: object, file: TextIO | None = None) -> None:
    """Print lines that may contain names, on stdout by default."""
    print(*(printable(str(line)) for line in lines), sep="\n", file=file or sys.stdout)
