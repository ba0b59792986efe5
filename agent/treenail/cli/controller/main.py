"""The command ``treenail-controller``, and ``kubectl treenail`` with the commands of users.

`treenail.cli.output` lists the exit codes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

from treenail import __version__
from treenail.api import documents
from treenail.cli import argument_parser, files, output, terminal
from treenail.errors import TreenailError, UsageError

PROGRAM = "treenail-controller"
KUBECTL_PROGRAM = "kubectl treenail"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    is_process = words[:1] in (["run"], ["serve"]) or words[:2] == ["install", "bootstrap"]
    parser = create_process_parser(words[0]) if is_process else create_parser()
    return _run_program(parser, argv)


def run_kubectl_plugin(argv: list[str] | None = None) -> int:
    """Run a command line after ``kubectl treenail``; return the exit code."""
    return _run_program(create_kubectl_parser(), argv)


def _run_program(parser: argument_parser.CommandParser, argv: list[str] | None) -> int:
    print_error = partial(_print_error, parser.prog)
    with output.guard_output():
        return output.run_with_output(lambda: _run_command_line(parser, argv), print_error)


def _run_command_line(parser: argument_parser.CommandParser, argv: list[str] | None) -> int:
    arguments = parser.parse_command_line(argv)
    try:
        return _run_command(arguments)
    except UsageError as error:
        return _print_error(parser.prog, error, output.EXIT_USAGE)
    except TreenailError as error:
        return _print_error(parser.prog, error, output.EXIT_FAILED)
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED


def create_kubectl_parser() -> argument_parser.CommandParser:
    """Create the parser of the kubectl plugin: the commands that only read from a cluster."""
    parser = argument_parser.CommandParser(
        prog=KUBECTL_PROGRAM,
        description="Show pools of nodes, their rollouts, what a change does to them, and which "
        "new machines join. Changes nothing. kubectl finds this plugin as kubectl-treenail in "
        "PATH.",
        epilog=terminal.format_examples(
            ("follow a rollout", "kubectl treenail status --watch"),
            ("show what a change costs", "kubectl treenail plan -f pool.yaml"),
            ("wait for a rollout in a script", "kubectl treenail rollout status --wait"),
            ("show which machines join", "kubectl treenail machines"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    _add_version(parser)
    from treenail.cli.controller import machines, plan, rollout
    from treenail.cli.controller.status import command as status

    commands = _add_commands(parser)
    for command in (status, plan, rollout, machines):
        command.add_command(commands)
    argument_parser.rename_program(parser, PROGRAM, KUBECTL_PROGRAM)
    return parser


def _add_version(parser: argument_parser.CommandParser) -> None:
    parser.add_argument(
        "--version",
        action="version",
        version=f"treenail {__version__}",
        help="print the version and exit",
    )


def _add_commands(
    parser: argparse.ArgumentParser,
) -> "argparse._SubParsersAction[argparse.ArgumentParser]":
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def create_process_parser(command: str) -> argument_parser.CommandParser:
    """Create a parser of ``run``, ``serve`` or ``install bootstrap`` alone, which run for long.

    The modules of the other commands would need 5 MB more in each process.
    """
    parser = argument_parser.CommandParser(prog=PROGRAM, formatter_class=terminal.HelpFormatter)
    commands = _add_commands(parser)
    if command == "run":
        from treenail.cli.controller.run import command as run

        run.add_command(commands)
    elif command == "install":
        from treenail.cli.controller.install import bootstrap, group

        group.add_group(commands, bootstrap)
    else:
        from treenail.cli.controller import serve

        serve.add_command(commands)
    return parser


def create_parser() -> argument_parser.CommandParser:
    """Create the parser of all commands."""
    from treenail.cli.controller import (
        build,
        hosted,
        ignition,
        machines,
        manifests,
        plan,
        rollout,
        serve,
        token,
        trust,
        uninstall,
    )
    from treenail.cli.controller.install import group as install_group
    from treenail.cli.controller.run import command as run
    from treenail.cli.controller.status import command as status

    parser = argument_parser.CommandParser(
        prog=PROGRAM,
        description="Render the configuration of pools of nodes, and roll it out.",
        epilog=terminal.format_examples(
            ("show what a change costs", "treenail-controller plan -f pool.yaml"),
            ("follow a rollout", "treenail-controller status --watch"),
            ("wait for a rollout in a script", "treenail-controller rollout status --wait"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    _add_version(parser)
    commands = _add_commands(parser)
    render = commands.add_parser(
        "render",
        help="print the rendered MachineConfigs of pools, without a cluster",
        description="Print the rendered MachineConfigs for the MachineConfigPools, MachineConfigs "
        "and ControllerConfig in files, with what KubeletConfigs, ContainerRuntimeConfigs, mirror "
        "sets and image policies generate. Ignore objects of other programs.",
        epilog=terminal.format_examples(
            (
                "check a repository in CI",
                "treenail-controller render --strict -f manifests/ > /dev/null",
            ),
            ("render one pool", "treenail-controller render -f manifests/ --pool worker"),
        ),
        formatter_class=terminal.HelpFormatter,
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
        help="exit with 1 when an object or a field has no effect, such as a misspelt one or a "
        "PinnedImageSet (default: print a warning)",
    )
    render.set_defaults(run=_render_configs)
    build.add_command(commands)
    trust.add_command(commands)
    ignition.add_command(commands)
    token.add_command(commands)
    plan.add_command(commands)
    status.add_command(commands)
    rollout.add_command(commands)
    machines.add_command(commands)
    manifests.add_command(commands)
    hosted.add_command(commands)
    uninstall.add_command(commands)
    install_group.add_command(commands)
    run.add_command(commands)
    serve.add_command(commands)
    return parser


def _run_command(arguments: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _render_configs(arguments: argparse.Namespace) -> int:
    from treenail.controllers.render.render import read_manifests, render_pools

    manifests = read_manifests(files.read_documents(arguments.filename))
    manifests.add_generated_configs()
    for warning in manifests.warnings:
        print(f"{PROGRAM}: warning: {warning}", file=sys.stderr)
    rendered, errors = render_pools(manifests, arguments.pool)
    for error in errors:
        _print_error(PROGRAM, error, output.EXIT_FAILED)
    if errors or (manifests.warnings and arguments.strict):
        return output.EXIT_FAILED
    configs = [rendered_config.config.to_json() for rendered_config in rendered]
    if arguments.output == "yaml":
        printed = "---\n".join(documents.dump_document(config) for config in configs)
    else:
        listed = {"apiVersion": "v1", "kind": "List", "items": configs}
        printed = json.dumps(configs[0] if arguments.pool else listed, indent=2) + "\n"
    sys.stdout.write(printed)
    sys.stdout.flush()
    return 0


def _print_error(program: str, error: TreenailError, code: int) -> int:
    terminal.print_error(program, error, error.remedy)
    return code
