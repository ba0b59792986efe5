"""``treenail-controller manifests``: all that a cluster needs, for ``kubectl apply -f -``."""

import argparse
import sys

from treenail.api import documents
from treenail.cli.controller.run import CONTROLLERS, parse_controllers
from treenail.controllers.install import installation
from treenail.controllers.install.installation import InstallOptions


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "manifests",
        help="print what to apply to a cluster to have the controllers run there",
        description="Print the custom resource definitions, what the agents of nodes and the "
        "controllers may do, and the controllers' Deployment, for kubectl apply -f -.",
    )
    defaults = InstallOptions()
    parser.add_argument("--enable", type=parse_controllers, default=CONTROLLERS, metavar="NAME,...",
                        help=f"which controllers ({','.join(CONTROLLERS)})")  # fmt: skip
    parser.add_argument("--namespace", default=defaults.namespace, help="(%(default)s)")
    parser.add_argument("--image", default=defaults.image, help="(%(default)s)")
    parser.set_defaults(run=print_manifests)


def print_manifests(arguments: argparse.Namespace) -> int:
    """Print the documents."""
    options = InstallOptions(arguments.enable, arguments.namespace, arguments.image)
    sys.stdout.write(
        "---\n".join(map(documents.dump_document, installation.build_documents(options)))
    )
    sys.stdout.flush()
    return 0
