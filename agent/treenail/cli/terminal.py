"""What people read: colours where they are wanted, times and durations in words."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TextIO

from treenail.clock import format_rfc3339

_DURATION_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_RESET = "\x1b[0m"
_COLOUR_CODES = {"+": "\x1b[32m", "-": "\x1b[31m", "~": "\x1b[33m", "@": "\x1b[36m", "!": "\x1b[1m"}


class Painter:
    """Text in the colour of what it says: added, removed, changed, where; or strong."""

    def __init__(self, *, has_colours: bool) -> None:
        self._has_colours = has_colours

    def __call__(self, text: str, kind: str) -> str:
        """``kind`` is ``+``, ``-``, ``~``, ``@`` or ``!``; any other is left as it is."""
        code = _COLOUR_CODES.get(kind) if self._has_colours else None
        return f"{code}{text}{_RESET}" if code and text else text


def create_painter(stream: TextIO, environment: Mapping[str, str]) -> Painter:
    """Colours on a terminal that has them, unless NO_COLOR says otherwise."""
    wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return Painter(has_colours=wanted and stream.isatty())


def format_time(seconds: float) -> str:
    """Seconds since the epoch as ``2026-01-31 12:00:00 UTC``."""
    return format_rfc3339(seconds).replace("T", " ").replace("Z", " UTC")


def format_duration(seconds: float) -> str:
    """``45 s``, ``4 min 12 s``, ``1 h 3 min``, ``2 d 4 h``."""
    whole = round(seconds)
    for (unit, size), (below, part) in pairwise(_DURATION_UNITS):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
