"""Colours, where a person looks and wants them."""

from collections.abc import Mapping
from typing import TextIO

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
