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

from treenail.clock import Clock, SystemClock, rfc3339
from treenail.controllers.runtime.health import HealthServer, address
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import Metrics
from treenail.controllers.runtime.runtime import Runtime, Stand, alone
from treenail.controllers.runtime.workers import Crew
from treenail.errors import UsageError
from treenail.kube.client import Client
from treenail.kube.events import Recorder
from treenail.kube.lease import Candidacy, Election

if TYPE_CHECKING:
    from treenail.kube.official import OfficialTransport

log = logging.getLogger(__name__)

NAME = "treenail-controller"
FAILED = 1
# Longer than client-go's: a leader need not start anew when the API server restarts.
_LEASE_S, _RENEW_S, _RETRY_S, _CALL_S = 60.0, 40.0, 5.0, 10.0
_MOST_S = 3600.0
_SERVICE_ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True, slots=True)
class Kit:
    """What controllers are made of."""

    client: Client
    recorder: Recorder
    clock: Clock
    metrics: Metrics
    drains: int
    named_after_s: float
    settle_s: float
    image_annotation: str
    own_node: str


def _render(kit: Kit) -> tuple[Crew, ...]:
    from treenail.controllers.render.controller import Rendering

    return (Crew(Rendering(kit.client, kit.clock, kit.recorder, settle_s=kit.settle_s)),)


def _rollout(kit: Kit) -> tuple[Crew, ...]:
    from treenail.api import annotations as key
    from treenail.controllers.rollout.controller import Settings
    from treenail.controllers.rollout.gates.asking import Asker
    from treenail.controllers.rollout.live import Rollout
    from treenail.controllers.rollout.machineconfignodes import MachineConfigNodes
    from treenail.controllers.runtime.web import Web

    image_key = key.PREFIX + kit.image_annotation
    settings = Settings(image_key=image_key, own_node=kit.own_node)
    return (
        Crew(Rollout(kit.client, kit.clock, Asker(Web()), kit.recorder, settings)),
        Crew(MachineConfigNodes(kit.client, kit.clock, image_key=image_key), workers=4),
    )


def _drain(kit: Kit) -> tuple[Crew, ...]:
    from treenail.controllers.drain.controller import DrainController

    controller = DrainController(
        kit.client,
        kit.recorder,
        kit.clock,
        kit.metrics,
        at_once=kit.drains,
        named_after_s=kit.named_after_s,
    )
    return (Crew(controller, workers=8, most_s=15.0),)


# Each is imported when it is asked for, so that a process has only what it runs.
BUILDERS: Mapping[str, Callable[[Kit], tuple[Crew, ...]]] = {
    "render": _render,
    "rollout": _rollout,
    "drain": _drain,
}
CONTROLLERS = tuple(BUILDERS)


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "run",
        help="run controllers until told to stop",
        description="Run controllers. Of several such processes one acts at a time: the one that "
        f"holds the Lease {NAME}.",
    )
    parser.add_argument("--enable", type=controllers, required=True, metavar="NAME,...",
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
    parser.add_argument("--drains", type=_count, default=50, metavar="N",
                        help="nodes that are drained at the same time (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--name-after", type=_seconds, default=30.0, metavar="S",
        help="name what has been in the way of a drain for so many seconds (%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--settle", type=_seconds, default=5.0, metavar="S",
        help="render a pool whose MachineConfigs have not changed for so many seconds "
        "(%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--image-annotation", choices=("desiredOSImage", "desiredImage"), default="desiredOSImage",
        help="how nodes are asked for an image (%(default)s)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the controllers; 1 when another process leads now, or when a thread died of a bug."""
    process = Process(arguments)
    _log_to_stderr(logging.DEBUG if arguments.verbose else logging.INFO)
    return process.run()


def controllers(text: str) -> tuple[str, ...]:
    """The controllers that a list with commas names, each once."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in BUILDERS:
            known = ", ".join(CONTROLLERS)
            raise argparse.ArgumentTypeError(f"there is no controller {name!r}, only {known}")
    if not names:
        raise argparse.ArgumentTypeError("name at least one controller")
    return names


class Process:
    """The wired controllers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        clock = SystemClock()
        host, port = address(arguments.metrics)
        self._transport = _transport(arguments.kubeconfig, clock)
        client = Client(self._transport)
        metrics = Metrics()
        identity = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
        self._recorder = Recorder(client, NAME, identity, clock)
        kit = Kit(
            client=client,
            recorder=self._recorder,
            clock=clock,
            metrics=metrics,
            drains=arguments.drains,
            named_after_s=arguments.name_after,
            settle_s=arguments.settle,
            image_annotation=arguments.image_annotation,
            own_node=os.environ.get("NODE_NAME", ""),
        )
        stand: Stand = alone
        if not arguments.no_leader_election:
            stand = self._standing(arguments.namespace or _own_namespace(), identity, clock)
        self._runtime = Runtime(
            [crew for name in arguments.enable for crew in BUILDERS[name](kit)],
            Informers(client, clock),
            clock,
            metrics,
            stand=stand,
        )
        self._health = HealthServer(
            host,
            port,
            metrics,
            healthy=lambda: self._runtime.stuck,
            ready=lambda: self._runtime.missing,
        )
        self._stop = threading.Event()
        self._exit_code = 0

    def run(self) -> int:
        """Run until a signal says to stop; what is under way is finished first."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        threading.excepthook = self._thread_died
        try:
            with self._health:
                leads = self._runtime.run(self._stop)
            self._recorder.flush()
        finally:
            self._transport.close()
        if not leads:
            log.error("the lease is another's now; this process ends")
            return FAILED
        return self._exit_code

    def _standing(self, namespace: str, identity: str, clock: Clock) -> Stand:
        client = Client(self._transport, limit_s=_CALL_S)
        candidacy = Candidacy(
            namespace, NAME, identity, lease_s=_LEASE_S, renew_s=_RENEW_S, retry_s=_RETRY_S
        )
        return lambda gain, loss: Election(client, candidacy, clock, on_gain=gain, on_loss=loss)

    def _thread_died(self, death: threading.ExceptHookArgs) -> None:
        # A controller that watches no more would rest while its cluster changes.
        name = death.thread.name if death.thread else "a thread"
        log.critical("%s died", name, exc_info=death.exc_value)
        self._exit_code = FAILED
        self._stop.set()


def _transport(kubeconfig: str | None, clock: Clock) -> "OfficialTransport":
    try:
        from treenail.kube.official import OfficialTransport
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this command needs the Python package {error.name}, which is not installed",
            remedy="install treenail with its extra 'controller'",
        ) from error
    if kubeconfig is not None:
        return OfficialTransport.from_kubeconfig(kubeconfig, clock)
    return OfficialTransport.in_cluster(clock)


def _own_namespace() -> str:
    if namespace := os.environ.get("POD_NAMESPACE"):
        return namespace
    try:
        return Path(_SERVICE_ACCOUNT_NAMESPACE).read_text("utf-8").strip()
    except OSError as error:
        raise UsageError(
            "it is not known in which namespace the Lease is: this is no pod",
            remedy="name it with --namespace, or run alone with --no-leader-election",
        ) from error


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= _MOST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from 0 to {_MOST_S:g}"
        )
    return found


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{rfc3339(record.created)} {record.levelname:7} {super().format(record)}"


def _log_to_stderr(level: int) -> None:
    # A pod's log, wherever it runs: what kubectl logs shows.
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_Line())
    root = logging.getLogger()
    root.addHandler(stream)
    root.setLevel(level)
    for chatty in ("urllib3", "kubernetes"):
        logging.getLogger(chatty).setLevel(max(level, logging.INFO))
