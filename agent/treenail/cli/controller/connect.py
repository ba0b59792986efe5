"""Connection of the controllers and of commands to the cluster."""

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treenail import clocks, errors
from treenail.kube import api_client
from treenail.kube.transport.kubeconfig import (
    ApiServerConfig,
    UnsupportedKubeconfigError,
    find_current_context,
    read_kubeconfigs,
    read_service_account,
)
from treenail.kube.transport.native import HttpTransport

if TYPE_CHECKING:
    from treenail.kube.transport.official import OfficialTransport


POD_ACCOUNT = "the service account of the pod"
"""Default connection of the processes that run in a cluster, for their help."""
_MAX_KEPT_CONNECTIONS = 64
"""As many as there are threads that send requests and drains that watch pods."""
_DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def add_connection_arguments(
    parser: argparse.ArgumentParser, *, default: str = "the files in KUBECONFIG, or ~/.kube/config"
) -> None:
    """Add the arguments that choose the cluster; ``default`` is the text of the help."""
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help=f"connect with this kubeconfig (default: {default})",
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        default="",
        help="use this context of the kubeconfig (default: its current context)",
    )


def add_leader_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the namespace of the controllers."""
    parser.add_argument(
        "-n",
        "--namespace",
        type=parse_namespace,
        help="namespace of the controllers, whose Lease shows whether one leads (default: "
        "treenail, or the one that has the Lease)",
    )


def parse_namespace(text: str) -> str:
    """Parse the name of a namespace, a DNS label (RFC 1123)."""
    if not _DNS_LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected at most 63 lower-case letters, digits and dashes, with a letter or digit at "
            f"each end, found {text!r:.80}"
        )
    return text


def find_kubeconfigs(kubeconfig: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return the files to read: the given one, those of the list in KUBECONFIG, or the default.

    As kubectl does, skip files of a list that do not exist, unless none does.
    """
    if kubeconfig:
        return [kubeconfig]
    listed = [path for path in environment.get("KUBECONFIG", "").split(os.pathsep) if path]
    existing = [path for path in listed if not _is_missing(path)]
    return existing or listed[:1] or [str(_find_home() / ".kube/config")]


def _is_missing(path: str) -> bool:
    """Return whether the file does not exist; one that may not be read is not missing."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _find_home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        # A container whose user has neither HOME nor an entry in /etc/passwd.
        return Path("/")


@contextmanager
def connect_cluster(arguments: argparse.Namespace) -> Iterator[api_client.Client]:
    """Connect with the kubeconfigs and the context of the arguments; raise `UsageError`.

    As kubectl does, use the service account of a pod that has no kubeconfig. Adds a remedy to the
    error of an API server that does not answer, and of a user without access.
    """
    transport = _choose_transport(arguments.kubeconfig, arguments.context, clocks.SystemClock())
    try:
        yield api_client.Client(transport)
    except errors.UnreachableError as error:
        raise errors.UnreachableError(
            f"cannot read the cluster: {error}",
            remedy=error.remedy
            or "check the server of the context: kubectl config view --minify; another context: "
            "--context NAME",
        ) from error
    except errors.ForbiddenError as error:
        raise errors.ForbiddenError(
            str(error),
            remedy=error.remedy
            or "show what the user may do: kubectl auth can-i --list; another user: --kubeconfig "
            "FILE or --context NAME",
        ) from error
    finally:
        transport.close()


def _choose_transport(
    kubeconfig: str | None, context: str, clock: clocks.Clock
) -> api_client.Transport:
    paths = find_kubeconfigs(kubeconfig, os.environ)
    is_chosen = bool(kubeconfig or context or os.environ.get("KUBECONFIG"))
    if not is_chosen and "KUBERNETES_SERVICE_HOST" in os.environ and _is_missing(paths[0]):
        return create_pod_transport(clock)
    return create_transport(paths, context, clock)


def create_transport(
    paths: list[str], context: str, clock: clocks.Clock, *, max_kept: int = 1
) -> api_client.Transport:
    """Connect with a context of these kubeconfigs; raise `UsageError`.

    A certificate or a token needs no other package. The package ``kubernetes`` runs credential
    plugins and connects through a proxy.
    """
    try:
        connection = read_kubeconfigs(paths, context=context)
        _refuse_proxy(connection)
        return HttpTransport(connection, clock, max_kept=max_kept)
    except UnsupportedKubeconfigError as error:
        package = _import_package(error)
    # The package reads current-context from the first file only.
    context = context or find_current_context(paths)
    return package.from_kubeconfig(os.pathsep.join(paths), clock, context=context)


def create_process_transport(
    kubeconfig: str | None, context: str, clock: clocks.Clock
) -> api_client.Transport:
    """Connect with a kubeconfig, or as the service account of the pod; raise `UsageError`."""
    if kubeconfig is not None:
        return create_transport([kubeconfig], context, clock, max_kept=_MAX_KEPT_CONNECTIONS)
    if context:
        raise errors.UsageError(
            "cannot use --context without a kubeconfig", remedy="add --kubeconfig"
        )
    return create_pod_transport(clock, max_kept=_MAX_KEPT_CONNECTIONS)


def create_pod_transport(clock: clocks.Clock, *, max_kept: int = 1) -> api_client.Transport:
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
    from treenail.registry.proxies import read_proxy_settings

    address = urlsplit(connection.server)
    if read_proxy_settings(os.environ).find_proxy(address.hostname or "", address.port or 443):
        raise UnsupportedKubeconfigError(
            f"cannot connect to {address.netloc} through the proxy that HTTPS_PROXY names",
            remedy=f"add {address.hostname} to NO_PROXY, or install the Python package kubernetes",
        )


def _import_package(otherwise: errors.UsageError) -> "type[OfficialTransport]":
    # Imported late: it takes half a second and 40 MiB, and few kubeconfigs need it.
    try:
        from treenail.kube.transport.official import OfficialTransport
    except ModuleNotFoundError as error:
        raise otherwise from error
    return OfficialTransport
