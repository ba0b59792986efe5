"""The command ``treenail-controller``: the controllers, and what a person asks of them.

Exit codes: 0 done, 1 the input can't be used, 2 used wrongly.
"""

import argparse
import json
import sys
from collections.abc import Callable

from treenail import __version__
from treenail.api import documents
from treenail.cli.controller import manifests, plan, run, status
from treenail.cli.files import read_documents
from treenail.controllers.render import offline
from treenail.errors import ConfigError, TreenailError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _create_parser().parse_args(argv)
    try:
        return _run_command(arguments)
    except UsageError as error:
        return _print_error(error, EXIT_USAGE)
    except TreenailError as error:
        return _print_error(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treenail-controller",
        description="Renders the configuration of pools and rolls it out.",
    )
    parser.add_argument("--version", action="version", version=f"treenail {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    render = commands.add_parser(
        "render",
        help="print the rendered MachineConfigs of pools, without a cluster",
        description="Print the MachineConfigs that would be rendered from the MachineConfigPools, "
        "MachineConfigs and ControllerConfig in files. Objects of other kinds are passed over.",
    )
    render.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        action="append",
        required=True,
        help="a file, a directory of .yaml, .yml and .json files, or - for standard input; "
        "may be given several times",
    )
    render.add_argument("--pool", metavar="NAME", help="render this pool only")
    render.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml")
    render.set_defaults(run=_render_configs)
    plan.add_command(commands)
    status.add_command(commands)
    manifests.add_command(commands)
    run.add_command(commands)
    return parser


def _run_command(arguments: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _render_configs(arguments: argparse.Namespace) -> int:
    found = offline.read_manifests(read_documents(arguments.filename))
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
    remedy = f" ({error.remedy})" if error.remedy and isinstance(error, ConfigError) else ""
    print(f"treenail-controller: {error}{remedy}", file=sys.stderr)
    return code
