"""``treenail-controller run``: wires the controllers and runs them until told to stop.

They reach the API server by the official ``kubernetes`` package, not by the agent's thin
transport: a controller has the memory for it, and a kubeconfig of a person may name credentials
(exec plugins, identity providers) that are that package's business.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treenail.clock import Clock, SystemClock, format_rfc3339
from treenail.controllers.runtime.health import HealthServer, parse_address
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import ControllerMetrics
from treenail.controllers.runtime.runtime import ControllerRuntime, MakeElector, make_sole_leader
from treenail.controllers.runtime.workers import ControllerSettings
from treenail.errors import UsageError
from treenail.kube.client import Client
from treenail.kube.events import EventRecorder
from treenail.kube.lease import LeaderElectionConfig, LeaderElector

if TYPE_CHECKING:
    from treenail.kube.official import OfficialTransport

log = logging.getLogger(__name__)

COMPONENT_NAME = "treenail-controller"
EXIT_FAILED = 1
# Longer than client-go's: a leader need not start anew when the API server restarts.
_LEASE_S, _RENEW_S, _RETRY_S, _CALL_TIMEOUT_S = 60.0, 40.0, 5.0, 10.0
_MAX_SECONDS = 3600.0
_SERVICE_ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True, slots=True)
class ControllerContext:
    """What controllers are made of."""

    client: Client
    recorder: EventRecorder
    clock: Clock
    metrics: ControllerMetrics
    max_drains: int
    report_blockers_after_s: float
    settle_s: float
    image_annotation: str
    own_node_name: str


def _build_render(kit: ControllerContext) -> tuple[ControllerSettings, ...]:
    from treenail.controllers.render.controller import RenderController

    return (
        ControllerSettings(
            RenderController(kit.client, kit.clock, kit.recorder, settle_s=kit.settle_s)
        ),
    )


def _build_rollout(kit: ControllerContext) -> tuple[ControllerSettings, ...]:
    from treenail.api import annotations as key
    from treenail.controllers.rollout.controller import RolloutSettings
    from treenail.controllers.rollout.gates.asking import GateClient
    from treenail.controllers.rollout.live import RolloutController
    from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
    from treenail.controllers.runtime.web import WebClient

    image_key = key.PREFIX + kit.image_annotation
    settings = RolloutSettings(image_key=image_key, own_node=kit.own_node_name)
    return (
        ControllerSettings(
            RolloutController(
                kit.client, kit.clock, GateClient(WebClient()), kit.recorder, settings
            )
        ),
        ControllerSettings(
            MachineConfigNodeController(kit.client, kit.clock, image_key=image_key), workers=4
        ),
    )


def _build_drain(kit: ControllerContext) -> tuple[ControllerSettings, ...]:
    from treenail.controllers.drain.controller import DrainController

    controller = DrainController(
        kit.client,
        kit.recorder,
        kit.clock,
        kit.metrics,
        max_parallel=kit.max_drains,
        report_after_s=kit.report_blockers_after_s,
    )
    return (ControllerSettings(controller, workers=8, max_retry_s=15.0),)


# Each is imported when it is asked for, so that a process has only what it runs.
CONTROLLER_BUILDERS: Mapping[str, Callable[[ControllerContext], tuple[ControllerSettings, ...]]] = {
    "render": _build_render,
    "rollout": _build_rollout,
    "drain": _build_drain,
}
CONTROLLERS = tuple(CONTROLLER_BUILDERS)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "run",
        help="run controllers until told to stop",
        description="Run controllers. Of several such processes one acts at a time: the one that "
        f"holds the Lease {COMPONENT_NAME}.",
    )
    parser.add_argument("--enable", type=parse_controllers, required=True, metavar="NAME,...",
                        help=f"which of {', '.join(CONTROLLERS)}")  # fmt: skip
    parser.add_argument(
        "--kubeconfig", metavar="FILE", help="how to reach the cluster (the pod's service account)"
    )
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", default="127.0.0.1:8080",
        help="where /metrics, /healthz and /readyz are served (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--namespace", help="where the Lease is (that of the pod)")
    parser.add_argument(
        "--no-leader-election", action="store_true", help="act at once: there is no other process"
    )
    parser.add_argument("--drains", type=_parse_count, default=50, metavar="N",
                        help="nodes that are drained at the same time (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--name-after", type=_parse_seconds, default=30.0, metavar="S",
        help="name what has been in the way of a drain for so many seconds (%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--settle", type=_parse_seconds, default=5.0, metavar="S",
        help="render a pool whose MachineConfigs have not changed for so many seconds "
        "(%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--image-annotation", choices=("desiredOSImage", "desiredImage"), default="desiredOSImage",
        help="how nodes are asked for an image (%(default)s)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    parser.set_defaults(run=run_controllers)


def run_controllers(arguments: argparse.Namespace) -> int:
    """Run the controllers; 1 when another process leads now, or when a thread died of a bug."""
    process = ControllerProcess(arguments)
    _log_to_stderr(logging.DEBUG if arguments.verbose else logging.INFO)
    return process.run()


def parse_controllers(text: str) -> tuple[str, ...]:
    """The controllers that a list with commas names, each once."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in CONTROLLER_BUILDERS:
            known = ", ".join(CONTROLLERS)
            raise argparse.ArgumentTypeError(f"there is no controller {name!r}, only {known}")
    if not names:
        raise argparse.ArgumentTypeError("name at least one controller")
    return names


class ControllerProcess:
    """The wired controllers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        clock = SystemClock()
        host, port = parse_address(arguments.metrics)
        self._transport = _create_transport(arguments.kubeconfig, clock)
        client = Client(self._transport)
        metrics = ControllerMetrics()
        identity = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
        self._recorder = EventRecorder(client, COMPONENT_NAME, identity, clock)
        kit = ControllerContext(
            client=client,
            recorder=self._recorder,
            clock=clock,
            metrics=metrics,
            max_drains=arguments.drains,
            report_blockers_after_s=arguments.name_after,
            settle_s=arguments.settle,
            image_annotation=arguments.image_annotation,
            own_node_name=os.environ.get("NODE_NAME", ""),
        )
        stand: MakeElector = make_sole_leader
        if not arguments.no_leader_election:
            stand = self._create_election(
                arguments.namespace or _read_own_namespace(), identity, clock
            )
        self._runtime = ControllerRuntime(
            [crew for name in arguments.enable for crew in CONTROLLER_BUILDERS[name](kit)],
            Informers(client, clock),
            clock,
            metrics,
            make_elector=stand,
        )
        self._health = HealthServer(
            host,
            port,
            metrics,
            healthy=lambda: self._runtime.stuck_reason,
            ready=lambda: self._runtime.unsynced_reason,
        )
        self._stop = threading.Event()
        self._exit_code = 0

    def run(self) -> int:
        """Run until a signal says to stop; what is under way is finished first."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        threading.excepthook = self._handle_thread_death
        try:
            with self._health:
                leads = self._runtime.run(self._stop)
            self._recorder.flush_pending()
        finally:
            self._transport.close()
        if not leads:
            log.error("the lease is another's now; this process ends")
            return EXIT_FAILED
        return self._exit_code

    def _create_election(self, namespace: str, identity: str, clock: Clock) -> MakeElector:
        client = Client(self._transport, limit_s=_CALL_TIMEOUT_S)
        candidacy = LeaderElectionConfig(
            namespace,
            COMPONENT_NAME,
            identity,
            lease_duration_s=_LEASE_S,
            renew_deadline_s=_RENEW_S,
            retry_period_s=_RETRY_S,
        )
        return lambda gain, loss: LeaderElector(
            client, candidacy, clock, on_started_leading=gain, on_stopped_leading=loss
        )

    def _handle_thread_death(self, death: threading.ExceptHookArgs) -> None:
        # A controller that watches no more would rest while its cluster changes.
        name = death.thread.name if death.thread else "a thread"
        log.critical("%s died", name, exc_info=death.exc_value)
        self._exit_code = EXIT_FAILED
        self._stop.set()


def _create_transport(kubeconfig: str | None, clock: Clock) -> "OfficialTransport":
    try:
        from treenail.kube.official import OfficialTransport
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this command needs the Python package {error.name}, which is not installed",
            remedy="install treenail with its extra 'controller'",
        ) from error
    if kubeconfig is not None:
        return OfficialTransport.from_kubeconfig(kubeconfig, clock)
    return OfficialTransport.from_service_account(clock)


def _read_own_namespace() -> str:
    if namespace := os.environ.get("POD_NAMESPACE"):
        return namespace
    try:
        return Path(_SERVICE_ACCOUNT_NAMESPACE).read_text("utf-8").strip()
    except OSError as error:
        raise UsageError(
            "it is not known in which namespace the Lease is: this is no pod",
            remedy="name it with --namespace, or run alone with --no-leader-election",
        ) from error


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from 0 to {_MAX_SECONDS:g}"
        )
    return found


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{format_rfc3339(record.created)} {record.levelname:7} {super().format(record)}"


def _log_to_stderr(level: int) -> None:
    # A pod's log, wherever it runs: what kubectl logs shows.
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_LineFormatter())
    root = logging.getLogger()
    root.addHandler(stream)
    root.setLevel(level)
    for chatty in ("urllib3", "kubernetes"):
        logging.getLogger(chatty).setLevel(max(level, logging.INFO))
