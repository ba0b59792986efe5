"""Exit codes of the commands, and their standard output.

0, 2 and 3 describe a state, and are equal in all commands. Every other code is an error: a script
that waits while the code is 2 must not wait because of a misspelt option, so that usage errors have
the code of sysexits.h instead of 2. Section EXIT STATUS of treenail(8) documents all of them.
"""

import errno
import os
import sys
from collections.abc import Callable

from treenail.errors import HostError, TreenailError

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
    run: Callable[[], int], print_error: Callable[[TreenailError, int], int]
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
        return print_error(HostError(f"cannot write the output: {error.strerror}"), EXIT_FAILED)


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
