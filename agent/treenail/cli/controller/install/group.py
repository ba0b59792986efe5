"""``treenail-controller install``: install clusters in image mode."""

import argparse
from types import ModuleType

from treenail.cli import terminal


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of an installation, in the order of the help."""
    from treenail.cli.controller.install import (
        bootstrap,
        gather,
        image,
        plan,
        prepare,
        reset,
        wait_for,
    )

    add_group(commands, prepare, plan, bootstrap, wait_for, reset, gather, image)


def add_group(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", *modules: ModuleType
) -> None:
    """Add the group with the command of each module."""
    parser = commands.add_parser(
        "install",
        help="install a cluster in image mode",
        description="Install a cluster in image mode: its machines join with images that are built "
        "during the installation.",
        epilog=terminal.format_examples(
            ("check and complete an install directory", "treenail-controller install prepare"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in modules:
        module.add_command(verbs)
