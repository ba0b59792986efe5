"""Connection of the controllers and of commands to the cluster."""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treenail.clock import Clock, SystemClock
from treenail.errors import UsageError
from treenail.kube.client import Client, Transport
from treenail.kube.kubeconfig import (
    ApiServerConfig,
    UnsupportedKubeconfigError,
    read_kubeconfig,
    read_service_account,
)
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
    paths = find_kubeconfigs(arguments.kubeconfig, os.environ)
    transport = create_transport(paths, arguments.context, SystemClock())
    try:
        yield Client(transport)
    finally:
        transport.close()


def create_transport(
    paths: list[str], context: str, clock: Clock, *, max_kept: int = 1
) -> Transport:
    """Connect with a context of these kubeconfigs; raise `UsageError`.

    One file with a certificate or a token needs no other package. The package ``kubernetes`` merges
    files, runs credential plugins, and connects through a proxy.
    """
    unsupported: UsageError | None = None
    if len(paths) == 1:
        try:
            connection = read_kubeconfig(paths[0], context=context)
            _refuse_proxy(connection)
            return HttpTransport(connection, clock, max_kept=max_kept)
        except UnsupportedKubeconfigError as error:
            unsupported = error
    package = _import_package(
        unsupported
        or UsageError(
            "cannot merge the files of KUBECONFIG: the Python package kubernetes is not installed",
            remedy="name one file with --kubeconfig, or install the package kubernetes",
        )
    )
    return package.from_kubeconfig(os.pathsep.join(paths), clock, context=context)


def create_pod_transport(clock: Clock, *, max_kept: int = 1) -> Transport:
    """Connect with the service account of this pod; raise `UsageError` outside a pod."""
    connection = read_service_account(os.environ)
    try:
        _refuse_proxy(connection)
    except UnsupportedKubeconfigError as error:
        return _import_package(error).from_service_account(clock)
    return HttpTransport(connection, clock, max_kept=max_kept)


def _refuse_proxy(connection: ApiServerConfig) -> None:
    """Raise `UnsupportedKubeconfigError` when HTTPS_PROXY applies to the API server."""
    # Imported late: few environments have a proxy.
    if not (os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")):
        return
    from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # no stub

    address = urlsplit(connection.server)
    if not proxy_bypass_environment(address.netloc):
        raise UnsupportedKubeconfigError(
            f"cannot connect to {address.netloc} through the proxy that HTTPS_PROXY names",
            remedy=f"add {address.hostname} to NO_PROXY, or install the Python package kubernetes",
        )


def _import_package(otherwise: UsageError) -> "type[OfficialTransport]":
    # Imported late: it takes half a second and 40 MiB, and few kubeconfigs need it.
    try:
        from treenail.kube.official import OfficialTransport
    except ModuleNotFoundError as error:
        raise otherwise from error
    return OfficialTransport
