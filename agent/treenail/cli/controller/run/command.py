"""``treenail-controller run``: construct the controllers and run them until SIGTERM or SIGINT."""

import argparse
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api.component_names import PART_OF_LABELS
from treenail.api.decode import Json
from treenail.cli import output, terminal
from treenail.cli.controller import connect
from treenail.cli.controller.run import controllers
from treenail.controllers.runtime import (
    controller_metrics,
    health,
    http_server,
    informer_set,
    runtime,
)
from treenail.kube import api_client, event_recorder, lease, resources
from treenail.log import log_to_stderr
from treenail.manifests import installation

if TYPE_CHECKING:
    from treenail.controllers.status.leader_status import LeaderReport


log = logging.getLogger(__name__)

DEFAULT_WEB_ADDRESS = f"127.0.0.1:{installation.WEB_PORT}"
"""`kubectl port-forward` connects to the loopback interface of the pod."""
# Longer than the defaults of client-go: a leader survives a restart of the API server.
_LEASE_S, _RENEW_S, _RETRY_S, _CALL_TIMEOUT_S = 60.0, 40.0, 5.0, 10.0
_FLUSH_LIMIT_S = 5.0
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?\.?")
_MAX_HOST_LENGTH = 253
_SERVICE_ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "run",
        help="run controllers",
        description="Run controllers until SIGTERM or SIGINT. Of several processes the one that "
        f"holds the Lease {installation.NAME} is active.",
        epilog=terminal.format_examples(
            (
                "run one controller outside the cluster",
                "treenail-controller run --enable render --kubeconfig FILE --no-leader-election",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "--enable", type=controllers.parse_controllers, required=True, metavar="NAME,...",
        help=f"run these of {', '.join(controllers.CONTROLLERS)}",
    )  # fmt: skip
    connect.add_connection_arguments(parser, default=connect.POD_ACCOUNT)
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", default="127.0.0.1:8080",
        help="serve /metrics, /healthz and /readyz at this address (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--web",
        metavar="HOST:PORT",
        nargs="?",
        const=DEFAULT_WEB_ADDRESS,
        help="serve a read-only page about pools, their image builds and nodes; it asks for no "
        "password, so keep it on the loopback interface (without HOST:PORT: %(const)s; default: "
        "serve no page)",
    )
    parser.add_argument(
        "--web-host", action="append", default=[], type=_parse_host, metavar="NAME",
        help="serve the page also to browsers that use this host name; repeatable (default: "
        "localhost, and IP addresses unless the page is on the loopback interface)",
    )  # fmt: skip
    parser.add_argument("-n", "--namespace", type=connect.parse_namespace,
                        help="namespace of the Lease for leader election (default: that of the "
                        "pod)")  # fmt: skip
    parser.add_argument(
        "--no-leader-election", action="store_true",
        help="start without leader election; ensure that no other controller process runs",
    )  # fmt: skip
    for name in controllers.CONTROLLERS:
        controllers.load_command(name).add_arguments(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    parser.set_defaults(run=run_controllers)


def run_controllers(arguments: argparse.Namespace) -> int:
    """Run the controllers; return 1 if another process became the leader or a thread died."""
    process = ControllerProcess(arguments)
    log_to_stderr(logging.DEBUG if arguments.verbose else logging.INFO)
    return process.run()


class ControllerProcess:
    """The process of the controllers."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        load_command: Callable[[str], controllers.ControllerCommand] = controllers.load_command,
    ) -> None:
        self._clock = clock = clocks.BootTimeClock()
        self._arguments = arguments
        host, port = http_server.parse_address(arguments.metrics)
        self._transport = connect.create_process_transport(
            arguments.kubeconfig, arguments.context, clock
        )
        client = api_client.Client(self._transport)
        fenced = lease.LeaderTransport(self._transport, lambda: self._runtime.is_leader)
        metrics = controller_metrics.ControllerMetrics()
        identity = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
        self._recorder = event_recorder.EventRecorder(client, installation.NAME, identity, clock)
        context = controllers.ControllerContext(
            transport=fenced,
            late_writes=lease.LateWrites(client, lambda: self._runtime.is_leader),
            recorder=self._recorder,
            clock=clock,
            metrics=metrics,
            own_node_name=os.environ.get("NODE_NAME", ""),
            load_secret=lambda name: client.get(
                resources.SECRETS, name, namespace=self._find_namespace()
            ),
            find_namespace=self._find_namespace,
            is_leader=lambda: self._runtime.is_leader,
        )
        self._elector: lease.LeaderElector | None = None
        make_elector: runtime.MakeElector = runtime.make_sole_leader
        if not arguments.no_leader_election:
            make_elector = self._create_election(self._find_namespace(), identity, clock)
        informers = informer_set.InformerSet(client, clock)
        self._page = _create_page(arguments, informers, clock, self._read_leader)
        self._runtime = runtime.ControllerRuntime(
            [
                controller
                for name in arguments.enable
                for controller in load_command(name).build(context, arguments)
            ],
            informers,
            clock,
            metrics,
            make_elector=make_elector,
        )
        self._health = health.HealthServer(
            host,
            port,
            metrics,
            healthy=lambda: self._runtime.stuck_reason,
            ready=lambda: self._runtime.unready_reason,
            degraded=lambda: self._runtime.degraded_reason,
        )
        self._stop = threading.Event()
        self._exit_code = 0

    def run(self) -> int:
        """Run until a signal; finish what is in progress first."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        signal.signal(signal.SIGINT, lambda *_: self._stop.set())
        threading.excepthook = self._handle_thread_death
        try:
            with self._health, self._page:
                is_leader = self._runtime.run(self._stop)
            self._recorder.flush_within(_FLUSH_LIMIT_S)
        finally:
            self._transport.close()
        if not is_leader:
            log.error("lost lease %s; exiting", installation.NAME)
            return output.EXIT_FAILED
        return self._exit_code

    def _find_namespace(self) -> str:
        """Return the namespace of the controllers; raise `UsageError` where it is unknown."""
        return self._arguments.namespace or _read_own_namespace()

    def _create_election(
        self, namespace: str, identity: str, clock: clocks.Clock
    ) -> runtime.MakeElector:
        client = api_client.Client(self._transport, limit_s=_CALL_TIMEOUT_S)
        candidacy = lease.LeaderElectionConfig(
            namespace,
            installation.NAME,
            identity,
            lease_duration_s=_LEASE_S,
            renew_deadline_s=_RENEW_S,
            retry_period_s=_RETRY_S,
            labels=PART_OF_LABELS,
        )

        def make_elector(gain: Callable[[], None], loss: Callable[[], None]) -> lease.LeaderElector:
            self._elector = lease.LeaderElector(
                client, candidacy, clock, on_started_leading=gain, on_stopped_leading=loss
            )
            return self._elector

        return make_elector

    def _read_leader(self) -> "LeaderReport":
        """Return who leads, as this candidate knows without another request."""
        from treenail.controllers.status.leader_status import (
            LeaderReport,
            LeaderState,
            evaluate_lease,
        )

        if self._runtime.is_leader:
            return LeaderReport(LeaderState.LEADING)
        spec = None if self._elector is None else self._elector.observed_spec
        if spec is None:
            reason = "this process cannot read the Lease; see its log"
            return LeaderReport(LeaderState.UNKNOWN, reason=reason)
        namespace: Json = {"namespace": self._find_namespace()}
        return evaluate_lease({"metadata": namespace, "spec": spec}, now=self._clock.now())

    def _handle_thread_death(self, death: threading.ExceptHookArgs) -> None:
        # Without its watch a controller would never see another change.
        name = death.thread.name if death.thread else "a thread"
        log.critical("thread %s died", name, exc_info=death.exc_value)
        self._exit_code = output.EXIT_FAILED
        self._stop.set()


def _create_page(
    arguments: argparse.Namespace,
    informers: informer_set.InformerSet,
    clock: clocks.Clock,
    read_leader: Callable[[], "LeaderReport"],
) -> AbstractContextManager[object]:
    """Create the server of the page; it does nothing without ``--web``."""
    if arguments.web is None:
        if arguments.web_host:
            raise errors.UsageError("cannot use --web-host without --web", remedy="add --web")
        return nullcontext()
    if "rollout" not in arguments.enable:
        raise errors.UsageError(
            "cannot use --web without the rollout controller: only it may read rollout policies",
            remedy="add rollout to --enable, or leave --web out",
        )
    from treenail.api import annotations as key
    from treenail.controllers.status.statuspage.server import StatusPageServer, StatusSource

    host, port = http_server.parse_address(arguments.web)
    source = StatusSource(
        informers,
        clock,
        image_key=key.PREFIX + arguments.image_annotation,
        read_leader=read_leader,
    )
    return StatusPageServer(host, port, source.read_document, allowed_hosts=arguments.web_host)


def _read_own_namespace() -> str:
    if namespace := os.environ.get("POD_NAMESPACE"):
        return namespace
    try:
        return Path(_SERVICE_ACCOUNT_NAMESPACE).read_text("utf-8").strip()
    except OSError as error:
        raise errors.UsageError(
            "cannot elect a leader: not in a pod, and the namespace of the Lease is not set",
            remedy="set it with --namespace, or use --no-leader-election",
        ) from error


def _parse_host(text: str) -> str:
    if len(text) > _MAX_HOST_LENGTH or not _HOST_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"expected a host name without scheme and port, found {text!r:.80}"
        )
    return text
