"""Output on a terminal: colours, times, durations, and the format of help texts."""

import argparse
from collections.abc import Mapping
from itertools import pairwise
from typing import TextIO

from treenail.clock import format_rfc3339

_DURATION_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_RESET = "\x1b[0m"
_COLOUR_CODES = {"+": "\x1b[32m", "-": "\x1b[31m", "~": "\x1b[33m", "@": "\x1b[36m", "!": "\x1b[1m"}
_EXAMPLES = "examples:\n"


class Painter:
    """Colour text by its kind: added, removed, changed, position, or strong."""

    def __init__(self, *, has_colours: bool) -> None:
        self._has_colours = has_colours

    def __call__(self, text: str, kind: str) -> str:
        """Colour ``text`` for the kinds ``+``, ``-``, ``~``, ``@`` and ``!``."""
        code = _COLOUR_CODES.get(kind) if self._has_colours else None
        return f"{code}{text}{_RESET}" if code and text else text


class HelpFormatter(argparse.HelpFormatter):
    """Wrap descriptions, and leave the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


def format_examples(*examples: tuple[str, str]) -> str:
    """Format purposes and command lines as the epilog of a help text."""
    # argparse replaces %(name)s in epilogs.
    lines = (f"  # {purpose}\n  {command}\n" for purpose, command in examples)
    return _EXAMPLES + "".join(lines).replace("%", "%%")


def create_painter(stream: TextIO, environment: Mapping[str, str]) -> Painter:
    """Create a painter with colours for a terminal, unless NO_COLOR or TERM=dumb is set."""
    wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return Painter(has_colours=wanted and stream.isatty())


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
