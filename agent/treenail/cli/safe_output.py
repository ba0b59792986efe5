"""Standard output and error of the commands, without control characters from outside.

Annotations, paths of configs, reasons and output of other programs reach the terminal of an
administrator. A terminal obeys escape sequences in them, and displays bidirectional controls in an
order that misleads. Both streams therefore print such characters as escapes. Only `Painter` may
colour text: it marks it with noncharacters, which Unicode reserves for use inside a program.
"""

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from treenail.escape import escape_text

STYLES: Mapping[str, str] = {
    "\ufdd0": "\x1b[32m",
    "\ufdd1": "\x1b[31m",
    "\ufdd2": "\x1b[33m",
    "\ufdd3": "\x1b[36m",
    "\ufdd4": "\x1b[1m",
    "\ufdd5": "\x1b[0m",
}
"""Marks of colours, and the sequences that a terminal gets for them."""
GREEN, RED, YELLOW, CYAN, BOLD, RESET = STYLES


def has_colours(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether the stream is a terminal, unless NO_COLOR or TERM=dumb is set."""
    wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return wanted and stream.isatty()


@contextmanager
def guard_output() -> Iterator[None]:
    """Escape what this process prints to its standard output and error, until the end."""
    streams = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as devnull:
        # A process that was started with a closed stream has None.
        sys.stdout, sys.stderr = (
            cast("TextIO", GuardedStream(devnull if each is None else each)) for each in streams
        )
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams


class GuardedStream(io.TextIOBase):
    """A text stream that escapes what it is given, see `escape_text`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._styles = STYLES if has_colours(stream, os.environ) else None

    @property
    def buffer(self) -> BinaryIO:
        """The stream of bytes, for archives."""
        return self._stream.buffer

    @property
    def unguarded(self) -> TextIO:
        """The stream itself, for the cursor movements of a live table."""
        return self._stream

    def write(self, text: str) -> int:
        self._stream.write(escape_text(text, styles=self._styles))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def close(self) -> None:
        """Keep the stream open: it belongs to the process."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True
