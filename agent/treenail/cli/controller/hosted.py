"""``treenail-controller hosted``: prepare what hosted clusters need."""

import argparse
import sys

from treenail.api import documents
from treenail.cli import files, terminal


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the group and its command."""
    make = "treenail-controller hosted release --configs base/ --images images.yaml"
    examples = terminal.format_examples(
        ("make a release", f"{make} | kubectl apply --server-side -n clusters -f -"),
    )
    group = commands.add_parser(
        "hosted",
        help="prepare what hosted clusters need",
        description="Prepare what the NodePools of hosted clusters need that treenail owns.",
        epilog=examples,
        formatter_class=terminal.HelpFormatter,
    )
    parser = group.add_subparsers(title="commands", metavar="COMMAND", required=True).add_parser(
        "release",
        help="print the ConfigMaps of a release",
        description="Print ConfigMaps with the base MachineConfigs and the images of a release, "
        "for the namespace of the NodePools.",
        epilog=examples,
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "--configs", metavar="DIR", required=True,
        help="read the MachineConfigs of all nodes from the .yaml, .yml and .json files of this "
        "directory; all have the role worker",
    )  # fmt: skip
    parser.add_argument(
        "--images", metavar="FILE", required=True,
        help="read releaseVersion, releaseImage, baseOSContainerImage and, if there are any, "
        "baseOSExtensionsContainerImage and osImageStream from this YAML or JSON file",
    )  # fmt: skip
    parser.set_defaults(run=print_release)


def print_release(arguments: argparse.Namespace) -> int:
    """Print the ConfigMaps."""
    from treenail.controllers.hosted.config import release

    name = arguments.images
    images, configs = files.read_input(name), files.read_documents([arguments.configs])
    found, warnings = release.read_release((name, images), configs)
    terminal.print_lines((f"warning: {text}" for text in warnings), sys.stderr)
    made = map(documents.dump_document, release.build_config_maps(found))
    sys.stdout.write("---\n".join(made))
    sys.stdout.flush()
    return 0
