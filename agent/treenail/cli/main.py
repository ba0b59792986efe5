"""The command ``treenail``: arguments, dispatch, exit codes.

Exit codes: 0 done, 1 failed, 2 used wrongly, 3 done but for a reboot, 4 the node is degraded.
"""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from typing import cast

from treenail import __version__
from treenail.errors import TreenailError, UsageError

FAILED = 1
USAGE = 2
REBOOT_NEEDED = 3
DEGRADED = 4

Command = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        return _command(parsed.module)(parsed)
    except UsageError as error:
        return _complain(error, USAGE)
    except TreenailError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treenail",
        description="Keeps this node at the OS image and the configuration its cluster asks for.",
    )
    parser.add_argument("--version", action="version", version=f"treenail {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="be the node's agent", description="Be the node's agent.")
    run.set_defaults(module="treenail.cli.agent")
    _where(run)
    run.add_argument("--node-name", metavar="NAME", help="the Node's name (the host's, lower case)")
    run.add_argument(
        "--kubeconfig", metavar="FILE", help="how to reach the API server, and as whom"
    )

    status = commands.add_parser(
        "status",
        help="show what the node has, wants and does",
        description="Show what the node has, wants and does; works with the API server away.",
    )
    status.set_defaults(module="treenail.cli.inspect")
    _where(status)
    status.add_argument("--json", action="store_true", help="print one JSON document")

    once = commands.add_parser(
        "once",
        help="bring a machine, or a directory, to a config",
        description="Bring a machine, or a directory, to a MachineConfig or an Ignition config, "
        "all of it or nothing.",
    )
    once.set_defaults(module="treenail.cli.once")
    once.add_argument("file", metavar="FILE", help="YAML or JSON; - for standard input")
    once.add_argument("--root", metavar="DIR", help="where the machine's root is (/)")
    once.add_argument(
        "--no-services",
        action="store_true",
        help="link units as systemctl --root does, and tell nothing that runs; so it is with any "
        "other root than /",
    )
    once.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", metavar="DIR", help="where the machine's root is (/)")
    parser.add_argument(
        "--config", metavar="FILE", help="the settings (/etc/treenail/agent.toml below the root)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")


def _command(module: str) -> Command:
    # Imported when called for, so that a command needs only what it uses, and one whose
    # package is not installed says so instead of failing with a traceback.
    try:
        return cast("Command", import_module(module).main)
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
