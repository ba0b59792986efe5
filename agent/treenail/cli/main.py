"""The command ``treenail``: dispatch and exit codes.

`treenail.cli.output` lists the exit codes.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import cast

from treenail.cli.node.arguments import create_parser
from treenail.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, run_with_output
from treenail.cli.safe_output import guard_output
from treenail.cli.terminal import print_lines
from treenail.errors import HostError, TreenailError, UsageError
from treenail.loading import load_modules

Command = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    with guard_output():
        return run_with_output(lambda: _run_command_line(arguments), _print_error)


def _run_command_line(arguments: list[str] | None) -> int:
    parsed = create_parser().parse_command_line(arguments)
    try:
        return _load_command(parsed.module)(parsed)
    except UsageError as error:
        return _print_error(error, EXIT_USAGE)
    except TreenailError as error:
        return _print_error(error, EXIT_FAILED)
    except MemoryError:
        return _print_error(HostError("the command cannot allocate memory"), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _load_command(module: str) -> Command:
    # Imported late: a command loads only what it uses, and a command whose package is not
    # installed fails with an error instead of a traceback.
    module, _, name = module.partition(":")
    try:
        if module in sys.modules:
            found = sys.modules[module]
        else:
            with load_modules():
                found = import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"cannot run this command: {error.name} is not installed",
            remedy="install the package that contains it",
        ) from error
    return cast("Command", getattr(found, name or "main"))


def _print_error(error: TreenailError, code: int) -> int:
    remedy = error.remedy
    if not remedy and os.geteuid() != 0 and os.strerror(errno.EACCES) in str(error):
        remedy = "run the command as root, for example with sudo"
    lines = [f"treenail: {error}", *([f"  {remedy}"] if remedy else [])]
    # Deeper than the remedy.
    print_lines(lines, sys.stderr, hanging_columns=4)
    return code
