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
    choose_backend,
    create_operating_system,
    create_pins,
    is_composefs,
)
from treenail.cli.node.local_machine import create_labelled_disk
from treenail.cli.node.run_probes import create_health_checks, create_preflight
from treenail.clock import SystemClock
from treenail.daemon.cluster.controller_config import ControllerConfigSync
from treenail.daemon.cluster.node_client import NodeClient
from treenail.daemon.cluster.pull_secrets import PullSecrets
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.configuration.drift import DriftCheck
from treenail.daemon.configuration.drift_repair import DriftRepairer, NodeConfigs
from treenail.daemon.configuration.inspect import MachineInspector, SystemdUnitStates
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.configuration.mcd_state import MCDState
from treenail.daemon.configuration.path_watcher import InotifyPathWatcher
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.daemon.local.metrics import DriftMetrics
from treenail.daemon.local.requests import RequestFile
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile.crash_counter import CrashCounter
from treenail.daemon.reconcile.interfaces import LedgerStore, NodeInterfaces, OSBackend
from treenail.daemon.reconcile.loop import LoopTiming, ReconcileLoop
from treenail.daemon.reconcile.observe import Observer
from treenail.daemon.reconcile.wakeup import Wakeup
from treenail.daemon.settings.settings import (
    SETTINGS_FILE,
    AgentSettings,
    BackendSetting,
    DrainMode,
    ImageFiles,
    PartialSettings,
    RebootMode,
    load_settings,
)
from treenail.errors import (
    ClusterError,
    FileError,
    ForbiddenError,
    LedgerError,
    TreenailError,
    UnreachableError,
)
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.machine import Machine
from treenail.host.ostree.watch import TransactionLimits
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import Ledger
from treenail.host.system.users import ShadowFile
from treenail.host.systemd.bus import SystemBus
from treenail.host.systemd.logind import Logind
from treenail.host.systemd.sd_notify import SystemdNotifier
from treenail.host.systemd.systemd import Systemd
from treenail.kube.client import Client, Json
from treenail.kube.events import EventRecorder
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.resources import CONTROLLERCONFIGS, NODES
from treenail.kube.transport import HttpTransport
from treenail.kube.watch import ResourceWatch, WatchScope
from treenail.log import MessageId
from treenail.update.status import format_reason

log = logging.getLogger(__name__)

STATUS_PATH = "/run/treenail/status.json"
JOURNAL_SOCKET = "/run/systemd/journal/socket"
EXIT_UNMANAGED = 5
"""The host is one that treenail can't manage; to start it again changes nothing."""


def main(arguments: argparse.Namespace) -> int:
    """Run the agent; returns when it was told to stop, or when this host is not its business."""
    if _roll_back_after_crashes(
        Root(arguments.root or "/"), lambda error: _report_damaged_ledger(arguments, error)
    ):
        return 0
    settings = _load_settings(arguments)
    root = Root(settings.root)
    journal.configure_logging(
        root.resolve_path(JOURNAL_SOCKET), level=settings.log_level, stream=sys.stderr
    )
    kernel = _create_kernel(root)
    if not kernel.is_ostree_booted():
        return _report_unmanaged_host(root)
    ledger = Ledger(root)
    with ledger.hold_lock():
        return Agent(settings, root, kernel, ledger).run()


def _report_unmanaged_host(root: Root) -> int:
    """What there is to do on a host that was not booted from OSTree: to say so, once."""
    # A service that leaves before it is ready has failed, and is started again.
    SystemdNotifier(os.environ).notify_ready()
    if is_composefs(root, SystemClock()):
        log.error(
            "bootc manages %s with its composefs back end; treenail needs OSTree deployments to "
            "stage, keep and go back to, and leaves this host alone",
            root.prefix,
        )
        return EXIT_UNMANAGED
    log.info("%s is not booted from OSTree; there is nothing to do", root.prefix)
    return 0


def _roll_back_after_crashes(root: Root, report_damage: Callable[[LedgerError], None]) -> bool:
    """Whether the node is on its way back, as this was one start too many.

    Before the settings are read, for they may be what makes the agent crash. A ledger that can't be
    read is told by ``report_damage`` before it is raised.
    """
    journal.configure_logging(
        root.resolve_path(JOURNAL_SOCKET), level=logging.INFO, stream=sys.stderr
    )
    kernel, clock, ledger = _create_kernel(root), SystemClock(), Ledger(root)

    def machine() -> tuple[OSBackend, Logind, NodeConfiguration]:
        bus = SystemBus()
        disk = create_labelled_disk(root)
        shadow, systemd = ShadowFile(root, clock, disk), Systemd(bus, clock)
        survey = MachineInspector(root, shadow, disk, SystemdUnitStates(systemd))
        runner = StepRunner(root, shadow, disk, systemd)
        choice = choose_backend(BackendSetting.AUTO, root)
        os = create_operating_system(choice, Machine(root, clock=clock, bus=bus))
        return os, Logind(bus), NodeConfiguration(survey, runner)

    if not kernel.is_ostree_booted():
        return False
    with ledger.hold_lock():
        try:
            return CrashCounter(ledger, kernel, clock, open_machine=machine).count_start()
        except LedgerError as error:
            report_damage(error)
            raise


def _report_damaged_ledger(arguments: argparse.Namespace, error: LedgerError) -> None:
    """Have the Node say why its agent can't begin, as nothing else would; as far as it can be."""
    reason = format_reason(error)
    log.error("%s", reason, extra={"message_id": MessageId.DEGRADED})
    try:
        settings = _load_settings(arguments)
        connection = read_kubeconfig(settings.kubeconfig, locate=Root(settings.root).resolve_path)
        with closing(HttpTransport(connection, SystemClock())) as transport:
            notes = {key.STATE: NodeState.DEGRADED.value, key.REASON: reason}
            client = Client(transport, limit_s=settings.limits.call_s)
            client.patch(NODES, settings.node_name, {"metadata": {"annotations": notes}})
    except TreenailError as problem:
        log.warning("the Node does not say so: %s", problem)


def _create_kernel(root: Root) -> HostKernel:
    def soft_reboots() -> int | None:
        bus = SystemBus()
        try:
            return Systemd(bus, SystemClock()).count_soft_reboots()
        finally:
            bus.close_connection()

    return HostKernel(root, count_soft_reboots=soft_reboots)


class Agent:
    """The wired daemon."""

    def __init__(
        self, settings: AgentSettings, root: Root, kernel: HostKernel, ledger: LedgerStore
    ) -> None:
        clock = SystemClock()
        disk = create_labelled_disk(root)
        files, labelled = HostFiles(root), HostFiles(root, disk)
        limits = settings.limits
        self._wakeup = Wakeup()
        self._stop = threading.Event()
        self._exit_code = 0
        self._notifier = SystemdNotifier(os.environ)
        self._status_file = StatusFile(
            write=lambda content: _write_status(files, content),
            notifier=self._notifier,
            clock=clock,
            node=settings.node_name,
        )
        connection = read_kubeconfig(settings.kubeconfig, locate=root.resolve_path)
        client = Client(HttpTransport(connection, clock), limit_s=limits.call_s)
        self._settings = settings
        self._node_client = NodeClient(
            client,
            EventRecorder(client, "treenail", settings.node_name, clock),
            node_name=settings.node_name,
            clock=clock,
            on_change=lambda: self._wakeup.notify("the Node changed"),
        )
        self._node_watch = ResourceWatch(
            client,
            WatchScope(NODES, field_selector=f"metadata.name={settings.node_name}"),
            clock,
            on_change=lambda _, node: self._handle_node_change(node),
            on_connected=self._handle_watch_connected,
            on_lost=self._handle_watch_lost,
        )
        self._credential_watcher = InotifyPathWatcher(
            root, lambda: self._wakeup.notify("credentials were touched")
        )
        self._controller_config = ControllerConfigSync(
            labelled,
            self._credential_watcher,
            clock,
            pull_secret=settings.internal_pull_secret,
            restores_per_hour=settings.drift.policy.repairs_per_hour,
        )
        self._controller_config_watch = ResourceWatch(
            client,
            WatchScope(
                CONTROLLERCONFIGS,
                field_selector=f"metadata.name={CONTROLLER_CONFIG}",
                is_optional=True,
            ),
            clock,
            on_change=lambda _, found: self._handle_controller_config(found),
            on_lost=lambda error: log.info("no credentials by a ControllerConfig: %s", error),
        )
        bus = SystemBus()
        choice = choose_backend(settings.backend, root)
        log.info("the operating system is managed by %s: %s", choice.backend, choice.reason)
        self._status_file.show_backend(choice.backend, choice.reason)
        shadow, systemd = ShadowFile(root, clock, disk), Systemd(bus, clock)
        configuration = NodeConfiguration(
            MachineInspector(root, shadow, disk, SystemdUnitStates(systemd)),
            StepRunner(root, shadow, disk, systemd),
        )
        configs = ConfigCache(files, self._node_client)
        self._path_watcher = InotifyPathWatcher(
            root, lambda: self._wakeup.notify("files were touched")
        )
        transactions, alive = (
            TransactionLimits(limits.stage_s, limits.stall_s),
            self._status_file.send_heartbeat,
        )
        machine = Machine(root, clock=clock, bus=bus, heartbeat=alive, limits=transactions)
        os_ = create_operating_system(choice, machine)
        ports = NodeInterfaces(
            os=os_,
            power=Logind(bus),
            soft_reboots=machine.soft_reboot,
            pins=create_pins(machine, os_),
            kernel=kernel,
            ledger=ledger,
            cluster=self._node_client,
            pull_secrets=PullSecrets(root, labelled, settings),
            certificates=self._controller_config,
            requests=RequestFile(files),
            mcd_state=MCDState(files),
            configuration=configuration,
            config_cache=configs,
            drift=DriftRepairer(
                NodeConfigs(files, configs),
                DriftCheck(root, SystemdUnitStates(systemd), disk),
                self._path_watcher,
                configuration,
                files,
                clock,
                policy=settings.drift.policy,
                full_check_s=settings.drift.full_check_s,
            ),
            preflight=create_preflight(root, bus, systemd, os_, settings.preflight, choice.backend),
            health=create_health_checks(
                root,
                systemd,
                self._node_client,
                settings.health,
                alive=self._status_file.send_heartbeat,
            ),
            clock=clock,
        )
        self._loop = ReconcileLoop(
            ports,
            observer=Observer(
                ports,
                should_drain=settings.drain is DrainMode.REQUEST,
                drain_limit_s=limits.drain_s,
                has_files_in_image=settings.image_files is ImageFiles.BAKED,
                can_soft_reboot=settings.reboot is RebootMode.AUTO,
                retention_s=settings.health.retention_s,
            ),
            has_files_in_image=settings.image_files is ImageFiles.BAKED,
            status_file=self._status_file,
            metrics=DriftMetrics(files, clock),
            wakeup=self._wakeup,
            stop=self._stop,
            timing=LoopTiming(limits.resync_s, limits.retry_first_s, limits.retry_max_s),
        )

    def run(self) -> int:
        """Watch and turn until a signal says to stop; the step under way is finished first.

        Returns the exit code: 1 when a thread died of a bug, so that systemd starts all afresh.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_signal)
        signal.signal(signal.SIGUSR1, lambda *_: self._wakeup.notify("somebody asks for something"))
        threading.excepthook = self._handle_thread_death
        log.info("treenail starts")
        # The kubelet is started when this one says that it is ready.
        self._loop.finish_boot()
        self._node_watch.start()
        self._controller_config_watch.start()
        self._credential_watcher.start()
        self._path_watcher.start()
        self._notifier.notify_ready()
        gc.collect()
        gc.freeze()
        try:
            self._loop.run()
        finally:
            self._notifier.notify_stopping()
            self._node_watch.stop()
            self._controller_config_watch.stop()
            self._credential_watcher.stop()
            self._path_watcher.stop()
            log.info("treenail stops")
        return self._exit_code

    def _handle_signal(self, number: int, _frame: object) -> None:
        self._stop.set()
        self._wakeup.notify(signal.Signals(number).name)

    def _handle_thread_death(self, death: threading.ExceptHookArgs) -> None:
        # An agent that watches no more would rest in peace while its node is asked to move.
        name = death.thread.name if death.thread else "a thread"
        log.critical("%s died", name, exc_info=death.exc_value)
        self._exit_code = 1
        self._stop.set()
        self._wakeup.notify(f"{name} died")

    def _handle_node_change(self, node: Json | None) -> None:
        if node is None:
            self._report_missing_node()
            return
        self._node_client.accept_node(node)
        self._status_file.show_api_server(is_reachable=True)

    def _handle_controller_config(self, found: Json | None) -> None:
        self._controller_config.accept_document(found)
        self._wakeup.notify("the ControllerConfig changed")

    def _handle_watch_connected(self) -> None:
        if self._node_client.get_cached_node() is None:
            self._report_missing_node()
        else:
            log.info("the API server shows this Node")
            self._status_file.show_api_server(is_reachable=True)
        self._wakeup.notify("the API server is back")

    def _report_missing_node(self) -> None:
        problem = f"there is no Node {self._settings.node_name}"
        log.warning("%s; waiting for the kubelet to register it", problem)
        self._status_file.show_api_server(is_reachable=True, problem=problem)

    def _handle_watch_lost(self, error: ClusterError) -> None:
        problem = str(error)
        if isinstance(error, ForbiddenError):
            problem += (
                f"; check that {self._settings.kubeconfig} is a credential of "
                f"Node {self._settings.node_name}"
            )
        log.warning("lost sight of the Node: %s", problem)
        self._status_file.show_api_server(
            is_reachable=not isinstance(error, UnreachableError), problem=problem
        )


def _load_settings(arguments: argparse.Namespace) -> AgentSettings:
    given = PartialSettings(
        kubeconfig=arguments.kubeconfig,
        node_name=arguments.node_name,
        root=arguments.root,
        log_level=logging.DEBUG if arguments.verbose else None,
    )
    root = Root(arguments.root or "/")
    path = Path(arguments.config) if arguments.config else root.resolve_path(SETTINGS_FILE)
    return load_settings(
        path, given, host_name=socket.gethostname(), is_required=arguments.config is not None
    )


def _write_status(files: HostFiles, content: bytes) -> None:
    # What the agent does now is worth a file, but never worth failing for.
    try:
        files.write_file(STATUS_PATH, content, mode=0o644)
    except FileError as error:
        log.debug("can't show the status: %s", error)
