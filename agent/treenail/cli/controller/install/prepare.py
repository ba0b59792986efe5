"""``treenail-controller install prepare``: check and complete an install directory."""

import argparse
import json

from treenail.cli import terminal
from treenail.cli.controller.install import check_arguments
from treenail.cli.controller.install.arguments import add_directory_argument
from treenail.installer.directory import install_files, prepare, problems
from treenail.installer.log_bundle.gather import build_gather_hook


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "prepare",
        help="check and complete the install directory",
        description="Read the field imageMode of install-config.yaml, or of treenail-install.yaml, "
        "and the manifests of the directory. Report all problems in one message. Without a problem "
        "write the MachineOSConfigs, Secrets, pools and settings of image mode into the manifests, "
        "and remove the field from install-config.yaml, because other installers refuse it. A "
        "MachineOSConfig among the manifests takes precedence over the field. A second run changes "
        "nothing.",
        epilog=terminal.format_examples(
            (
                "prepare the install directory",
                "treenail-controller install prepare --dir cluster",
            ),
            (
                "log in to the registry of the images with another file",
                "treenail-controller install prepare --dir cluster --push-secret push.json",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    add_directory_argument(parser)
    check_arguments.add_check_arguments(parser)
    parser.add_argument(
        "--gather-hook",
        action="store_true",
        help="print only an Ignition config for the bootstrap host, with which `openshift-install "
        "gather` includes the log bundle",
    )
    parser.set_defaults(run=run_prepare)


def run_prepare(arguments: argparse.Namespace) -> int:
    """Prepare the directory; return 1 and print all problems if it has any."""
    if arguments.gather_hook:
        print(json.dumps(build_gather_hook(), indent=1))
        return 0
    options = check_arguments.read_options(arguments)
    try:
        online = check_arguments.create_online_checks(arguments)
        lines = prepare.prepare_directory(
            arguments.directory, options, install_files.InstallFiles(), online
        )
    except problems.InstallDirectoryError as error:
        return check_arguments.print_problems(arguments.program, error)
    terminal.print_lines(lines)
    return 0
