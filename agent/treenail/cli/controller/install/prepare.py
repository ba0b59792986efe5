"""``treenail-controller install prepare``: check and complete an install directory."""

import argparse
import json

from treenail.cli.controller.install.arguments import add_directory_argument
from treenail.cli.controller.install.check_arguments import (
    add_check_arguments,
    create_online_checks,
    print_problems,
    read_options,
)
from treenail.cli.terminal import HelpFormatter, format_examples, print_lines
from treenail.installer.directory.install_files import InstallFiles
from treenail.installer.directory.prepare import prepare_directory
from treenail.installer.directory.problems import InstallDirectoryError
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
        epilog=format_examples(
            (
                "prepare the install directory",
                "treenail-controller install prepare --dir cluster",
            ),
            (
                "log in to the registry of the images with another file",
                "treenail-controller install prepare --dir cluster --push-secret push.json",
            ),
        ),
        formatter_class=HelpFormatter,
    )
    add_directory_argument(parser)
    add_check_arguments(parser)
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
    options = read_options(arguments)
    try:
        online = create_online_checks(arguments)
        lines = prepare_directory(arguments.directory, options, InstallFiles(), online)
    except InstallDirectoryError as error:
        return print_problems(arguments.program, error)
    print_lines(lines)
    return 0
