"""The command ``treenail``: dispatch, and exit codes.

Exit codes: 0 done, 1 failed, 2 used wrongly, 3 done but for a reboot, 4 the node is degraded, 5 the
host can't be managed.
``plan`` has its own, see there.
"""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from typing import cast

from treenail.cli.arguments import FAILED, USAGE, parser
from treenail.errors import TreenailError, UsageError

REBOOT_NEEDED = 3
DEGRADED = 4

Command = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parsed, unknown = parser().parse_known_args(arguments)
    try:
        return _command(parsed.module, unknown)(parsed)
    except UsageError as error:
        return _complain(error, getattr(parsed, "usage_code", USAGE))
    except TreenailError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


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
