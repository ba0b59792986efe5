"""``treenail-controller install reset``: forget the steps of an installation."""

import argparse

from treenail.cli import terminal
from treenail.cli.controller.install.arguments import add_directory_argument
from treenail.errors import UsageError


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "reset",
        help="forget the steps of an installation",
        description="Remove the state of an installation and the rendered files, so that install "
        "bootstrap begins again. Keep manifests, built images, logs and certificates: an image of "
        "equal inputs is not built again.",
        epilog=terminal.format_examples(
            ("begin again", "treenail-controller install reset --dir cluster"),
            ("remove the images too", "treenail-controller install reset --dir cluster --images"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    add_directory_argument(parser)
    parser.add_argument(
        "--images", action="store_true",
        help="remove built images, the registry, certificates, logins and logs too",
    )  # fmt: skip
    parser.set_defaults(run=run_reset)


def run_reset(arguments: argparse.Namespace) -> int:
    """Remove the state; print what was removed."""
    from treenail.installer.directory.install_files import (
        InstallDirectory,
        InstallFiles,
        require_directory,
    )
    from treenail.installer.directory.install_state import hold_install_lock, reset_installation

    require_directory(arguments.directory, "reset")
    directory, files = InstallDirectory(arguments.directory.resolve()), InstallFiles()
    if not directory.private.is_dir():
        raise UsageError(
            f"cannot reset {directory.root}: it has no state of an installation",
            remedy="name the install directory: --dir DIR",
        )
    with hold_install_lock(directory, files):
        removed = reset_installation(directory, files, with_images=arguments.images)
    if not removed:
        terminal.print_lines(["nothing to remove"])
    for path in removed:
        terminal.print_lines([f"removed {path}"])
    return 0
