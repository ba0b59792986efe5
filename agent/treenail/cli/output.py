"""Exit codes of the commands, and their standard output and error.

0, 2 and 3 describe a state, and are equal in all commands. Every other code is an error: a script
that waits while the code is 2 must not wait because of a misspelt option, so that usage errors have
the code of sysexits.h instead of 2. Section EXIT STATUS of treenail(8) documents all of them.

Annotations, paths of configs, reasons and output of other programs reach the terminal of an
administrator. A terminal obeys escape sequences in them, and displays bidirectional controls in an
order that misleads. Both streams therefore print such characters as escapes. Only `Painter` may
colour text: it marks it with noncharacters, which Unicode reserves for use inside a program.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from treenail import errors, sanitize

EXIT_AT_TARGET = 0
EXIT_FAILED = 1
EXIT_PENDING = 2
"""Not at the target yet, and no user or reboot is needed."""
EXIT_ATTENTION = 3
"""Degraded, halted, drifted, or a reboot is needed: only a user, or a reboot, changes that."""
EXIT_UNMANAGEABLE = 5
"""treenail cannot manage this host; a restart does not change that."""
EXIT_INSTALL_FAILED = 5
"""The installation failed; a restart does not change that."""
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130
_EXIT_PIPE_CLOSED = 141
# Errors of writing the output have no filename; adapters raise TreenailError instead of OSError.
_OUTPUT_ERRNOS = frozenset({errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO})


def run_with_output(
    run: Callable[[], int], print_error: Callable[[errors.TreenailError, int], int]
) -> int:
    """Run a command and write its output; return the exit code, also if it cannot be written."""
    try:
        try:
            return run()
        finally:
            # argparse prints the help and the version, and raises SystemExit.
            flush_output()
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRNOS:
            raise
        _discard_output()
        if isinstance(error, BrokenPipeError):
            return _EXIT_PIPE_CLOSED
        return print_error(
            errors.HostError(f"cannot write the output: {error.strerror}"), EXIT_FAILED
        )


def flush_output() -> None:
    """Write the buffered output; raise `OSError` if that fails."""
    # sys.stdout is None in a process that was started with a closed standard output.
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_output() -> None:
    """Redirect the output to /dev/null: the interpreter flushes the rest when it exits."""
    devnull = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


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
            cast("TextIO", GuardedStream(devnull if stream is None else stream))
            for stream in streams
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
        self._stream.write(sanitize.escape_text(text, styles=self._styles))
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
