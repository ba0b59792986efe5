"""The command ``treenail``: its command line, dispatch and exit codes.

The module of a command is imported when the user calls it. `treenail.cli.output` lists the exit
codes.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from treenail import __version__, errors, memory
from treenail.cli import output, output_format, terminal
from treenail.cli.argument_parser import CommandParser, parse_count

Command = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    with output.guard_output():
        return output.run_with_output(lambda: _run_command_line(arguments), _print_error)


def _run_command_line(arguments: list[str] | None) -> int:
    parsed = create_parser().parse_command_line(arguments or adapt_arguments(sys.argv))
    try:
        return _load_command(parsed.module)(parsed)
    except errors.UsageError as error:
        return _print_error(error, output.EXIT_USAGE)
    except errors.TreenailError as error:
        return _print_error(error, output.EXIT_FAILED)
    except MemoryError:
        return _print_error(
            errors.HostError("the command cannot allocate memory"), output.EXIT_FAILED
        )
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED


def adapt_arguments(argv: list[str]) -> list[str]:
    """Return the arguments of this program, also if HyperShift's upgrader runs it."""
    is_daemon = Path(argv[0]).name == "machine-config-daemon" and argv[1:2] == ["start"]
    return ["hosted", *argv[2:]] if is_daemon else argv[1:]


def _load_command(module: str) -> Command:
    # Imported late: a command loads only what it uses, and a command whose package is not
    # installed fails with an error instead of a traceback.
    module, _, name = module.partition(":")
    try:
        if module in sys.modules:
            loaded = sys.modules[module]
        else:
            with memory.load_modules():
                loaded = import_module(module)
    except ModuleNotFoundError as error:
        raise errors.UsageError(
            f"cannot run this command: {error.name} is not installed",
            remedy="install the package that contains it",
        ) from error
    return cast("Command", getattr(loaded, name or "main"))


def _print_error(error: errors.TreenailError, code: int) -> int:
    remedy = error.remedy
    if not remedy and os.geteuid() != 0 and os.strerror(errno.EACCES) in str(error):
        remedy = "run the command as root, for example with sudo"
    terminal.print_error("treenail", error, remedy)
    return code


def create_parser() -> CommandParser:
    """Create the parser of all commands; the parsed ``module`` contains the command's function."""
    parser = CommandParser(
        prog="treenail",
        description="Keep this node at the OS image and the configuration that its cluster "
        "requests.",
        epilog=terminal.format_examples(
            ("show the state of this node", "treenail status"),
            ("show what the next update changes, and why", "treenail plan"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treenail {__version__}")
    # Without prog argparse formats the usage, for which it imports shutil.
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog=parser.prog
    )
    for add in (
        _add_run,
        _add_firstboot,
        _add_status,
        _add_plan,
        _add_drift,
        _add_why,
        _add_history,
        _add_cancel,
        _add_retry,
        _add_collect,
        _add_handback,
        _add_once,
        _add_hosted,
    ):
        add(commands)
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[CommandParser]",
    name: str,
    *,
    summary: str,
    description: str,
    examples: Sequence[tuple[str, str]],
) -> CommandParser:
    """Add a command; each example is a purpose and a command line."""
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=terminal.format_examples(*examples),
        formatter_class=terminal.HelpFormatter,
    )


def _add_run(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    run = _add_command(
        commands,
        "run",
        summary="run the node agent",
        description="Run the node agent until SIGTERM or SIGINT. treenail.service runs this "
        "command. Exit code 0: success, or nothing to do on a host without OSTree, 5: treenail "
        "cannot manage this host.",
        examples=[
            ("run the agent in the foreground, with debug output", "treenail run -v"),
            ("run it with other settings", "treenail run --config ./agent.toml"),
        ],
    )
    run.set_defaults(module="treenail.cli.node.run")
    _add_agent_options(run)
    run.add_argument(
        "--node-name",
        metavar="NAME",
        help="name of the Node, unless the kubeconfig has a kubelet's client certificate "
        "(default: the setting node_name, or the host name in lower case)",
    )
    run.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="connect to the API server with this kubeconfig (default: the setting kubeconfig)",
    )
    run.add_argument("--until-done", action="store_true", help=argparse.SUPPRESS)
    run.add_argument(
        "--pinned-images",
        dest="module",
        action="store_const",
        const="treenail.cli.node.run:pin_images",
        help=argparse.SUPPRESS,
    )


def _add_firstboot(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    firstboot = _add_command(
        commands,
        "firstboot",
        summary="move a new machine to its OS image before it joins the cluster",
        description="Move a new machine to its OS image before it joins the cluster. The image "
        "comes from the settings, or from the config with which the machine was provisioned. "
        "treenail-firstboot.service runs this command.",
        examples=[("follow it on a machine", "journalctl -f -u treenail-firstboot")],
    )
    firstboot.set_defaults(module="treenail.cli.node.firstboot")
    _add_agent_options(firstboot)


def _add_status(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    status = _add_command(
        commands,
        "status",
        summary="show current and desired target, phase, progress and last error",
        description="Show the current and the desired target, the phase of the update and since "
        "when, its reasons and progress, the booted, staged and rollback deployments, the last "
        "update, the last error and its remedy. Works without the API server, and without root: "
        "what only root can read is shown as unknown, with the cause. Exit code 0: the node is at "
        "its target, 2: an update or the first boot is in progress, 3: the node is degraded or the "
        "agent does not run, 1: the state is unknown.",
        examples=[
            ("show the state of this node", "treenail status"),
            (
                "print the phase of the update in progress",
                "treenail status --json | jq .update.phase",
            ),
        ],
    )
    status.set_defaults(module="treenail.cli.node.status")
    _add_root(status)
    _add_config(status)
    output_format.add_format_arguments(status, output_format.TEXT_FORMATS)


def _add_plan(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    plan = _add_command(
        commands,
        "plan",
        summary="show what an update changes, what that costs, and why",
        description="Show what changes from OLD to NEW or, without files, from the current to the "
        "desired target of this node: files with a diff (secrets withheld), units, kernel "
        "arguments; what that costs; and which path, rule and MachineConfig requires it. Changes "
        "nothing. Exit code 0: nothing differs, 2: the node stays in service, 3: the node must "
        "drain or reboot, 1: a running node cannot make the change.",
        examples=[
            ("plan the next update of this node", "treenail plan"),
            ("compare two configs", "treenail plan old.yaml new.yaml"),
            (
                "compare with the policy of a cluster",
                "treenail plan --policy policy.yaml old.yaml new.yaml",
            ),
        ],
    )
    plan.set_defaults(module="treenail.cli.node.plan")
    plan.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="OLD and NEW: MachineConfigs or Ignition configs, YAML or JSON; - for the standard "
        "input",
    )
    plan.add_argument(
        "--policy",
        metavar="FILE",
        help="apply the NodeDisruptionPolicy of the MachineConfiguration in FILE (default: the "
        "policy of the cluster, or the built-in policy between two files)",
    )
    _add_root(plan)
    _add_config(plan)
    output_format.add_format_arguments(plan, output_format.TEXT_FORMATS)


def _add_drift(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    drift = _add_command(
        commands,
        "drift",
        summary="show what differs from the current config, and repair it",
        description="Show every path and attribute that differs from the current config, with a "
        "diff (secrets withheld) and the configured reaction. Exit code 0: no drift, 3: drift.",
        examples=[
            ("show all drift", "treenail drift"),
            ("restore one file from the config", "treenail drift --repair /etc/chrony.conf"),
        ],
    )
    drift.set_defaults(module="treenail.cli.node.drift")
    drift.add_argument(
        "--repair",
        metavar="PATH",
        nargs="+",
        default=[],
        help="restore these paths from the config",
    )
    _add_root(drift)
    _add_config(drift)
    output_format.add_format_arguments(drift, output_format.TEXT_FORMATS)


def _add_why(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    why = _add_command(
        commands,
        "why",
        summary="show what required the last, or the pending, drain or reboot",
        description="Show what required the last, or the pending, drain or reboot: the path, the "
        "rule, and the MachineConfig that it came from.",
        examples=[("explain the last reboot", "treenail why")],
    )
    why.set_defaults(module="treenail.cli.node.history:print_why")
    _add_root(why)
    output_format.add_format_arguments(why, output_format.TEXT_FORMATS)


def _add_history(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    history = _add_command(
        commands,
        "history",
        summary="show the last updates and their outcome",
        description="Show the last updates, newest first: start, origin, target, duration of each "
        "phase, failed tries, outcome, and the command that shows its journal records.",
        examples=[
            ("show the last update", "treenail history -n 1"),
            ("show its journal", "journalctl TREENAIL_UPDATE=ID"),
        ],
    )
    history.set_defaults(module="treenail.cli.node.history")
    history.add_argument(
        "-n",
        "--number",
        metavar="N",
        type=parse_count,
        default=5,
        help="show at most N updates (default: 5)",
    )
    _add_root(history)
    output_format.add_format_arguments(history, output_format.TEXT_FORMATS)


def _add_cancel(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    cancel = _add_command(
        commands,
        "cancel",
        summary="cancel the update in progress",
        description="Cancel the update in progress and restore the node, until the agent requests "
        "the reboot. The agent does not try the target again until another target is requested "
        "or treenail retry is run.",
        examples=[("cancel the update in progress", "treenail cancel")],
    )
    cancel.set_defaults(module="treenail.cli.node.cancel:print_cancel")
    _add_root(cancel)
    _add_json(cancel)


def _add_retry(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    retry = _add_command(
        commands,
        "retry",
        summary="try a quarantined target again",
        description="Lift the quarantine from a target that failed or was cancelled. The agent "
        "tries it again if it is still requested.",
        examples=[
            ("see which target is quarantined", "treenail status"),
            ("try it again", "treenail retry"),
        ],
    )
    retry.set_defaults(module="treenail.cli.node.cancel:print_retry")
    _add_root(retry)
    _add_json(retry)


def _add_collect(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    collect = _add_command(
        commands,
        "collect",
        summary="write one file for a bug report",
        description="Write versions, status, ledger, settings, managed files, deployments, kernel "
        "arguments, failed units, the parts of the Node that concern treenail, and the end of the "
        "journals of the agent, rpm-ostreed and the kubelet into one compressed tar archive. "
        "Withhold secrets. Name each part that cannot be read, with the cause.",
        examples=[
            ("write an archive into this directory", "treenail collect"),
            ("copy it from a node", "ssh core@worker-0 sudo treenail collect -o - > worker-0.tgz"),
        ],
    )
    collect.set_defaults(module="treenail.cli.node.collect")
    collect.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the archive to FILE, or to the standard output with - (default: a file in "
        "this directory that is named after host and time)",
    )
    _add_root(collect)
    _add_config(collect)
    _add_json(collect)


def _add_handback(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    handback = _add_command(
        commands,
        "handback",
        summary="hand this node over to the Machine Config Daemon",
        description="Hand this node over to the Machine Config Daemon: write its state files and "
        "annotations, so that it finds no difference. Stop treenail.service first, and disable it "
        "afterwards.",
        examples=[
            ("hand this node over", "systemctl stop treenail && treenail handback"),
            ("use a config from the cluster", "treenail handback rendered-worker-a.json"),
        ],
    )
    handback.set_defaults(module="treenail.cli.node.handback")
    handback.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="current MachineConfig of the node (default: the copy on this machine)",
    )
    _add_root(handback)
    _add_config(handback)
    _add_json(handback)


def _add_once(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    once = _add_command(
        commands,
        "once",
        summary="apply a config to a machine or a directory",
        description="Apply a MachineConfig or an Ignition config to this machine, or to the tree "
        "below --root, atomically. Exit code 0: success, 3: success, a reboot is needed.",
        examples=[
            ("apply a config to this machine", "treenail once worker.yaml"),
            ("apply it to an image tree", "treenail once --root /mnt/image worker.yaml"),
        ],
    )
    once.set_defaults(module="treenail.cli.node.once")
    once.add_argument("file", metavar="FILE", help="YAML or JSON; - for the standard input")
    _add_root(once)
    once.add_argument(
        "--no-services",
        action="store_true",
        help="enable units as systemctl --root does, and do not reload or restart services "
        "(implied by a root other than /)",
    )
    _add_json(once)


def _add_hosted(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    hosted = _add_command(
        commands,
        "hosted",
        summary="run the agent on a hosted node whose image has no treenail",
        description="Copy the agent to the host of this privileged pod, start it there as a unit, "
        "and follow it until it has updated the node and removed itself. A program that is called "
        "machine-config-daemon does the same with the arguments of HyperShift's upgrader.",
        examples=[("update the node of this pod", "treenail hosted --node-name n1")],
    )
    hosted.set_defaults(module="treenail.daemon.upgrade_pod")
    add = hosted.add_argument
    add("--root-mount", metavar="DIR", default="/rootfs", help="root of the host")
    add("--node-name", metavar="NAME", required=True, help="name of the Node")
    kubelet = "/var/lib/kubelet/kubeconfig"
    add("--kubeconfig", metavar="FILE", default=kubelet, help=f"on the host (default: {kubelet})")
    add("--mode", metavar="JSON", help="hosted.json (default: by the namespace, POOL-upgrade)")
    # The agent reads the ConfigMap from the API server, with one request.
    add("--desired-configmap", help=argparse.SUPPRESS)


def _add_agent_options(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    _add_config(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="read the settings from FILE (default: /etc/treenail/agent.toml below the root)",
    )


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        metavar="DIR",
        type=_parse_directory,
        help="root directory of the machine (default: /)",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _parse_directory(text: str) -> str:
    # An empty text is most likely an unset shell variable, which must not become this machine's /.
    if not text:
        raise argparse.ArgumentTypeError("expected a directory, found nothing")
    try:
        is_directory = Path(text).is_dir()
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"cannot use {text:.200}: {cause}") from error
    if not is_directory:
        raise argparse.ArgumentTypeError(f"there is no directory {text:.200}")
    return text
