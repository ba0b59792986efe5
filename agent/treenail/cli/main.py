"""The command ``treenail``: dispatch, and exit codes.

Exit codes: 0 done, 1 failed, 2 used wrongly, 3 done but for a reboot, 4 the node is degraded, 5 the
host can't be managed, 141 who read the output went away (as of a process that SIGPIPE ends).
``plan`` has its own, see there.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import cast

from treenail.cli.node.arguments import FAILED, USAGE, parser
from treenail.errors import HostError, TreenailError, UsageError

REBOOT_NEEDED = 3
DEGRADED = 4
_PIPE_CLOSED = 141
# Errors of adapters never get here, and those of files name theirs.
_UNWRITTEN = frozenset({errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO})

Command = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parsed, unknown = parser().parse_known_args(arguments)
    try:
        code = _carried_out(parsed, unknown)
        flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITTEN:
            raise
        _give_up_output()
        if isinstance(error, BrokenPipeError):
            return _PIPE_CLOSED
        return _complain(HostError(f"can't write the output: {error.strerror}"), FAILED)
    return code


def flush() -> None:
    """Have written what was printed; raises `OSError`."""
    # There is none where the process was started without.
    if sys.stdout is not None:
        sys.stdout.flush()


def _carried_out(parsed: argparse.Namespace, unknown: list[str]) -> int:
    try:
        return _command(parsed.module, unknown)(parsed)
    except UsageError as error:
        return _complain(error, getattr(parsed, "usage_code", USAGE))
    except TreenailError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return 130


def _give_up_output() -> None:
    """Have what is left of it go nowhere: the interpreter tries again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _command(module: str, unknown: list[str]) -> Command:
    if unknown:
        raise UsageError(f"unknown arguments: {' '.join(unknown)}")
    # Imported when called for, so that a command needs only what it uses, and one whose
    # package is not installed says so instead of failing with a traceback.
    module, _, name = module.partition(":")
    try:
        return cast("Command", getattr(import_module(module), name or "main"))
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this command needs {error.name}, which is not installed",
            remedy="install the package that holds it",
        ) from error


def _complain(error: TreenailError, code: int) -> int:
    print(f"treenail: {error}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)
    return code
