"""What people read: colours where they are wanted, times and durations in words."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TextIO

from treenail.clock import rfc3339

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_RESET = "\x1b[0m"
_CODES = {"+": "\x1b[32m", "-": "\x1b[31m", "~": "\x1b[33m", "@": "\x1b[36m", "!": "\x1b[1m"}


class Paint:
    """Text in the colour of what it says: added, removed, changed, where; or strong."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours

    def __call__(self, text: str, kind: str) -> str:
        """``kind`` is ``+``, ``-``, ``~``, ``@`` or ``!``; any other is left as it is."""
        code = _CODES.get(kind) if self._colours else None
        return f"{code}{text}{_RESET}" if code and text else text


def paint(stream: TextIO, environment: Mapping[str, str]) -> Paint:
    """Colours on a terminal that has them, unless NO_COLOR says otherwise."""
    wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return Paint(colours=wanted and stream.isatty())


def moment(seconds: float) -> str:
    """Seconds since the epoch as ``2026-01-31 12:00:00 UTC``."""
    return rfc3339(seconds).replace("T", " ").replace("Z", " UTC")


def duration(seconds: float) -> str:
    """``45 s``, ``4 min 12 s``, ``1 h 3 min``, ``2 d 4 h``."""
    whole = round(seconds)
    for (unit, size), (below, part) in pairwise(_UNITS):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
