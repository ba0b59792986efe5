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

from treenail.cli.node.arguments import EXIT_FAILED, EXIT_USAGE, create_parser
from treenail.errors import HostError, TreenailError, UsageError

EXIT_REBOOT_NEEDED = 3
EXIT_DEGRADED = 4
_EXIT_PIPE_CLOSED = 141
# Errors of adapters never get here, and those of files name theirs.
_OUTPUT_ERRNOS = frozenset({errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO})

Command = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parsed, unknown = create_parser().parse_known_args(arguments)
    try:
        code = _run_command(parsed, unknown)
        flush_output()
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRNOS:
            raise
        _discard_output()
        if isinstance(error, BrokenPipeError):
            return _EXIT_PIPE_CLOSED
        return _print_error(HostError(f"can't write the output: {error.strerror}"), EXIT_FAILED)
    return code


def flush_output() -> None:
    """Have written what was printed; raises `OSError`."""
    # There is none where the process was started without.
    if sys.stdout is not None:
        sys.stdout.flush()


def _run_command(parsed: argparse.Namespace, unknown: list[str]) -> int:
    try:
        return _load_command(parsed.module, unknown)(parsed)
    except UsageError as error:
        return _print_error(error, getattr(parsed, "usage_code", EXIT_USAGE))
    except TreenailError as error:
        return _print_error(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130


def _discard_output() -> None:
    """Have what is left of it go nowhere: the interpreter tries again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _load_command(module: str, unknown: list[str]) -> Command:
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


def _print_error(error: TreenailError, code: int) -> int:
    print(f"treenail: {error}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)
    return code
