"""Output on a terminal: colours, wrapped lines, times, durations, and the format of help texts."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TextIO

from treenail.cli.safe_output import BOLD, CYAN, GREEN, RED, RESET, YELLOW, has_colours
from treenail.clock import format_rfc3339
from treenail.text_width import measure_text, wrap_words

_DURATION_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_COLOUR_MARKS = {"+": GREEN, "-": RED, "~": YELLOW, "@": CYAN, "!": BOLD}
_EXAMPLES = "examples:\n"
_LABEL_WIDTH = 12
_MIN_TEXT_WIDTH = 24
_DEFAULT_COLUMNS = 80
# Digests and checksums: 12 digits identify an image on a screen; --json has all.
_LONG_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


class Painter:
    """Colour text by its kind: added, removed, changed, position, or strong.

    The result has marks that the guarded standard output replaces, see `safe_output`.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled

    def __call__(self, text: str, kind: str) -> str:
        """Colour ``text`` for the kinds ``+``, ``-``, ``~``, ``@`` and ``!``."""
        mark = _COLOUR_MARKS.get(kind) if self._is_enabled else None
        return f"{mark}{text}{RESET}" if mark and text else text


class HelpFormatter(argparse.HelpFormatter):
    """Wrap descriptions, leave the lines of examples as they are, and align commands."""

    def __init__(self, prog: str) -> None:
        # argparse makes a formatter for each option, also when it prints no help.
        super().__init__(prog, width=_read_columns() - 2)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            # argparse indents the names of commands further than it reserves columns for them.
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


def format_examples(*examples: tuple[str, str]) -> str:
    """Format purposes and command lines as the epilog of a help text."""
    # argparse replaces %(name)s in epilogs.
    lines = (f"  # {purpose}\n  {command}\n" for purpose, command in examples)
    return _EXAMPLES + "".join(lines).replace("%", "%%")


def create_painter(stream: TextIO, environment: Mapping[str, str]) -> Painter:
    """Create a painter with colours for a terminal, unless NO_COLOR or TERM=dumb is set."""
    return Painter(is_enabled=has_colours(stream, environment))


def find_width(stream: TextIO | None) -> int | None:
    """Return the columns of the terminal; None for a pipe or a file, where no line is wrapped."""
    # A process that was started with a closed stream has None, also in sys.stdout.
    is_terminal = stream is not None and stream.isatty()
    return _read_columns() if is_terminal else None


def _read_columns() -> int:
    """Return what ``shutil.get_terminal_size`` does, without its imports of archive formats."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        descriptor = sys.__stdout__.fileno() if sys.__stdout__ else -1
        return os.get_terminal_size(descriptor).columns or _DEFAULT_COLUMNS
    except (ValueError, OSError):  # a closed stream, or no terminal
        return _DEFAULT_COLUMNS


def wrap_text(
    text: str, width: int | None, *, indent: str = "", hanging: str | None = None
) -> Iterator[str]:
    """Yield ``text`` as lines of at most ``width`` columns; ``hanging`` indents all but the first.

    Spaces and newlines in the text become one space. Words are not broken; digests and checksums
    are shortened when the text does not fit.
    """
    line = " ".join(text.split())
    if width is None or measure_text(indent) + measure_text(line) <= width:
        yield f"{indent}{line}"
        return
    hanging = indent if hanging is None else hanging
    width = max(width, len(hanging) + _MIN_TEXT_WIDTH)
    yield from wrap_words(_LONG_DIGEST.sub(r"\1…", line), width, indent=indent, hanging=hanging)


class VerbatimLine(str):
    """A line of a diff: `print_lines` does not wrap it."""

    __slots__ = ()


def print_lines(
    lines: Iterable[str], stream: TextIO | None = None, *, hanging_columns: int = 2
) -> None:
    """Print lines (default: to standard output), wrapped on a terminal below their own indent."""
    stream = stream or sys.stdout
    width = find_width(stream)
    for line in lines:
        shown = (
            [line]
            if isinstance(line, VerbatimLine)
            else wrap_line(line, width, hanging_columns=hanging_columns)
        )
        for each in shown:
            print(each, file=stream)


def wrap_line(line: str, width: int | None, *, hanging_columns: int = 2) -> Iterator[str]:
    """Yield the line as lines of at most ``width`` columns, further ones with more indent.

    Unlike `wrap_text` it keeps the spaces of the line. A newline in it becomes a space.
    """
    line = line.replace("\n", " ")
    if width is not None and measure_text(line) > width:
        line = _LONG_DIGEST.sub(r"\1…", line)
    if width is None or measure_text(line) <= width:
        yield line
        return
    hanging = " " * (len(line) - len(line.lstrip(" ")) + hanging_columns)
    yield from wrap_words(line, max(width, len(hanging) + _MIN_TEXT_WIDTH), hanging=hanging)


def format_labelled(label: str, text: str, width: int | None) -> Iterator[str]:
    """Yield ``text`` behind its label, wrapped in a column of its own."""
    lead = f"{label:<{_LABEL_WIDTH}} "
    yield from wrap_text(text, width, indent=lead, hanging=" " * len(lead))


def format_time(seconds: float) -> str:
    """Format seconds since the epoch as ``2026-01-31 12:00:00 UTC``."""
    return format_rfc3339(seconds).replace("T", " ").replace("Z", " UTC")


def format_duration(seconds: float) -> str:
    """Format a duration as ``45 s``, ``4 min 12 s``, ``1 h 3 min`` or ``2 d 4 h``."""
    whole = round(seconds)
    for (unit, size), (below, part) in pairwise(_DURATION_UNITS):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
