"""``treenail run``: wires the daemon and runs it until it is told to stop."""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from treenail import log as journal
from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.cli.node.choose_backend import (
    choose,
    is_composefs,
    operating_system,
    pins,
    soft_reboots,
)
from treenail.cli.node.local_machine import labelled_disk
from treenail.cli.node.run_probes import health, preflight
from treenail.clock import SystemClock
from treenail.daemon.cluster.controller_config import Trust
from treenail.daemon.cluster.node_client import NodeCluster
from treenail.daemon.cluster.pull_secrets import Credentials
from treenail.daemon.configuration.config_cache import Configs
from treenail.daemon.configuration.drift import DriftCheck
from treenail.daemon.configuration.drift_repair import Sayings, Upkeep
from treenail.daemon.configuration.inspect import AskedStates, Survey
from treenail.daemon.configuration.machine import Configuration
from treenail.daemon.configuration.mcd_state import Predecessor
from treenail.daemon.configuration.path_watcher import PathWatch
from treenail.daemon.configuration.step_runner import Runner
from treenail.daemon.local.metrics import DriftGauge
from treenail.daemon.local.requests import RequestFile
from treenail.daemon.local.status_file import Live
from treenail.daemon.reconcile.crash_counter import Lifeline
from treenail.daemon.reconcile.interfaces import LedgerFile, OperatingSystem, Ports
from treenail.daemon.reconcile.loop import Loop, Pace
from treenail.daemon.reconcile.observe import Observer
from treenail.daemon.reconcile.wakeup import Wakeup
from treenail.daemon.settings.settings import (
    FILE,
    Backend,
    Drain,
    Given,
    ImageFiles,
    Reboots,
    Settings,
    load,
)
from treenail.errors import (
    ClusterError,
    FileError,
    Forbidden,
    LedgerError,
    TreenailError,
    Unreachable,
)
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.ostree.watch import Limits as TransactionLimits
from treenail.host.system.kernel import Kernel
from treenail.host.system.state_file import Ledger
from treenail.host.system.users import Shadow
from treenail.host.systemd.bus import SystemBus
from treenail.host.systemd.logind import Logind
from treenail.host.systemd.sd_notify import Notifier
from treenail.host.systemd.systemd import Systemd
from treenail.kube.client import Client, Json
from treenail.kube.events import Recorder
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.resources import CONTROLLERCONFIGS, NODES
from treenail.kube.transport import HttpTransport
from treenail.kube.watch import Scope, Watch
from treenail.log import MessageId
from treenail.update.status import reason_text

log = logging.getLogger(__name__)

LIVE = "/run/treenail/status.json"
JOURNAL = "/run/systemd/journal/socket"
UNMANAGED = 5
"""The host is one that treenail can't manage; to start it again changes nothing."""


def main(arguments: argparse.Namespace) -> int:
    """Run the agent; returns when it was told to stop, or when this host is not its business."""
    if _sent_back(Root(arguments.root or "/"), lambda error: _degrade(arguments, error)):
        return 0
    settings = _settings(arguments)
    root = Root(settings.root)
    journal.setup(root.path(JOURNAL), level=settings.log_level, stream=sys.stderr)
    kernel = _kernel(root)
    if not kernel.is_ostree():
        return _not_ours(root)
    ledger = Ledger(root)
    with ledger.lock():
        return Agent(settings, root, kernel, ledger).run()


def _not_ours(root: Root) -> int:
    """What there is to do on a host that was not booted from OSTree: to say so, once."""
    # A service that leaves before it is ready has failed, and is started again.
    Notifier(os.environ).ready()
    if is_composefs(root, SystemClock()):
        log.error(
            "bootc manages %s with its composefs back end; treenail needs OSTree deployments to "
            "stage, keep and go back to, and leaves this host alone",
            root.prefix,
        )
        return UNMANAGED
    log.info("%s is not booted from OSTree; there is nothing to do", root.prefix)
    return 0


def _sent_back(root: Root, degrade: Callable[[LedgerError], None]) -> bool:
    """Whether the node is on its way back, as this was one start too many.

    Before the settings are read, for they may be what makes the agent crash. A ledger that can't be
    read is told by ``degrade`` before it is raised.
    """
    journal.setup(root.path(JOURNAL), level=logging.INFO, stream=sys.stderr)
    kernel, clock, ledger = _kernel(root), SystemClock(), Ledger(root)

    def machine() -> tuple[OperatingSystem, Logind, Configuration]:
        bus = SystemBus()
        disk = labelled_disk(root)
        shadow, systemd = Shadow(root, clock, disk), Systemd(bus, clock)
        survey = Survey(root, shadow, disk, AskedStates(systemd))
        runner = Runner(root, shadow, disk, systemd)
        choice = choose(Backend.AUTO, root)
        os = operating_system(choice, bus, root, clock, TransactionLimits())
        return os, Logind(bus), Configuration(survey, runner)

    if not kernel.is_ostree():
        return False
    with ledger.lock():
        try:
            return Lifeline(ledger, kernel, clock, machine=machine).started()
        except LedgerError as error:
            degrade(error)
            raise


def _degrade(arguments: argparse.Namespace, error: LedgerError) -> None:
    """Have the Node say why its agent can't begin, as nothing else would; as far as it can be."""
    reason = reason_text(error)
    log.error("%s", reason, extra={"message_id": MessageId.DEGRADED})
    try:
        settings = _settings(arguments)
        connection = read_kubeconfig(settings.kubeconfig, locate=Root(settings.root).path)
        with closing(HttpTransport(connection, SystemClock())) as transport:
            notes = {key.STATE: NodeState.DEGRADED.value, key.REASON: reason}
            client = Client(transport, limit_s=settings.limits.call_s)
            client.patch(NODES, settings.node_name, {"metadata": {"annotations": notes}})
    except TreenailError as problem:
        log.warning("the Node does not say so: %s", problem)


def _kernel(root: Root) -> Kernel:
    def soft_reboots() -> int | None:
        bus = SystemBus()
        try:
            return Systemd(bus, SystemClock()).soft_reboots()
        finally:
            bus.close()

    return Kernel(root, soft_reboots=soft_reboots)


class Agent:
    """The wired daemon."""

    def __init__(self, settings: Settings, root: Root, kernel: Kernel, ledger: LedgerFile) -> None:
        clock = SystemClock()
        disk = labelled_disk(root)
        files, labelled = Files(root), Files(root, disk)
        limits = settings.limits
        self._bell = Wakeup()
        self._stop = threading.Event()
        self._exit_code = 0
        self._notifier = Notifier(os.environ)
        self._live = Live(
            write=lambda content: _write(files, content),
            notifier=self._notifier,
            clock=clock,
            node=settings.node_name,
        )
        connection = read_kubeconfig(settings.kubeconfig, locate=root.path)
        client = Client(HttpTransport(connection, clock), limit_s=limits.call_s)
        self._settings = settings
        self._cluster = NodeCluster(
            client,
            Recorder(client, "treenail", settings.node_name, clock),
            node_name=settings.node_name,
            clock=clock,
            on_change=lambda: self._bell.ring("the Node changed"),
        )
        self._watch = Watch(
            client,
            Scope(NODES, field_selector=f"metadata.name={settings.node_name}"),
            clock,
            on_change=lambda _, node: self._node(node),
            on_connected=self._connected,
            on_lost=self._lost,
        )
        self._trust_paths = PathWatch(root, lambda: self._bell.ring("credentials were touched"))
        self._trust = Trust(
            labelled,
            self._trust_paths,
            clock,
            pull_secret=settings.internal_pull_secret,
            restores_per_hour=settings.drift.policy.heals_per_hour,
        )
        self._trust_watch = Watch(
            client,
            Scope(
                CONTROLLERCONFIGS,
                field_selector=f"metadata.name={CONTROLLER_CONFIG}",
                optional=True,
            ),
            clock,
            on_change=lambda _, found: self._handed_out(found),
            on_lost=lambda error: log.info("no credentials by a ControllerConfig: %s", error),
        )
        bus = SystemBus()
        choice = choose(settings.backend, root)
        log.info("the operating system is managed by %s: %s", choice.backend, choice.why)
        self._live.backend(choice.backend, choice.why)
        shadow, systemd = Shadow(root, clock, disk), Systemd(bus, clock)
        configuration = Configuration(
            Survey(root, shadow, disk, AskedStates(systemd)),
            Runner(root, shadow, disk, systemd),
        )
        configs = Configs(files, self._cluster)
        self._path_watch = PathWatch(root, lambda: self._bell.ring("files were touched"))
        transactions, alive = TransactionLimits(limits.stage_s, limits.stall_s), self._live.beat
        os_ = operating_system(choice, bus, root, clock, transactions, alive=alive)
        ports = Ports(
            os=os_,
            power=Logind(bus),
            soft_reboots=soft_reboots(bus, root, clock, transactions, alive=alive),
            pins=pins(bus, root, clock, transactions, look=os_.look, alive=alive),
            kernel=kernel,
            ledger=ledger,
            cluster=self._cluster,
            credentials=Credentials(root, labelled, settings),
            trust=self._trust,
            requests=RequestFile(files),
            predecessor=Predecessor(files),
            configuration=configuration,
            configs=configs,
            upkeep=Upkeep(
                Sayings(files, configs),
                DriftCheck(root, AskedStates(systemd), disk),
                self._path_watch,
                configuration,
                files,
                clock,
                policy=settings.drift.policy,
                full_every_s=settings.drift.full_every_s,
            ),
            preflight=preflight(root, bus, systemd, os_, settings.preflight, choice.backend),
            health=health(root, systemd, self._cluster, settings.health, alive=self._live.beat),
            clock=clock,
        )
        self._loop = Loop(
            ports,
            observer=Observer(
                ports,
                drains=settings.drain is Drain.ASK,
                drain_limit_s=limits.drain_s,
                images_bake=settings.image_files is ImageFiles.BAKED,
                softly=settings.reboot is Reboots.AUTO,
                keep_s=settings.health.keep_s,
            ),
            images_bake=settings.image_files is ImageFiles.BAKED,
            live=self._live,
            gauge=DriftGauge(files, clock),
            bell=self._bell,
            stop=self._stop,
            pace=Pace(limits.look_s, limits.retry_first_s, limits.retry_most_s),
        )

    def run(self) -> int:
        """Watch and turn until a signal says to stop; the step under way is finished first.

        Returns the exit code: 1 when a thread died of a bug, so that systemd starts all afresh.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGUSR1, lambda *_: self._bell.ring("somebody asks for something"))
        threading.excepthook = self._thread_died
        log.info("treenail starts")
        # The kubelet is started when this one says that it is ready.
        self._loop.finish_boot()
        self._watch.start()
        self._trust_watch.start()
        self._trust_paths.start()
        self._path_watch.start()
        self._notifier.ready()
        gc.collect()
        gc.freeze()
        try:
            self._loop.run()
        finally:
            self._notifier.stopping()
            self._watch.stop()
            self._trust_watch.stop()
            self._trust_paths.stop()
            self._path_watch.stop()
            log.info("treenail stops")
        return self._exit_code

    def _signalled(self, number: int, _frame: object) -> None:
        self._stop.set()
        self._bell.ring(signal.Signals(number).name)

    def _thread_died(self, death: threading.ExceptHookArgs) -> None:
        # An agent that watches no more would rest in peace while its node is asked to move.
        name = death.thread.name if death.thread else "a thread"
        log.critical("%s died", name, exc_info=death.exc_value)
        self._exit_code = 1
        self._stop.set()
        self._bell.ring(f"{name} died")

    def _node(self, node: Json | None) -> None:
        if node is None:
            self._missing()
            return
        self._cluster.offer(node)
        self._live.api_server(reachable=True)

    def _handed_out(self, found: Json | None) -> None:
        self._trust.offer(found)
        self._bell.ring("the ControllerConfig changed")

    def _connected(self) -> None:
        if self._cluster.node() is None:
            self._missing()
        else:
            log.info("the API server shows this Node")
            self._live.api_server(reachable=True)
        self._bell.ring("the API server is back")

    def _missing(self) -> None:
        problem = f"there is no Node {self._settings.node_name}"
        log.warning("%s; waiting for the kubelet to register it", problem)
        self._live.api_server(reachable=True, problem=problem)

    def _lost(self, error: ClusterError) -> None:
        problem = str(error)
        if isinstance(error, Forbidden):
            problem += (
                f"; check that {self._settings.kubeconfig} is a credential of "
                f"Node {self._settings.node_name}"
            )
        log.warning("lost sight of the Node: %s", problem)
        self._live.api_server(reachable=not isinstance(error, Unreachable), problem=problem)


def _settings(arguments: argparse.Namespace) -> Settings:
    given = Given(
        kubeconfig=arguments.kubeconfig,
        node_name=arguments.node_name,
        root=arguments.root,
        log_level=logging.DEBUG if arguments.verbose else None,
    )
    root = Root(arguments.root or "/")
    path = Path(arguments.config) if arguments.config else root.path(FILE)
    return load(path, given, host_name=socket.gethostname(), required=arguments.config is not None)


def _write(files: Files, content: bytes) -> None:
    # What the agent does now is worth a file, but never worth failing for.
    try:
        files.write(LIVE, content, mode=0o644)
    except FileError as error:
        log.debug("can't show the status: %s", error)
