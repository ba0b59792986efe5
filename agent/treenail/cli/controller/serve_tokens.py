"""Access tokens of ``treenail-controller serve``: its options, and the access that they choose."""

import argparse
import logging
import os
import re
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api import component_names
from treenail.cli import argument_parser, files
from treenail.kube.transport.kubeconfig import SERVICE_ACCOUNT

if TYPE_CHECKING:
    from treenail.controllers.runtime.controller_metrics import ControllerMetrics
    from treenail.controllers.runtime.informer_set import InformerSet
    from treenail.kube.api_client import Transport
    from treenail.provisioning.content.source import PoolSource
    from treenail.provisioning.tokens.bootstrap_tokens import JoinTarget, SharedCredentials
    from treenail.provisioning.tokens.tokens import Access

log = logging.getLogger(__name__)

MODES = ("off", "ask", "require")
_URL = re.compile(r"https://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?/?")
_BEARER_TOKEN = re.compile(r"[!-~]{1,8192}")
REQUEST_LIMIT_S = 5.0
"""Time limit of a request to the API server, for which a machine waits."""
TOKEN_LIMIT_S = 2.5
"""The same for a use of a token, which takes up to three requests one after the other. Ignition
waits 10 s for the head of a response, and then tries again (internal/resource/http.go)."""


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for access tokens."""
    parser.add_argument(
        "--tokens", choices=MODES, default=MODES[0],
        help="serve every request (off), refuse invalid tokens only (ask), or serve machines with "
        "a token only (require) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-window", type=argument_parser.parse_duration, default=600.0, metavar="DURATION",
        help="let the address that used a token use it again for this time (default: 10m)",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=argument_parser.parse_duration, default=600.0, metavar="DURATION",
        help="accept tokens for this time while the API server is unreachable (default: 10m)",
    )  # fmt: skip
    parser.add_argument(
        "--api-server", metavar="URL", type=parse_server_url,
        help="give machines a bootstrap kubeconfig for the API server at this address (default: "
        "the server of --kubeconfig, or no kubeconfig)",
    )  # fmt: skip
    parser.add_argument(
        "--api-server-ca", metavar="FILE",
        help="CA of the API server, PEM (default: that of the server's own connection)",
    )  # fmt: skip
    parser.add_argument(
        "--bootstrap-token", metavar="FILE",
        help="give all machines the bootstrap token in this file, as the Machine Config Operator "
        "does (default: with --tokens, one for each access token)",
    )  # fmt: skip


def find_namespace(arguments: argparse.Namespace) -> str:
    """Return the namespace of the server's objects."""
    return arguments.namespace or os.environ.get("POD_NAMESPACE") or component_names.IGNITION_SERVER


def find_instance() -> str:
    """Return the name of this server in Events."""
    return os.environ.get("POD_NAME") or socket.gethostname()


def check_token_arguments(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for tokens without a cluster, and for an unreadable file."""
    if arguments.tokens != "off" and arguments.directory is not None:
        raise errors.UsageError(
            "cannot use --tokens with --from: a cluster keeps the tokens",
            remedy="use --tokens off, or read a cluster",
        )
    if arguments.bootstrap_token is not None:
        if _find_target(arguments) is None:
            raise errors.UsageError(
                "cannot use --bootstrap-token: the address of the API server is missing",
                remedy="give the address that machines reach: --api-server https://HOST:6443",
            )
        _read_bootstrap_token(arguments)
    if arguments.api_server_ca is not None:
        _check_authority(arguments.api_server_ca, files.read_input(arguments.api_server_ca))


def _check_authority(file: str, content: bytes) -> None:
    # With another file every machine would receive a kubeconfig that it cannot use.
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise errors.UsageError(
            f"cannot use the CA of the API server in {file:.200}: expected a certificate in PEM",
            remedy="name the file of the cluster, such as /etc/kubernetes/pki/ca.crt",
        )


def open_access(
    stack: ExitStack,
    arguments: argparse.Namespace,
    transport: "Transport | None",
    informers: "InformerSet | None",
    source: "PoolSource",
    metrics: "ControllerMetrics",
    clock: clocks.Clock,
) -> "Access":
    """Return the access that the arguments choose. Call it before the informers start."""
    from treenail.provisioning.tokens.tokens import OpenAccess

    target = _find_target(arguments)
    shared = _make_shared_credentials(arguments, target)
    if arguments.tokens == "off" or transport is None or informers is None:
        return OpenAccess(shared.make_placeholder)
    from treenail.kube.api_client import Client
    from treenail.kube.event_recorder import EventRecorder
    from treenail.provisioning.machines.request_recorder import add_token_metrics
    from treenail.provisioning.machines.token_settlement import TokenUseSettler
    from treenail.provisioning.tokens.bootstrap_tokens import (
        BootstrapCredentials,
        MachineCredentials,
    )
    from treenail.provisioning.tokens.token_access import (
        PoolEvents,
        TokenAccess,
        TokenMode,
        TokenSettings,
    )
    from treenail.provisioning.tokens.token_store import TokenStore

    manager = "treenail-serve"
    client = Client(transport, field_manager=manager, limit_s=REQUEST_LIMIT_S)
    token_client = Client(transport, field_manager=manager, limit_s=TOKEN_LIMIT_S)
    store = TokenStore(token_client, find_namespace(arguments), clock)
    store.add_to_informers(informers)
    add_token_metrics(metrics, lambda: store.observed.table if store.observed else None, clock)
    credentials: MachineCredentials = shared
    if target is not None and arguments.bootstrap_token is None:
        credentials = BootstrapCredentials(token_client, clock, target)
    elif target is None:
        log.warning("machines receive no bootstrap kubeconfig: use --api-server to add one")
    settings = TokenSettings(TokenMode(arguments.tokens), arguments.retry_window, arguments.grace)
    settler = TokenUseSettler(
        store, client, clock, credentials, retry_window_s=arguments.retry_window
    )
    events = PoolEvents(
        EventRecorder(client, component_names.IGNITION_SERVER, find_instance(), clock),
        source.get_pools,
    )

    def settle_uses() -> None:
        events.flush_pending()
        settler.settle_uses()

    access = TokenAccess(
        store,
        clock,
        settings,
        credentials,
        is_watch_current=lambda: not informers.describe_staleness(("secrets",)),
        open_credentials=shared,
        settle_uses=settle_uses,
        report_overuse=events.report_overuse,
    )
    return stack.enter_context(access)


def _make_shared_credentials(
    arguments: argparse.Namespace, target: "JoinTarget | None"
) -> "SharedCredentials":
    from treenail.provisioning.tokens.bootstrap_tokens import SharedCredentials

    if arguments.bootstrap_token is None or target is None:
        return SharedCredentials()
    # Read again each time: the kubelet replaces files of Secrets.
    return SharedCredentials(lambda: target.format_kubeconfig(_read_bootstrap_token(arguments)))


def _find_target(arguments: argparse.Namespace) -> "JoinTarget | None":
    """Return the API server of new machines; None when no address is known."""
    from treenail.kube.transport.kubeconfig import UnsupportedKubeconfigError, read_kubeconfig
    from treenail.provisioning.tokens.bootstrap_tokens import JoinTarget

    url, file = arguments.api_server or "", arguments.api_server_ca
    authority: str | bytes = f"{SERVICE_ACCOUNT}/ca.crt"
    if arguments.kubeconfig:
        try:
            connection = read_kubeconfig(arguments.kubeconfig, context=arguments.context)
        except UnsupportedKubeconfigError:
            # Of a credential plugin; then the options are needed.
            return None if not url or not file else JoinTarget(url, lambda: files.read_input(file))
        url, authority = url or connection.server, connection.ca
    if not url:
        return None
    source = file or authority
    return JoinTarget(
        url, lambda: source if isinstance(source, bytes) else files.read_input(source)
    )


def _read_bootstrap_token(arguments: argparse.Namespace) -> str:
    text = files.read_input(arguments.bootstrap_token).decode("ascii", "replace").strip()
    if not _BEARER_TOKEN.fullmatch(text):
        raise errors.UsageError(
            f"cannot use the bootstrap token in {arguments.bootstrap_token:.200}: expected one "
            "line without spaces",
            remedy="write the token alone into the file; create one with: kubeadm token create",
        )
    return text


def parse_server_url(text: str) -> str:
    """Return the URL of a server; raise `argparse.ArgumentTypeError` if it is none."""
    match = _URL.fullmatch(text)
    if not match or not 1 <= int(match[2] or 443) <= 65535:
        raise argparse.ArgumentTypeError(f"expected https://HOST:PORT, found {text!r:.80}")
    return text.rstrip("/")
