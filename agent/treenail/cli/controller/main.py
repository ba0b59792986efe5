"""The command ``treenail-controller``: dispatch and exit codes.

Exit codes: 0 success, 1 an input is invalid, 2 an argument is invalid, 130 interrupted,
141 the reader closed the output. ``rollout`` has its own.
"""

import argparse
import json
import sys
from collections.abc import Callable

from treenail import __version__
from treenail.api import documents
from treenail.cli.controller import manifests, plan, rollout, run, status
from treenail.cli.files import read_documents
from treenail.cli.output import run_with_output
from treenail.cli.safe_output import guard_output
from treenail.cli.terminal import HelpFormatter, format_examples, print_lines
from treenail.controllers.render import offline
from treenail.errors import TreenailError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    with guard_output():
        return run_with_output(lambda: _run_command_line(argv), _print_error)


def _run_command_line(argv: list[str] | None) -> int:
    arguments = create_parser().parse_args(argv)
    try:
        return _run_command(arguments)
    except UsageError as error:
        return _print_error(error, EXIT_USAGE)
    except TreenailError as error:
        return _print_error(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="treenail-controller",
        description="Render the configuration of pools of nodes, and roll it out.",
        epilog=format_examples(
            ("show what a change costs", "treenail-controller plan -f pool.yaml"),
            ("follow a rollout", "treenail-controller status"),
            ("wait for a rollout in a script", "treenail-controller rollout status --wait"),
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treenail {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    render = commands.add_parser(
        "render",
        help="print the rendered MachineConfigs of pools, without a cluster",
        description="Print the rendered MachineConfigs for the MachineConfigPools, MachineConfigs "
        "and ControllerConfig in files. Ignore objects of other kinds.",
        epilog=format_examples(
            (
                "check a repository in CI",
                "treenail-controller render --strict -f manifests/ > /dev/null",
            ),
            ("render one pool", "treenail-controller render -f manifests/ --pool worker"),
        ),
        formatter_class=HelpFormatter,
    )
    render.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        action="append",
        required=True,
        help="read this file, the .yaml, .yml and .json files of this directory, or - for the "
        "standard input; repeatable",
    )
    render.add_argument("--pool", metavar="NAME", help="render this pool only (default: all pools)")
    render.add_argument(
        "-o",
        "--output",
        choices=("yaml", "json"),
        default="yaml",
        help="output format (default: %(default)s)",
    )
    render.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 when a MachineConfig has a field without effect, such as a misspelt one "
        "(default: print a warning)",
    )
    render.set_defaults(run=_render_configs)
    plan.add_command(commands)
    status.add_command(commands)
    rollout.add_command(commands)
    manifests.add_command(commands)
    run.add_command(commands)
    return parser


def _run_command(arguments: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _render_configs(arguments: argparse.Namespace) -> int:
    found = offline.read_manifests(read_documents(arguments.filename))
    for warning in found.warnings:
        print(f"treenail-controller: warning: {warning}", file=sys.stderr)
    if found.warnings and arguments.strict:
        return EXIT_FAILED
    rendered, errors = offline.render_pools(found, arguments.pool)
    for error in errors:
        _print_error(error, EXIT_FAILED)
    if errors:
        return EXIT_FAILED
    configs = [each.config.to_json() for each in rendered]
    if arguments.output == "yaml":
        printed = "---\n".join(documents.dump_document(config) for config in configs)
    else:
        listed = {"apiVersion": "v1", "kind": "List", "items": configs}
        printed = json.dumps(configs[0] if arguments.pool else listed, indent=2) + "\n"
    sys.stdout.write(printed)
    sys.stdout.flush()
    return 0


def _print_error(error: TreenailError, code: int) -> int:
    lines = [f"treenail-controller: {error}", *([f"  {error.remedy}"] if error.remedy else [])]
    # Deeper than the remedy.
    print_lines(lines, sys.stderr, hanging_columns=4)
    return code
