"""``treenail-controller serve``: serve Ignition configs until SIGTERM or SIGINT."""

import argparse
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import component_names
from treenail.cli import argument_parser, files, output, terminal
from treenail.cli.controller import connect
from treenail.controllers.runtime.http_server import parse_address
from treenail.kube.transport.kubeconfig import SERVICE_ACCOUNT
from treenail.log import log_to_stderr

if TYPE_CHECKING:
    from treenail.controllers.runtime.controller_metrics import ControllerMetrics
    from treenail.controllers.runtime.informer_set import InformerSet
    from treenail.kube.api_client import Transport
    from treenail.provisioning.content.source import FirstImageSettings, PoolSource, SourceSettings
    from treenail.provisioning.machines.request_recorder import RequestLogSettings
    from treenail.provisioning.server.server import IgnitionServer, ServerLimits
    from treenail.provisioning.tokens.bootstrap_tokens import JoinTarget, SharedCredentials
    from treenail.provisioning.tokens.hosted_tokens import HostedTokens
    from treenail.provisioning.tokens.tokens import Access


log = logging.getLogger(__name__)

DEFAULT_ADDRESS = ":22623"
"""The port of the Machine Config Operator's server."""
_PAGE_SIZE, _MAX_PAGES = 10, 4000
_RELEASE_S = 10.0
"""Interval between releases of freed memory: a build of 1 MB frees about 15 MB."""
_PER_ADDRESS, _PER_ADDRESS_HOSTED = 8, 64
_REGISTRY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "serve",
        help="serve Ignition configs to new machines",
        description="Serve the Ignition configs of pools with HTTPS at /config/POOL, until SIGTERM "
        "or SIGINT. Read the pools from a cluster, or from a directory. With --hosted serve the "
        "NodePools that treenail owns at /ignition.",
        epilog=terminal.format_examples(
            (
                "serve the pools of a cluster",
                "treenail-controller serve --certificate tls.crt --key tls.key --kubeconfig FILE",
            ),
            (
                "serve the NodePools of hosted clusters",
                "treenail-controller serve --hosted --certificate tls.crt --key tls.key",
            ),
            (
                "serve rendered configs without a cluster",
                "treenail-controller serve --certificate tls.crt --key tls.key --from DIR",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "--hosted", action="store_true",
        help="serve the machines of hosted clusters, with the tokens in the Secrets of their "
        "NodePools; --namespace names those of the control planes (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=DEFAULT_ADDRESS,
        help="listen on this address (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--certificate", metavar="FILE", type=Path, required=True,
        help="certificate chain of the server, PEM; loaded again when it changes",
    )  # fmt: skip
    parser.add_argument(
        "--key", metavar="FILE", type=Path, required=True,
        help="private key of the certificate, PEM without a password; loaded again when it "
        "changes",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="directory", metavar="DIR", type=Path,
        help="read pools, rendered configs and the ControllerConfig from the .yaml, .yml and .json "
        "files of this directory (default: read a cluster)",
    )  # fmt: skip
    connect.add_connection_arguments(parser, default=connect.POD_ACCOUNT)
    parser.add_argument(
        "-n", "--namespace", type=_parse_namespaces,
        help="namespace of the access tokens and of the log of requests (default: that of the pod, "
        "or treenail-ignition); with --hosted a list of namespaces with commas",
    )  # fmt: skip
    parser.add_argument(
        "--connections-per-address", type=argument_parser.parse_count, metavar="N",
        help="serve at most N connections of an address at a time. Machines behind one router "
        f"share an address (default: {_PER_ADDRESS}, with --hosted {_PER_ADDRESS_HOSTED})",
    )  # fmt: skip
    add_token_arguments(parser)
    parser.add_argument(
        "--expect", type=argument_parser.parse_duration, default=1200.0, metavar="TIME",
        help="record an Event when no Node appears within this time after a machine received its "
        "config, such as 45s, 30m or 1h30m (default: 20m)",
    )  # fmt: skip
    add_document_arguments(parser)
    parser.add_argument(
        "--image-deadline", type=argument_parser.parse_duration, default=3600.0, metavar="TIME",
        help="in a cluster that was installed in image mode with workers that wait: serve the "
        "stock image to new machines of a pool that has no image this time after its "
        "MachineOSConfig was created (default: 60m)",
    )  # fmt: skip
    parser.add_argument(
        "--cache", type=argument_parser.parse_count, default=64, metavar="N",
        help="keep at most N built configs in memory (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", default="127.0.0.1:8080",
        help="serve /metrics, /healthz and /readyz at this address (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    parser.set_defaults(run=serve_configs)


def _parse_namespaces(text: str) -> str:
    return ",".join(map(connect.parse_namespace, text.split(",")))


def add_document_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that change the served documents."""
    parser.add_argument(
        "--registry-needs-cluster", metavar="HOST", action="append", default=[],
        type=parse_registry,
        help="name no image of this registry, HOST or HOST:PORT, to machines: they cannot reach it "
        "before they join; repeatable",
    )  # fmt: skip
    argument_parser.add_image_annotation_argument(parser)


def serve_configs(arguments: argparse.Namespace) -> int:
    """Serve until a signal; return 1 if a thread died."""
    process = ServeProcess(arguments)
    log_to_stderr(logging.DEBUG if arguments.verbose else logging.INFO)
    return process.run()


class ServeProcess:
    """The process of the server."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Load the certificate and the kubeconfig; raise `UsageError`."""
        from treenail.provisioning.server.certificate import ServerCertificate

        if arguments.directory is not None and (arguments.kubeconfig or arguments.context):
            raise errors.UsageError(
                "cannot use --from with a kubeconfig: the server reads a directory or a cluster",
                remedy="leave one of the two out",
            )
        check_token_arguments(arguments)
        if arguments.hosted and (arguments.directory or arguments.tokens != MODES[0]):
            raise errors.UsageError(
                "cannot use --hosted with --from or --tokens: Secrets of the NodePools decide",
                remedy="leave these options out",
            )
        if not arguments.hosted and "," in (arguments.namespace or ""):
            raise errors.UsageError("cannot use several namespaces without --hosted")
        self._arguments = arguments
        if arguments.directory is not None and not arguments.directory.is_dir():
            raise errors.UsageError(f"cannot read {arguments.directory}: expected a directory")
        self._address = parse_address(arguments.listen)
        self._health_address = parse_address(arguments.metrics)
        self._clock: clocks.Clock = clocks.BootTimeClock()
        self._certificate = ServerCertificate(arguments.certificate, arguments.key)
        self._transport = (
            connect.create_process_transport(arguments.kubeconfig, arguments.context, self._clock)
            if arguments.directory is None
            else None
        )
        self._stop = threading.Event()
        self._exit_code = 0

    def run(self) -> int:
        """Serve until a signal; responses in progress end first."""
        from treenail.memory import limit_allocator, release_freed_memory

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        threading.excepthook = self._handle_thread_death
        limit_allocator()
        with ExitStack() as stack:
            stack.enter_context(self.start())
            while not self._stop.wait(_RELEASE_S):
                release_freed_memory()
        return self._exit_code

    @contextmanager
    def start(self) -> "Iterator[IgnitionServer]":
        """Serve while the context lasts."""
        from treenail.controllers.runtime.controller_metrics import ControllerMetrics
        from treenail.controllers.runtime.health import HealthServer
        from treenail.provisioning.content.source import SourceSettings
        from treenail.provisioning.machines.request_recorder import open_request_log
        from treenail.provisioning.server.server import HOSTED_ROUTE, POOL_ROUTE, IgnitionServer
        from treenail.provisioning.server.service import ConfigService

        arguments = self._arguments
        settings = SourceSettings(
            key.PREFIX + arguments.image_annotation,
            frozenset(arguments.registry_needs_cluster),
            self._make_first_images(),
        )
        with ExitStack() as stack:
            informers = self._open_informers(stack)
            metrics = ControllerMetrics()
            source: PoolSource
            access: Access
            if arguments.hosted and informers is not None:
                source = access = self._open_hosted(informers)
            else:
                source = self._open_source(informers, settings)
                access = open_access(
                    stack, arguments, self._transport, informers, source, metrics, self._clock
                )
            if informers is not None:
                informers.start()
            health = HealthServer(
                *self._health_address,
                metrics,
                healthy=lambda: "",
                ready=source.describe_unready,
            )
            stack.enter_context(health)
            service = ConfigService(source, access, cache_entries=arguments.cache)
            requests = stack.enter_context(
                open_request_log(self._make_log_settings(), source, metrics, self._clock)
            )
            if arguments.tokens != "require" and not arguments.hosted:
                log.warning(
                    "serving configs without authentication: every client that reaches the server "
                    "receives the secrets of the pools"
                )
            server = IgnitionServer(
                self._address,
                self._certificate,
                service,
                requests,
                clock=self._clock,
                limits=self._make_limits(),
                route=HOSTED_ROUTE if arguments.hosted else POOL_ROUTE,
            )
            yield stack.enter_context(server)

    def _open_informers(self, stack: ExitStack) -> "InformerSet | None":
        if self._transport is None:
            return None
        from treenail.controllers.runtime.informer_set import InformerSet
        from treenail.kube.api_client import Client

        stack.callback(self._transport.close)
        # A rendered config may have a megabyte, and a page is complete in memory.
        client = Client(self._transport, page_size=_PAGE_SIZE, max_pages=_MAX_PAGES)
        informers = InformerSet(client, self._clock)
        stack.callback(informers.stop)
        return informers

    def _open_source(
        self, informers: "InformerSet | None", settings: "SourceSettings"
    ) -> "PoolSource":
        if informers is None or self._transport is None:
            from treenail.provisioning.content.directory_source import DirectorySource

            return DirectorySource(self._arguments.directory, settings)
        from treenail.kube.api_client import Client
        from treenail.provisioning.content.cluster_source import ClusterSource

        client = Client(self._transport, limit_s=REQUEST_LIMIT_S)
        return ClusterSource(informers, settings, client)

    def _open_hosted(self, informers: "InformerSet") -> "HostedTokens":
        from treenail.kube.api_client import Client
        from treenail.provisioning.tokens.hosted_tokens import HostedTokens

        assert self._transport is not None
        client = Client(self._transport, field_manager="treenail-serve", limit_s=TOKEN_LIMIT_S)
        namespaces = [*filter(None, (self._arguments.namespace or "").split(","))]
        return HostedTokens(informers, client, self._clock, namespaces)

    def _make_limits(self) -> "ServerLimits":
        from treenail.provisioning.server.server import ServerLimits

        count: int = self._arguments.connections_per_address or (
            _PER_ADDRESS_HOSTED if self._arguments.hosted else _PER_ADDRESS
        )
        defaults = ServerLimits()
        return ServerLimits(
            connections=max(defaults.connections, 2 * count),
            per_address=count,
            per_block=max(defaults.per_block, count),
        )

    def _make_first_images(self) -> "FirstImageSettings | None":
        if self._transport is None:
            return None
        from treenail.kube.api_client import Client
        from treenail.provisioning.content.cluster_source import WorkerWait
        from treenail.provisioning.content.source import FirstImageSettings

        client = Client(self._transport, limit_s=REQUEST_LIMIT_S)
        wait = WorkerWait(client, self._clock)
        return FirstImageSettings(
            wait.has_waiting_workers, self._clock, self._arguments.image_deadline
        )

    def _make_log_settings(self) -> "RequestLogSettings | None":
        if self._transport is None or self._arguments.hosted:
            return None
        from treenail.kube.api_client import Client
        from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP
        from treenail.provisioning.machines.request_recorder import RequestLogSettings

        return RequestLogSettings(
            Client(self._transport),
            namespace=find_namespace(self._arguments),
            name=REQUEST_CONFIGMAP,
            instance=find_instance(),
            expect_s=self._arguments.expect,
        )

    def _handle_thread_death(self, death: threading.ExceptHookArgs) -> None:
        # Without its watch the server would never see another change.
        name = death.thread.name if death.thread else "a thread"
        log.critical("thread %s died", name, exc_info=death.exc_value)
        self._exit_code = output.EXIT_FAILED
        self._stop.set()


def parse_registry(text: str) -> str:
    """Return the registry in lower case; raise `argparse.ArgumentTypeError` if it is none."""
    if not _REGISTRY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected HOST or HOST:PORT, found {text!r:.80}")
    return text.lower()


# Access tokens

MODES = ("off", "ask", "require")
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
        "--api-server", metavar="URL", type=argument_parser.parse_server_url,
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
