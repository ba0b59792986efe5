"""``treenail-controller run``: construct the controllers and run them until SIGTERM or SIGINT.

The arguments about image builds are also those of ``treenail-controller manifests``.
"""

import argparse
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api.decode import Json
from treenail.cli import argument_parser, output, terminal
from treenail.cli.controller import connect, trust
from treenail.controllers.image_build.job_builder import JobSettings
from treenail.controllers.pools import image_tags
from treenail.controllers.runtime import (
    controller_metrics,
    health,
    http_server,
    informer_set,
    runtime,
    workers,
)
from treenail.kube import api_client, event_recorder, lease, resources
from treenail.log import log_to_stderr
from treenail.manifests import installation

if TYPE_CHECKING:
    from treenail.controllers.status.leader_status import LeaderReport


log = logging.getLogger(__name__)

COMPONENT_NAME = "treenail-controller"
DEFAULT_WEB_ADDRESS = f"127.0.0.1:{installation.WEB_PORT}"
"""`kubectl port-forward` connects to the loopback interface of the pod."""
# Longer than the defaults of client-go: a leader survives a restart of the API server.
_LEASE_S, _RENEW_S, _RETRY_S, _CALL_TIMEOUT_S = 60.0, 40.0, 5.0, 10.0
_MAX_SECONDS, _FLUSH_LIMIT_S = 3600.0, 5.0
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?\.?")
_MAX_HOST_LENGTH = 253
_IMAGE_SETTLE_FACTOR = 2.0
"""An image settles for longer than a MachineConfig, so that one decision covers both."""
_SERVICE_ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True, slots=True)
class ControllerContext:
    """Parts that the controllers are made of."""

    transport: api_client.Transport
    """Sends writes only while this process leads."""
    recorder: event_recorder.EventRecorder
    clock: clocks.Clock
    metrics: controller_metrics.ControllerMetrics
    max_drains: int
    report_blockers_after_s: float
    settle_s: float
    image_annotation: str
    own_node_name: str
    load_secret: Callable[[str], Json]
    """Reads a Secret of the controller's namespace. Raises `ClusterError`."""
    find_namespace: Callable[[], str]
    """Returns the controller's namespace; raises `UsageError` where it is unknown."""
    build_jobs: JobSettings
    signing_key: str
    """File of the key that signs built images; empty for none."""
    token_namespace: str
    """Namespace of the Ignition server, which has the access tokens."""
    late_writes: lease.LateWrites | None = None
    """Withdraws what was created without the lead."""
    handover_deadline_s: float = 3600.0
    """Seconds after which an image of an installation must be in its final registry."""

    def create_client(self, controller: str) -> api_client.Client:
        """Return a client whose writes the API server records under the controller's name."""
        return api_client.Client(self.transport, field_manager=f"treenail-{controller}")


def _build_render(context: ControllerContext) -> tuple[workers.ControllerSettings, ...]:
    from treenail.controllers.render.controller import RenderController

    return (
        workers.ControllerSettings(
            RenderController(
                context.create_client("render"),
                context.clock,
                context.recorder,
                settle_s=context.settle_s,
            )
        ),
    )


def _build_rollout(context: ControllerContext) -> tuple[workers.ControllerSettings, ...]:
    from treenail.api import annotations as key
    from treenail.controllers.rollout.controller import RolloutController
    from treenail.controllers.rollout.external_gates import GateClient
    from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
    from treenail.controllers.rollout.reconcile import RolloutSettings
    from treenail.controllers.runtime.web import WebClient

    image_key = key.PREFIX + context.image_annotation
    client = context.create_client("rollout")
    settings = RolloutSettings(
        image_key=image_key,
        own_node=context.own_node_name,
        # The render controller waits this long before it renders the same change.
        image_settle_s=_IMAGE_SETTLE_FACTOR * context.settle_s,
    )
    gates = GateClient(WebClient(), load_secret=context.load_secret)
    return (
        workers.ControllerSettings(
            RolloutController(
                client,
                context.clock,
                gates,
                context.recorder,
                settings,
                context.metrics,
                tags=make_tag_source(client, context.clock, context.find_namespace),
            )
        ),
        workers.ControllerSettings(
            MachineConfigNodeController(client, context.clock, image_key=image_key),
            workers=4,
        ),
    )


def _build_drain(context: ControllerContext) -> tuple[workers.ControllerSettings, ...]:
    from treenail.controllers.drain.controller import DrainController

    controller = DrainController(
        context.create_client("drain"),
        context.recorder,
        context.clock,
        context.metrics,
        max_parallel=context.max_drains,
        report_after_s=context.report_blockers_after_s,
    )
    return (workers.ControllerSettings(controller, workers=8, max_retry_s=15.0),)


def _build_build(context: ControllerContext) -> tuple[workers.ControllerSettings, ...]:
    from treenail.controllers.handover.controller import InstallationGate
    from treenail.controllers.image_build.controller import BuildOptions, make_build_controller
    from treenail.registry.proxies import read_proxy_settings

    client = context.create_client("build")
    controller = make_build_controller(
        client,
        context.clock,
        context.recorder,
        context.metrics,
        context.build_jobs,
        BuildOptions(
            proxies=read_proxy_settings(os.environ),
            signing_key=trust.load_key(context.signing_key) if context.signing_key else None,
            find_hold_reason=InstallationGate(client, context.clock).find_hold_reason,
            late_writes=context.late_writes,
        ),
    )
    return (workers.ControllerSettings(controller, workers=4, max_retry_s=30.0),)


def _build_install(context: ControllerContext) -> tuple[workers.ControllerSettings, ...]:
    from treenail.controllers.handover.controller import InstallController
    from treenail.controllers.handover.image_mover import ImageMover
    from treenail.controllers.image_build.cluster_reader import ClusterReader
    from treenail.registry.proxies import read_proxy_settings

    client = context.create_client("install")
    reader = ClusterReader(client, context.clock, namespace=context.build_jobs.namespace)
    controller = InstallController(
        client,
        context.clock,
        context.recorder,
        ImageMover(reader, context.clock, proxies=read_proxy_settings(os.environ)),
        deadline_s=context.handover_deadline_s,
        metrics=context.metrics,
    )
    return (workers.ControllerSettings(controller, workers=1, max_retry_s=15.0),)


def _build_approve(context: ControllerContext) -> tuple[workers.ControllerSettings, ...]:
    from treenail.provisioning.approval.controller import ApprovalController

    parts = context.create_client("approve"), context.clock, context.recorder
    controller = ApprovalController(*parts, context.token_namespace)
    return (workers.ControllerSettings(controller, workers=1, max_retry_s=15.0),)


ControllerBuilder = Callable[[ControllerContext], tuple[workers.ControllerSettings, ...]]

# Imported late: a process loads only the controllers that it runs.
CONTROLLER_BUILDERS: Mapping[str, ControllerBuilder] = {
    "render": _build_render,
    "rollout": _build_rollout,
    "drain": _build_drain,
    "approve": _build_approve,
    "build": _build_build,
    "install": _build_install,
}
CONTROLLERS = tuple(CONTROLLER_BUILDERS)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "run",
        help="run controllers",
        description="Run controllers until SIGTERM or SIGINT. Of several processes the one that "
        f"holds the Lease {COMPONENT_NAME} is active.",
        epilog=terminal.format_examples(
            (
                "run one controller outside the cluster",
                "treenail-controller run --enable render --kubeconfig FILE --no-leader-election",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("--enable", type=parse_controllers, required=True, metavar="NAME,...",
                        help=f"run these of {', '.join(CONTROLLERS)}")  # fmt: skip
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
    parser.add_argument(
        "--serve-namespace", type=connect.parse_namespace, default="treenail-ignition",
        metavar="NAME",
        help="let approve find access tokens in this namespace (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--drains", type=argument_parser.parse_count, default=50, metavar="N",
        help="drain at most N nodes at the same time, in all pools (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--name-after", type=_parse_seconds, default=30.0, metavar="S",
        help="report what blocks a drain, on the Node, in an Event and in its MachineConfigNode, "
        "after S seconds (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--settle", type=_parse_seconds, default=5.0, metavar="S",
        help="render a pool after its MachineConfigs have not changed for S seconds "
        "(default: %(default)g)",
    )  # fmt: skip
    argument_parser.add_image_annotation_argument(parser)
    parser.add_argument(
        "--handover-deadline", type=argument_parser.parse_duration, default=3600.0, metavar="TIME",
        help="report that an image of an installation is not in its final registry after this "
        "time; install retries further (default: 60m)",
    )  # fmt: skip
    add_build_arguments(parser)
    trust.add_key_argument(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    parser.set_defaults(run=run_controllers)


def run_controllers(arguments: argparse.Namespace) -> int:
    """Run the controllers; return 1 if another process became the leader or a thread died."""
    process = ControllerProcess(arguments)
    log_to_stderr(logging.DEBUG if arguments.verbose else logging.INFO)
    return process.run()


def parse_controllers(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of controllers; drop duplicates."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := [name for name in names if name not in CONTROLLER_BUILDERS]:
        known = ", ".join(CONTROLLERS)
        raise argparse.ArgumentTypeError(f"unknown controller {unknown[0]!r}, expected {known}")
    if not names:
        raise argparse.ArgumentTypeError("expected at least one controller")
    return names


class ControllerProcess:
    """The process of the controllers."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        builders: Mapping[str, ControllerBuilder] = CONTROLLER_BUILDERS,
    ) -> None:
        self._clock = clock = clocks.BootTimeClock()
        self._namespace = ""
        host, port = http_server.parse_address(arguments.metrics)
        self._transport = connect.create_process_transport(
            arguments.kubeconfig, arguments.context, clock
        )
        client = api_client.Client(self._transport)
        fenced = lease.LeaderTransport(self._transport, lambda: self._runtime.is_leader)
        metrics = controller_metrics.ControllerMetrics()
        identity = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
        self._recorder = event_recorder.EventRecorder(client, COMPONENT_NAME, identity, clock)
        context = ControllerContext(
            transport=fenced,
            late_writes=lease.LateWrites(client, lambda: self._runtime.is_leader),
            recorder=self._recorder,
            clock=clock,
            metrics=metrics,
            max_drains=arguments.drains,
            report_blockers_after_s=arguments.name_after,
            settle_s=arguments.settle,
            image_annotation=arguments.image_annotation,
            own_node_name=os.environ.get("NODE_NAME", ""),
            load_secret=lambda name: client.get(
                resources.SECRETS, name, namespace=arguments.namespace or _read_own_namespace()
            ),
            find_namespace=lambda: arguments.namespace or _read_own_namespace(),
            build_jobs=_read_build_settings(arguments),
            signing_key=arguments.signing_key,
            token_namespace=arguments.serve_namespace,
            handover_deadline_s=arguments.handover_deadline,
        )
        self._elector: lease.LeaderElector | None = None
        make_elector: runtime.MakeElector = runtime.make_sole_leader
        if not arguments.no_leader_election:
            make_elector = self._create_election(
                arguments.namespace or _read_own_namespace(), identity, clock
            )
        informers = informer_set.InformerSet(client, clock)
        self._page = _create_page(arguments, informers, clock, self._read_leader)
        self._runtime = runtime.ControllerRuntime(
            [controller for name in arguments.enable for controller in builders[name](context)],
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
            log.error("lost lease %s; exiting", COMPONENT_NAME)
            return output.EXIT_FAILED
        return self._exit_code

    def _create_election(
        self, namespace: str, identity: str, clock: clocks.Clock
    ) -> runtime.MakeElector:
        self._namespace = namespace
        client = api_client.Client(self._transport, limit_s=_CALL_TIMEOUT_S)
        candidacy = lease.LeaderElectionConfig(
            namespace,
            COMPONENT_NAME,
            identity,
            lease_duration_s=_LEASE_S,
            renew_deadline_s=_RENEW_S,
            retry_period_s=_RETRY_S,
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
        namespace: Json = {"namespace": self._namespace}
        return evaluate_lease({"metadata": namespace, "spec": spec}, now=self._clock.now())

    def _handle_thread_death(self, death: threading.ExceptHookArgs) -> None:
        # Without its watch a controller would never see another change.
        name = death.thread.name if death.thread else "a thread"
        log.critical("thread %s died", name, exc_info=death.exc_value)
        self._exit_code = output.EXIT_FAILED
        self._stop.set()


def _read_build_settings(arguments: argparse.Namespace) -> JobSettings:
    if not {"build", "install"} & set(arguments.enable):
        return JobSettings()
    namespace = arguments.build_namespace or arguments.namespace or _read_own_namespace()
    return read_job_settings(arguments, namespace)


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
    from treenail.controllers.status.statuspage.server import StatusPageServer
    from treenail.controllers.status.statuspage.source import StatusSource

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


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected seconds from 0 to {_MAX_SECONDS:g}, found {text!r}"
        )
    return seconds


_QUANTITY = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    defaults = JobSettings()
    parser.add_argument(
        "--builder-image",
        metavar="IMAGE",
        default=defaults.image,
        help="build OS images with this image, which contains buildah and treenail (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--build-namespace",
        metavar="NAME",
        type=connect.parse_namespace,
        help="namespace of the Jobs, Secrets and ConfigMaps of builds (default: that of the "
        "controllers)",
    )
    for name, default, what in (
        ("cpu", defaults.cpu, "CPU that a build requests"),
        ("memory", defaults.memory, "memory that a build requests and may use"),
        ("storage", defaults.storage, "disk space that a build may use"),
    ):
        parser.add_argument(
            f"--build-{name}",
            metavar="QUANTITY",
            type=parse_quantity,
            default=default,
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--build-cache",
        metavar="REPOSITORY",
        default="",
        help="store layers of builds in this repository, for later builds (default: no cache)",
    )


def read_job_settings(arguments: argparse.Namespace, namespace: str) -> JobSettings:
    """Return the settings of Jobs in a namespace."""
    return JobSettings(
        image=arguments.builder_image,
        namespace=namespace,
        cpu=arguments.build_cpu,
        memory=arguments.build_memory,
        storage=arguments.build_storage,
        cache_repository=arguments.build_cache,
    )


def parse_quantity(text: str) -> str:
    """Parse a quantity of Kubernetes."""
    if not _QUANTITY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a quantity such as 2Gi, found {text!r:.40}")
    return text


def make_tag_source(
    client: api_client.Client, clock: clocks.Clock, find_namespace: Callable[[], str]
) -> image_tags.LazyTagSource:
    """Make a source that reads logins from the namespace of the controllers."""

    def make() -> image_tags.TagSource:
        from treenail.controllers.image_build.cluster_reader import ClusterReader
        from treenail.controllers.image_build.layer_builder import TagResolver
        from treenail.registry.proxies import read_proxy_settings

        try:
            namespace = find_namespace()
        except errors.UsageError:
            # On a host, without --namespace.
            namespace = "default"
        reader = ClusterReader(client, clock, namespace=namespace)
        return TagResolver(reader, clock, proxies=read_proxy_settings(os.environ))

    return image_tags.LazyTagSource(make)
