"""The arguments of ``treenail``'s commands; what each needs is imported when it is called."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from treenail import __version__

EXIT_FAILED = 1
EXIT_USAGE = 2


class CommandParser(argparse.ArgumentParser):
    """Wrong use ends with the exit code that the command keeps for it."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(self.get_default("usage_code") or EXIT_USAGE, f"{self.prog}: {message}\n")


def create_parser() -> CommandParser:
    """Of all commands; the parsed ``module`` carries the command out."""
    parser = CommandParser(
        prog="treenail",
        description="Keeps this node at the OS image and the configuration its cluster asks for.",
    )
    parser.add_argument("--version", action="version", version=f"treenail {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
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
    ):
        add(commands)
    return parser


def _add_run(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    run = commands.add_parser("run", help="be the node's agent", description="Be the node's agent.")
    run.set_defaults(module="treenail.cli.node.run")
    _add_common_arguments(run)
    run.add_argument("--node-name", metavar="NAME", help="the Node's name (the host's, lower case)")
    run.add_argument(
        "--kubeconfig", metavar="FILE", help="how to reach the API server, and as whom"
    )


def _add_firstboot(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    firstboot = commands.add_parser(
        "firstboot",
        help="move a new machine to its operating system before it joins",
        description="Move a new machine to the operating system of the config it was provisioned "
        "with, or of the settings, before it joins its cluster.",
    )
    firstboot.set_defaults(module="treenail.cli.node.firstboot")
    _add_common_arguments(firstboot)


def _add_status(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    status = commands.add_parser(
        "status",
        help="show what the node has, wants and does",
        description="Show what the node has, wants and does; works with the API server away.",
    )
    status.set_defaults(module="treenail.cli.node.status")
    _add_common_arguments(status)
    _add_json(status)


def _add_plan(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="show what would change, what that costs and why",
        description="Show what would change from one config to another, or, without files, on "
        "this node from what it has to what it is asked to be: every file with its "
        "difference (secrets withheld), unit, kernel argument; what that costs, and which path, "
        "rule and MachineConfig asks for it. Nothing is changed. Exit code 0: nothing differs, "
        "2: changes that disrupt nothing, 3: a drain or a reboot, 1: it can't be done or told.",
    )
    plan.set_defaults(module="treenail.cli.node.plan", usage_code=EXIT_FAILED)
    plan.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="OLD and NEW, each a MachineConfig or an Ignition config, YAML or JSON; - for "
        "standard input",
    )
    plan.add_argument(
        "--policy",
        metavar="FILE",
        help="a MachineConfiguration whose NodeDisruptionPolicy holds (the defaults)",
    )
    _add_root(plan)
    _add_config(plan)
    _add_json(plan)


def _add_drift(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    drift = commands.add_parser(
        "drift",
        help="show what is not as the current config says, and put it right",
        description="Show what is not as the current config says: by path and attribute, with the "
        "difference of contents (secrets withheld) and what it leads to. Exit code 0: nothing, "
        "4: something.",
    )
    drift.set_defaults(module="treenail.cli.node.drift")
    drift.add_argument(
        "--heal", metavar="PATH", nargs="+", default=[], help="have these as the config says"
    )
    _add_root(drift)
    _add_config(drift)
    _add_json(drift)


def _add_why(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    why = commands.add_parser(
        "why",
        help="show what asked for the last, or the pending, drain or reboot",
        description="Show what asked for the last, or the pending, drain or reboot: the path, the "
        "rule and the MachineConfig it came from.",
    )
    why.set_defaults(module="treenail.cli.node.why")
    _add_root(why)
    _add_json(why)


def _add_history(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    history = commands.add_parser(
        "history",
        help="show the last updates and what became of them",
        description="Show the last updates, the newest first: when, from what to what, how long "
        "each phase took, and what became of it.",
    )
    history.set_defaults(module="treenail.cli.node.history")
    history.add_argument(
        "-n", "--number", metavar="N", type=_parse_positive, default=5, help="how many at most (5)"
    )
    _add_root(history)
    _add_json(history)


def _add_cancel(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    cancel = commands.add_parser(
        "cancel",
        help="call the update under way off",
        description="Call the update under way off and have the node as it was, while that costs "
        "no reboot. Its target is not tried again until another one was asked for, or until "
        "treenail forgive.",
    )
    cancel.set_defaults(module="treenail.cli.node.cancel:cancel")
    _add_root(cancel)
    _add_json(cancel)


def _add_retry(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    forgive = commands.add_parser(
        "forgive",
        help="try a target again that was refused or called off",
        description="Forget that a target was refused or called off, so that it is tried again if "
        "it is still asked for.",
    )
    forgive.set_defaults(module="treenail.cli.node.cancel:forgive")
    _add_root(forgive)
    _add_json(forgive)


def _add_collect(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    collect = commands.add_parser(
        "collect",
        help="put what a bug report needs into one file",
        description="Put what a bug report needs into one file, secrets withheld: versions, "
        "status, ledger, settings, deployments, the journals of the agent, rpm-ostreed and the "
        "kubelet, the Node. What can't be got is named, and why.",
    )
    collect.set_defaults(module="treenail.cli.node.collect")
    collect.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the file to write, a compressed tar; - for standard output (named after the host "
        "and the time, in this directory)",
    )
    _add_root(collect)
    _add_config(collect)
    _add_json(collect)


def _add_handback(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    handback = commands.add_parser(
        "handback",
        help="make this node over to the Machine Config Daemon",
        description="Make this node over to the Machine Config Daemon: write its state files and "
        "annotations, so that its first look finds nothing to mend. Stop treenail first.",
    )
    handback.set_defaults(module="treenail.cli.node.handback")
    handback.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="the MachineConfig that the node has, where this machine keeps no copy of it",
    )
    _add_root(handback)
    _add_config(handback)
    _add_json(handback)


def _add_once(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    once = commands.add_parser(
        "once",
        help="bring a machine, or a directory, to a config",
        description="Bring a machine, or a directory, to a MachineConfig or an Ignition config, "
        "all of it or nothing.",
    )
    once.set_defaults(module="treenail.cli.node.once")
    once.add_argument("file", metavar="FILE", help="YAML or JSON; - for standard input")
    _add_root(once)
    once.add_argument(
        "--no-services",
        action="store_true",
        help="link units as systemctl --root does, and tell nothing that runs; so it is with any "
        "other root than /",
    )
    _add_json(once)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    _add_config(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="the settings (/etc/treenail/agent.toml below the root)"
    )


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", metavar="DIR", type=_parse_directory, help="where the machine's root is (/)"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _parse_directory(text: str) -> str:
    # Most likely a variable that is not set: never the machine that runs this.
    if not text:
        raise argparse.ArgumentTypeError("expected a directory, found nothing")
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text}")
    return text


def _parse_positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("expected a number of at least 1")
    return number
