"""``treenail-controller install gather``: write the log bundle of an installation."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from treenail import clocks, errors, log_bundle, process
from treenail.cli import argument_parser, files, output, terminal
from treenail.cli.controller.connect import create_transport
from treenail.cli.controller.install.arguments import add_directory_argument
from treenail.installer.directory import install_files
from treenail.installer.log_bundle import cluster_parts, gather
from treenail.kube.api_client import Client


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "gather",
        help="write the log bundle of an installation",
        description="Write one compressed archive of at most 200 MB with the state, the builds, "
        "the logs and the rendered configs of an installation, with pools and builds of the "
        "cluster, and with `treenail collect` of nodes. Works on an unfinished or damaged "
        "directory too. Secrets are withheld. Exit code 0: the bundle is complete, 1: a node "
        "cannot be read, or nothing was written.",
        epilog=terminal.format_examples(
            ("gather on the bootstrap host", "treenail-controller install gather --dir cluster"),
            (
                "gather from two nodes too",
                "treenail-controller install gather --dir cluster --node 192.0.2.10 192.0.2.11",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    add_directory_argument(parser)
    parser.add_argument(
        "--node", dest="nodes", metavar="ADDRESS", nargs="+", action="extend", default=[],
        help="read this node over ssh, as user core or as in USER@ADDRESS; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--node-timeout", type=argument_parser.parse_duration,
        default=cluster_parts.DEFAULT_TIMEOUT_S, metavar="TIME",
        help="time limit of each node (default: 2m)",
    )  # fmt: skip
    parser.add_argument(
        "--kubeconfig", metavar="FILE", type=Path,
        help="add pools, image configs and builds of the cluster with this kubeconfig (default: "
        "DIR/auth/kubeconfig if it exists)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE",
        help="write this file, or - for the standard output (default: log-bundle-TIME.tar.gz)",
    )  # fmt: skip
    parser.set_defaults(run=run_gather)


def run_gather(arguments: argparse.Namespace) -> int:
    """Write the bundle; print its path, and what is missing."""
    root: Path = arguments.directory
    directory = install_files.InstallDirectory(root)
    install_files.require_directory(root, "gather from")
    parts = {directory.private, directory.manifests}
    if not arguments.nodes and parts.isdisjoint(root.iterdir()):
        raise errors.UsageError(
            f"cannot gather from {root}: no installation began there, and it has no manifests",
            remedy="name the install directory: --dir DIR",
        )
    if len(arguments.nodes) > cluster_parts.MAX_NODES:
        raise errors.UsageError(f"cannot gather from more than {cluster_parts.MAX_NODES} nodes")
    settings = gather.GatherSettings(
        tuple(dict.fromkeys(map(cluster_parts.parse_node_address, arguments.nodes))),
        arguments.node_timeout,
        _find_cluster(arguments.kubeconfig, directory),
    )
    clock = clocks.SystemClock()
    moment = clocks.format_rfc3339(clock.now()).replace(":", "").replace("-", "")
    name = f"log-bundle-{moment}"
    path = arguments.output or f"{name}.tar.gz"
    programs = process.ProgramRunner(clock, os.environ)
    with files.open_private_output(path) as archive:
        bundle = log_bundle.LogBundle(
            archive, name=name, now=clock.now(), index_name=gather.INDEX_NAME
        )
        silent = gather.gather_bundle(bundle, directory, settings, programs, clock)
    stream = sys.stderr if path == files.STDOUT else sys.stdout
    terminal.print_lines(list(bundle.format_report(path)), stream)
    return output.EXIT_FAILED if silent else 0


def _find_cluster(
    kubeconfig: Path | None, directory: install_files.InstallDirectory
) -> cluster_parts.OpenCluster | None:
    path = kubeconfig or directory.kubeconfig
    if kubeconfig is None and not path.exists():
        return None
    return partial(_open_cluster, path)


@contextmanager
def _open_cluster(kubeconfig: Path) -> Iterator[Client]:
    with closing(create_transport([str(kubeconfig)], "", clocks.SystemClock())) as transport:
        yield Client(transport)
