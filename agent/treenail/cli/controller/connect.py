"""Connection of commands to the cluster."""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treenail.clock import SystemClock
from treenail.errors import UsageError
from treenail.kube.client import Client
from treenail.kube.kubeconfig import UnsupportedKubeconfigError, read_kubeconfig
from treenail.kube.transport import HttpTransport

if TYPE_CHECKING:
    from treenail.kube.official import OfficialTransport


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the cluster."""
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="connect with this kubeconfig (default: the files in KUBECONFIG, or ~/.kube/config)",
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        default="",
        help="use this context of the kubeconfig (default: its current context)",
    )


def find_kubeconfigs(kubeconfig: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return the files to read: the given one, those of the list in KUBECONFIG, or the default.

    As kubectl does, skip files of a list that do not exist, unless none does.
    """
    if kubeconfig:
        return [kubeconfig]
    listed = [each for each in environment.get("KUBECONFIG", "").split(os.pathsep) if each]
    existing = [each for each in listed if Path(each).exists()]
    return existing or listed[:1] or [str(Path.home() / ".kube/config")]


@contextmanager
def connect_cluster(arguments: argparse.Namespace) -> Iterator[Client]:
    """Connect with the kubeconfigs and the context of the arguments; raise `UsageError`."""
    transport = _create_transport(
        find_kubeconfigs(arguments.kubeconfig, os.environ), arguments.context
    )
    try:
        yield Client(transport)
    finally:
        transport.close()


def _create_transport(paths: list[str], context: str) -> "HttpTransport | OfficialTransport":
    unsupported: UsageError | None = None
    if len(paths) == 1:
        try:
            return HttpTransport(read_kubeconfig(paths[0], context=context), SystemClock())
        except UnsupportedKubeconfigError as error:
            unsupported = error
    # Imported late: it takes half a second, and few kubeconfigs need it. The package merges files,
    # and runs the credential plugins that kubectl runs.
    try:
        from treenail.kube.official import OfficialTransport
    except ModuleNotFoundError as error:
        raise unsupported or UsageError(
            "cannot merge the files of KUBECONFIG: the Python package kubernetes is not installed",
            remedy="name one file with --kubeconfig",
        ) from error
    return OfficialTransport.from_kubeconfig(os.pathsep.join(paths), SystemClock(), context=context)
