"""``treenail-controller serve``: serve Ignition configs until SIGTERM or SIGINT."""

import argparse
import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.cli import argument_parser, output, terminal
from treenail.cli.controller import connect, serve_tokens
from treenail.controllers.runtime.http_server import parse_address
from treenail.log import log_to_stderr

if TYPE_CHECKING:
    from treenail.controllers.runtime.informer_set import InformerSet
    from treenail.provisioning.content.source import FirstImageSettings, PoolSource, SourceSettings
    from treenail.provisioning.machines.request_recorder import RequestLogSettings
    from treenail.provisioning.server.server import IgnitionServer

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = ":22623"
"""The port of the Machine Config Operator's server."""
_PAGE_SIZE, _MAX_PAGES = 10, 4000
_RELEASE_S = 10.0
"""Interval between releases of freed memory: a build of 1 MB frees about 15 MB."""
_REGISTRY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "serve",
        help="serve Ignition configs to new machines",
        description="Serve the Ignition configs of pools with HTTPS at /config/POOL, until SIGTERM "
        "or SIGINT. Read the pools from a cluster, or from a directory.",
        epilog=terminal.format_examples(
            (
                "serve the pools of a cluster",
                "treenail-controller serve --certificate tls.crt --key tls.key --kubeconfig FILE",
            ),
            (
                "serve rendered configs without a cluster",
                "treenail-controller serve --certificate tls.crt --key tls.key --from DIR",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
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
        "-n", "--namespace", type=connect.parse_namespace,
        help="namespace of the access tokens and of the log of requests (default: that of the pod, "
        "or treenail-ignition)",
    )  # fmt: skip
    serve_tokens.add_token_arguments(parser)
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
        serve_tokens.check_token_arguments(arguments)
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
        from treenail.provisioning.server.server import IgnitionServer
        from treenail.provisioning.server.service import ConfigService

        arguments = self._arguments
        settings = SourceSettings(
            key.PREFIX + arguments.image_annotation,
            frozenset(arguments.registry_needs_cluster),
            self._make_first_images(),
        )
        with ExitStack() as stack:
            informers = self._open_informers(stack)
            source = self._open_source(informers, settings)
            metrics = ControllerMetrics()
            access = serve_tokens.open_access(
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
            if arguments.tokens != "require":
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

        client = Client(self._transport, limit_s=serve_tokens.REQUEST_LIMIT_S)
        return ClusterSource(informers, settings, client)

    def _make_first_images(self) -> "FirstImageSettings | None":
        if self._transport is None:
            return None
        from treenail.kube.api_client import Client
        from treenail.provisioning.content.cluster_source import WorkerWait
        from treenail.provisioning.content.source import FirstImageSettings

        client = Client(self._transport, limit_s=serve_tokens.REQUEST_LIMIT_S)
        wait = WorkerWait(client, self._clock)
        return FirstImageSettings(
            wait.has_waiting_workers, self._clock, self._arguments.image_deadline
        )

    def _make_log_settings(self) -> "RequestLogSettings | None":
        if self._transport is None:
            return None
        from treenail.kube.api_client import Client
        from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP
        from treenail.provisioning.machines.request_recorder import RequestLogSettings

        return RequestLogSettings(
            Client(self._transport),
            namespace=serve_tokens.find_namespace(self._arguments),
            name=REQUEST_CONFIGMAP,
            instance=serve_tokens.find_instance(),
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
