"""Output on a terminal: colours, wrapped lines, times, durations, and the format of help texts.

East Asian characters take two columns, combining characters none. Text is escaped before it is
measured: it has no control and no format characters.
"""

import argparse
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TextIO

from treenail.cli import output
from treenail.clocks import format_rfc3339

_DURATION_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_COLOUR_MARKS = {
    "+": output.GREEN,
    "-": output.RED,
    "~": output.YELLOW,
    "@": output.CYAN,
    "!": output.BOLD,
}
_EXAMPLES = "examples:\n"
_LABEL_WIDTH = 12
_MIN_TEXT_WIDTH = 24
_DEFAULT_COLUMNS = 80
# Digests and checksums: 12 digits identify an image on a screen; --json has all.
_LONG_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


class Painter:
    """Colour text by its kind: added, removed, changed, position, or strong.

    The result has marks that the guarded standard output replaces, see `treenail.cli.output`.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled

    def __call__(self, text: str, kind: str) -> str:
        """Colour ``text`` for the kinds ``+``, ``-``, ``~``, ``@`` and ``!``."""
        mark = _COLOUR_MARKS.get(kind) if self._is_enabled else None
        return f"{mark}{text}{output.RESET}" if mark and text else text


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
    return Painter(is_enabled=output.has_colours(stream, environment))


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
        for shown_line in shown:
            print(shown_line, file=stream)


def print_error(program: str, error: object, remedy: str = "") -> None:
    """Print an error, and below it the remedy, to standard error."""
    lines = [f"{program}: {error}", *([f"  {remedy}"] if remedy else [])]
    # Deeper than the remedy.
    print_lines(lines, sys.stderr, hanging_columns=4)


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


_EMOJI_STYLE = "\ufe0f"
_CONJOINING_JAMO = range(0x1160, 0x1200)
"""Vowels and final consonants, which a terminal joins with the Hangul character before them."""
_WORDS = re.compile(r"\s+|\S+")


def measure_text(text: str) -> int:
    """Return the columns of one line of text."""
    if text.isascii():
        return len(text)
    return sum(columns for _, columns in _iter_columns(text))


def cut_text(text: str, limit: int) -> str:
    """Return the beginning of the text that fits into ``limit`` columns."""
    used, end = 0, 0
    for char, columns in _iter_columns(text):
        used += columns
        if used > limit:
            break
        end += len(char)
    return text[:end]


def shorten_text(text: str, limit: int) -> str:
    """Return the text with at most ``limit`` columns; an ellipsis shows that it is longer."""
    return text if measure_text(text) <= limit else f"{cut_text(text, limit - 1)}…"


def shorten_middle(text: str, limit: int) -> str:
    """Return the text with at most ``limit`` columns; an ellipsis replaces its middle."""
    if measure_text(text) <= limit:
        return text
    half = (limit - 1) // 2
    begin = len(text)
    while measure_text(text[begin - 1 :]) <= half:
        begin -= 1
    return f"{cut_text(text, half)}…{text[begin:]}"


def pad_text(text: str, columns: int) -> str:
    """Return the text with spaces behind it, up to this many columns."""
    return text + " " * (columns - measure_text(text))


def wrap_words(text: str, width: int, *, indent: str = "", hanging: str = "") -> Iterator[str]:
    """Yield the text as lines of at most ``width`` columns; ``hanging`` indents all but the first.

    It keeps the spaces between the words of a line. Words without East Asian characters, such as
    a path, are never broken.
    """
    line, used, spaces, is_first = indent, measure_text(indent), "", True
    for match in _WORDS.finditer(text):
        if match[0].isspace():
            spaces = match[0]
            continue
        for part in _split_word(match[0], width - measure_text(hanging)):
            columns = measure_text(part)
            if not is_first and used + len(spaces) + columns > width:
                yield line
                line, used, spaces = hanging, measure_text(hanging), ""
            line += spaces + part
            used += len(spaces) + columns
            spaces, is_first = "", False
    if not is_first:
        yield line


def _split_word(word: str, width: int) -> Iterator[str]:
    """Yield a word in parts that fit, if it is of a script without spaces."""
    while measure_text(word) > width and any(
        unicodedata.east_asian_width(char) in "WF" for char in word
    ):
        part = cut_text(word, max(width, 2))
        yield part
        word = word[len(part) :]
    if word:
        yield word


def _iter_columns(text: str) -> Iterator[tuple[str, int]]:
    """Yield each character and its columns."""
    before = 0
    for char in text:
        columns = _measure_character(char)
        if char == _EMOJI_STYLE and before == 1:
            # It asks for the picture of a symbol, which many terminals draw twice as wide.
            columns = 1
        before = columns or before
        yield char, columns


def _measure_character(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me") or ord(char) in _CONJOINING_JAMO:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
