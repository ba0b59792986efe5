"""``treenail run``: construct the node agent and run it until SIGTERM or SIGINT."""

import argparse
import gc
import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from treenail import clocks, errors, memory
from treenail import log as journal
from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.api.hosted import node_mode
from treenail.cli.node import backend, local_machine, run_probes
from treenail.cli.output import EXIT_UNMANAGEABLE
from treenail.config import node_paths
from treenail.daemon import agent_settings
from treenail.daemon.cluster import (
    controller_config,
    hosted_client,
    node_client,
    node_identity,
    pull_secrets,
)
from treenail.daemon.configuration import (
    config_cache,
    drift,
    drift_repair,
    image_content,
    mcd_state,
    path_watcher,
    trust_store,
)
from treenail.daemon.configuration.node_configuration import NodeConfiguration
from treenail.daemon.local import metrics, requests, status_file
from treenail.daemon.reconcile import context, crash_counter, loop, observe
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree import backend_settings, deployments
from treenail.host.system.state_file import Ledger
from treenail.host.systemd import logind, system_bus
from treenail.host.systemd.bus_process import BusProcess
from treenail.kube import api_client, event_recorder, resources
from treenail.kube.transport import native
from treenail.kube.watch import ResourceWatch, WatchScope
from treenail.log import MessageId
from treenail.update.drift.drift_policy import DriftReaction
from treenail.update.state import ledger_record
from treenail.update.status import format_reason

log = logging.getLogger(__name__)

_MEMORY_REMEDY = (
    "free memory, or raise the limit of treenail.service: "
    "systemctl show treenail --property=MemoryMax,LimitAS; the agent starts again and continues"
)


def main(arguments: argparse.Namespace) -> int:
    """Run the agent; return after a signal, or at once on a host that it cannot manage."""
    memory.limit_allocator()
    bus_process = BusProcess(os.environ)
    # It loads gi while this process reads settings and ledger.
    with suppress(errors.BusError):  # the first call starts it again, and reports the cause
        bus_process.start()
    try:
        return run_agent(arguments, bus_process)
    finally:
        bus_process.close_connection()


def run_agent(arguments: argparse.Namespace, bus_process: BusProcess) -> int:
    """Run the agent with this process for D-Bus; return the exit code.

    Without systemd the boot ID is unknown, and with it whether the update in progress rebooted.
    The agent ends then, and also for lack of memory. The Node shows why, and the next start
    continues.
    """
    try:
        return _run_agent(arguments, bus_process)
    except errors.BusError as error:
        _report_end(arguments, error)
        raise
    except MemoryError:
        pass  # its frames hold what needs the memory, until here
    lack = errors.HostError(
        "cannot continue: the agent cannot allocate memory", remedy=_MEMORY_REMEDY
    )
    _report_end(arguments, lack)
    raise lack


def pin_images(arguments: argparse.Namespace) -> int:
    """Pull and pin images once; return 1 if a set is not complete, and systemd begins again."""
    # Imported late: the agent starts a process for it.
    from treenail.daemon.cluster.pinned_images import PinnedImagesJob

    settings = local_machine.load_agent_settings(arguments)
    journal.configure_stream_logging(sys.stderr, level=settings.log_level)
    with local_machine.open_machine(settings.root) as machine:
        access = node_identity.read_access(settings, machine.root)
        with closing(_create_transport(access, machine.clock)) as transport:
            # An apply removes what its field manager owns and omits: the agent has another one.
            client = api_client.Client(transport, field_manager="treenail-pinned-images")
            return 0 if PinnedImagesJob(machine, client, access.identity.name).run() else 1


def _run_agent(arguments: argparse.Namespace, bus_process: BusProcess) -> int:
    bus = system_bus.SystemBus(service=bus_process)
    if _roll_back_after_crashes(local_machine.open_machine(arguments.root, bus), arguments):
        return 0
    inputs = AgentInputs(arguments)
    machine = _create_machine(inputs.settings, bus)
    if not machine.kernel.is_ostree_booted():
        return _report_unmanaged_host(machine)
    with machine.ledger.hold_lock():
        exit_code = run_agents(inputs, bus, machine.ledger, bus_process)
        if exit_code in (0, node_mode.EXIT_DONE):
            crash_counter.record_clean_stop(machine.crash_record)
        return exit_code


def _create_machine(settings: agent_settings.AgentSettings, bus: system_bus.SystemBus) -> Machine:
    root = Root(settings.root)
    journal.configure_logging(
        root.resolve_path(journal.JOURNAL_SOCKET), level=settings.log_level, stream=sys.stderr
    )
    machine = Machine(
        root,
        clock=clocks.SystemClock(),
        bus=bus,
        heartbeat=lambda: machine.notifier.notify_watchdog(),  # noqa: PLW0108 - not bound yet
        limits=backend_settings.TransactionLimits(settings.limits.stage_s, settings.limits.stall_s),
    )
    return machine


class AgentInputs:
    """The settings of an agent, its Node and its connection.

    A boot may set each of them after the agent started, and users change the settings.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.is_until_done: bool = getattr(arguments, "until_done", False)
        self.settings = local_machine.load_agent_settings(arguments)
        self._root = Root(self.settings.root)
        self.access = node_identity.read_access(self.settings, self._root)
        self.hosted = hosted_client.read_mode(self._root)
        self._problem = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files to watch, below the root."""
        certificate = self.access.connection.certificate if self.access.connection else b""
        files = (
            self._arguments.config or agent_settings.SETTINGS_FILE,
            self.settings.kubeconfig,
            node_mode.PATH,
            node_mode.INSTALLED_PATH,
        )
        return (*files, certificate) if certificate and isinstance(certificate, str) else files

    def reload(self) -> bool:
        """Read everything again; return whether another agent is needed.

        What cannot be read changes nothing: the last good settings and the last name stay.
        """
        before, problem = (self.settings, self.access, self.hosted), ""
        try:
            settings = local_machine.load_agent_settings(self._arguments)
            self.settings = replace(settings, root=self.settings.root)
            self.hosted = hosted_client.read_mode(self._root)
        except errors.TreenailError as error:
            problem = f"keeping the last settings: {format_reason(error)}"
        access = node_identity.read_access(self.settings, self._root)
        if access.identity.name or not self.access.identity.name:
            self.access = access
        else:
            problem = f"staying Node {self.access.identity.name}: {access.identity.problem}"
        if problem not in ("", self._problem):
            log.error("%s", problem)
        self._problem = problem
        return before != (self.settings, self.access, self.hosted)


def run_agents(
    inputs: AgentInputs, bus: system_bus.SystemBus, ledger: Ledger, bus_process: BusProcess
) -> int:
    """Run an agent, and another one whenever the inputs change, as a restart would."""
    stop, wakeup = threading.Event(), loop.Wakeup()
    while True:
        machine = _create_machine(inputs.settings, bus)
        agent = Agent(inputs, machine, ledger, bus_process, stop=stop, wakeup=wakeup)
        exit_code = agent.run()
        if stop.is_set():
            return exit_code
        log.info("settings, Node or kubeconfig changed")
        # Subscriptions and inhibitors of this agent end with its connection.
        bus_process.close_connection()


def _report_unmanaged_host(machine: Machine) -> int:
    """Log why the agent ends on a host that was not booted from OSTree."""
    # systemd counts a Type=notify service that exits before READY=1 as failed, and restarts it.
    machine.notifier.notify_ready()
    if backend.is_composefs(machine):
        log.error(
            "cannot manage %s: bootc uses its composefs back end, which has no OSTree deployments "
            "to stage, pin and roll back to",
            machine.root.prefix,
        )
        return EXIT_UNMANAGEABLE
    log.info("%s is not booted from OSTree; nothing to do", machine.root.prefix)
    return 0


def _roll_back_after_crashes(machine: Machine, arguments: argparse.Namespace) -> bool:
    """Count this start; return whether the crash counter started a rollback.

    This runs before the settings are read, because they may be the cause of the crashes.
    """
    socket_path = machine.root.resolve_path(journal.JOURNAL_SOCKET)
    journal.configure_logging(socket_path, level=logging.INFO, stream=sys.stderr)

    def create_interfaces() -> tuple[deployments.OSBackend, logind.Logind, NodeConfiguration]:
        machine.notifier.extend_start_timeout(loop.START_EXTENSION_S)
        choice = backend.choose_backend(backend_settings.BackendSetting.AUTO, machine.root)
        os = backend.create_operating_system(choice, machine)
        configuration = local_machine.create_configuration(machine, is_running=True)
        return os, machine.logind, configuration

    if not machine.kernel.is_ostree_booted():
        return False
    with machine.ledger.hold_lock():
        counter = crash_counter.CrashCounter(
            machine.ledger,
            machine.crash_record,
            machine.kernel,
            machine.clock,
            open_machine=create_interfaces,
        )
        try:
            return counter.count_start()
        except errors.LedgerError as error:
            _report_end(arguments, error)
            raise


def _report_end(arguments: argparse.Namespace, error: errors.TreenailError) -> None:
    """Annotate the Node with the cause, because no agent runs that could report it."""
    reason = format_reason(error)
    log.error("%s", reason, extra={"message_id": MessageId.DEGRADED})
    # After a lack of memory there may be none for the request either.
    with suppress(MemoryError):
        _annotate_node(arguments, reason)


def _annotate_node(arguments: argparse.Namespace, reason: str) -> None:
    try:
        settings = local_machine.load_agent_settings(arguments)
        access = node_identity.read_access(settings, Root(settings.root))
        with closing(_create_transport(access, clocks.SystemClock())) as transport:
            annotations = {key.STATE: NodeState.DEGRADED.value, key.REASON: reason}
            client = api_client.Client(transport, limit_s=settings.limits.call_s)
            body: api_client.Json = {"metadata": {"annotations": annotations}}
            client.patch(resources.NODES, access.identity.name, body)
    except errors.TreenailError as problem:
        log.warning("cannot annotate the Node: %s", problem)


def _create_transport(
    access: node_identity.NodeAccess, clock: clocks.Clock
) -> native.HttpTransport | node_identity.UnnamedNodeTransport:
    if access.connection is None or not access.identity.name:
        return node_identity.UnnamedNodeTransport(access.identity)
    return native.HttpTransport(access.connection, clock)


def is_update_over(annotations: Mapping[str, str]) -> bool:
    """Return whether the in-place upgrader deletes the pod of a node with these annotations."""
    requested, applied = map(annotations.get, (key.DESIRED_DRAIN, key.LAST_APPLIED_DRAIN))
    current, desired = map(annotations.get, (key.CURRENT_CONFIG, key.DESIRED_CONFIG))
    is_done = annotations.get(key.STATE) == NodeState.DONE
    return is_done and bool(current) and current == desired and requested == applied


_PINNED_UNIT = "treenail-pinned-images.service"
_NAME_POLL_S = 1.0
"""How often an agent whose Node is uncertain reads the host name again."""


class Agent:
    """The node agent: one thread that reconciles, and threads that watch."""

    def __init__(
        self,
        inputs: AgentInputs,
        machine: Machine,
        ledger: Ledger,
        bus_process: BusProcess,
        *,
        stop: threading.Event,
        wakeup: loop.Wakeup,
    ) -> None:
        clock, settings, identity = machine.clock, inputs.settings, inputs.access.identity
        self._inputs, self._settings, self._identity = inputs, settings, identity
        self._machine = machine
        self._bus_process = bus_process
        self._wakeup, self._stop = wakeup, stop
        self._exit_code = 0
        self._pinned_sets: str | None = None
        """The PinnedImageSets whose images were requested last."""
        self._lacks_memory = False
        """A thread ended with MemoryError."""
        self._status_file = status_file.StatusFile(
            write=self._write_status,
            notifier=machine.notifier,
            clock=clock,
            node=identity.name,
            node_note=identity.note,
        )
        self._transport = _create_transport(inputs.access, clock)
        client = api_client.Client(self._transport, limit_s=settings.limits.call_s)
        self._ledger = ledger
        self._node_client = self._create_node_client(client)
        self._credential_watcher = self._create_path_watcher("credentials changed")
        self._path_watcher = self._create_path_watcher("files changed")
        self._input_watcher = self._create_path_watcher("settings or kubeconfig changed")
        self._input_watcher.watch_paths(inputs.paths, directories=())
        self._controller_config = controller_config.ControllerConfigSync(
            machine.labelled_files,
            self._credential_watcher,
            clock,
            pull_secret=settings.internal_pull_secret,
            restores_per_hour=settings.drift.repairs_per_hour,
        )
        self._node_watch = self._create_node_watch(client)
        self._controller_config_watch = self._create_controller_config_watch(client)
        self._loop = self._create_loop(self._create_interfaces())

    def run(self) -> int:
        """Watch and reconcile until a signal or new inputs; finish the step in progress first.

        Returns the exit code: 1 after a bug in a thread, so that systemd restarts the agent.
        Raises MemoryError when a thread cannot allocate memory.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_signal)
        signal.signal(signal.SIGUSR1, lambda *_: self._wakeup.notify("a command sent a request"))
        threading.excepthook = self._handle_thread_death
        log.info(
            "agent started%s", f" for Node {self._identity.name}" if self._identity.name else ""
        )
        if note := self._identity.note:
            log.warning("this machine is Node %s %s", self._identity.name, note)
        # READY=1 starts the kubelet (Before=kubelet.service), which must find the right files.
        self._loop.finish_boot()
        workers = (
            self._node_watch,
            *(() if self._inputs.hosted else (self._controller_config_watch,)),
            self._credential_watcher,
            self._path_watcher,
            self._input_watcher,
        )
        for worker in workers:
            worker.start()
        self._machine.notifier.notify_ready()
        # Modules and adapters live as long as the process: exclude them from collections.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        try:
            self._loop.run()
        finally:
            if self._stop.is_set():
                self._machine.notifier.notify_stopping()
            for worker in workers:
                worker.stop()
            self._transport.close()
            log.info("agent stopped")
        if self._lacks_memory:
            raise MemoryError
        return self._exit_code

    def _create_path_watcher(self, event: str) -> path_watcher.PathWatcher:
        return path_watcher.PathWatcher(self._machine.root, lambda: self._wakeup.notify(event))

    def _create_node_client(self, client: api_client.Client) -> node_client.NodeClient:
        mode, machine, name = self._inputs.hosted, self._machine, self._identity.name
        create: Callable[..., node_client.NodeClient] = node_client.NodeClient
        if mode is not None:
            log.info("hosted node of NodePool %s", mode.node_pool)
            create = partial(
                hosted_client.HostedClient,
                machine=hosted_client.HostedMachine(
                    mode,
                    machine.files,
                    lambda: ledger_record.from_json(self._ledger.read_document()).current.config,
                    # As the kubelet reports it: without the count of soft reboots.
                    None
                    if self._inputs.is_until_done
                    else lambda: machine.kernel.read_boot_id().partition("+")[0],
                ),
            )
        return create(
            client,
            event_recorder.EventRecorder(client, "treenail", name, machine.clock),
            node_name=name,
            clock=machine.clock,
            on_change=lambda: self._wakeup.notify("the Node changed"),
        )

    def _create_node_watch(self, client: api_client.Client) -> ResourceWatch:
        watch = ResourceWatch(
            client,
            WatchScope(resources.NODES, field_selector=f"metadata.name={self._identity.name}"),
            self._machine.clock,
            on_change=lambda _, node: self._handle_node_change(node),
            on_connected=self._handle_watch_connected,
            on_lost=self._handle_watch_lost,
        )
        watch.add_list_handler(self._node_client.handle_list)
        return watch

    def _create_controller_config_watch(self, client: api_client.Client) -> ResourceWatch:
        return ResourceWatch(
            client,
            WatchScope(
                resources.CONTROLLERCONFIGS,
                field_selector=f"metadata.name={CONTROLLER_CONFIG}",
                is_optional=True,
            ),
            self._machine.clock,
            on_change=lambda _, document: self._handle_controller_config(document),
            on_lost=lambda error: log.info("ControllerConfig watch disconnected: %s", error),
        )

    def _create_interfaces(self) -> context.NodeInterfaces:
        machine, settings = self._machine, self._settings
        choice = backend.choose_backend(settings.backend, machine.root)
        log.info("operating system back end: %s (%s)", choice.backend, choice.reason)
        self._status_file.show_backend(choice.backend, choice.reason)
        os = backend.create_operating_system(choice, machine)
        configuration = local_machine.create_configuration(machine, is_running=True)
        client = self._node_client
        configs = config_cache.ConfigCache(
            machine.files, client.fetch_machine_config, client.find_unnamed_config
        )
        images = image_content.DeploymentImages(machine, os)
        return context.NodeInterfaces(
            os=os,
            images=images,
            power=machine.logind,
            soft_reboots=machine.soft_reboot,
            pins=backend.create_pins(machine, os),
            kernel=machine.kernel,
            ledger=self._ledger,
            crash_record=machine.crash_record,
            cluster=client,
            pull_secrets=pull_secrets.PullSecrets(machine.root, machine.labelled_files, settings),
            bootstrap_registry=pull_secrets.BootstrapRegistryFiles(machine.files),
            certificates=self._controller_config,
            trust_store=trust_store.TrustStore(machine),
            requests=requests.RequestFile(machine.files),
            mcd_state=(hosted_client.HostedMCDState if self._inputs.hosted else mcd_state.MCDState)(
                machine.files
            ),
            configuration=configuration,
            config_cache=configs,
            drift=self._create_drift_monitor(configs, configuration, images),
            preflight=run_probes.create_preflight(machine, os, settings.preflight, choice.backend),
            health=run_probes.create_health_checks(machine, client, settings.health),
            clock=machine.clock,
            is_hosted=self._inputs.hosted is not None,
        )

    def _create_drift_monitor(
        self,
        configs: config_cache.ConfigCache,
        configuration: NodeConfiguration,
        images: image_content.DeploymentImages,
    ) -> drift_repair.DriftMonitor:
        machine, settings = self._machine, self._settings.drift
        if self._inputs.hosted:
            # HyperShift's global pull secret may write it at any time.
            rotated = (node_paths.PULL_SECRET, DriftReaction.REPORT)
            settings = replace(settings, paths=(*settings.paths, rotated))
        return drift_repair.DriftMonitor(
            machine,
            config_cache.NodeConfigs(configs, images.read_booted),
            drift.DriftCheck(machine, machine.systemd),
            self._path_watcher,
            configuration,
            policy=settings,
            full_check_s=settings.full_check_s,
        )

    def _create_loop(self, interfaces: context.NodeInterfaces) -> loop.ReconcileLoop:
        settings, limits = self._settings, self._settings.limits
        return loop.ReconcileLoop(
            interfaces,
            observer=observe.Observer(
                interfaces,
                should_drain=settings.drain is agent_settings.DrainMode.REQUEST,
                drain_limit_s=limits.drain_s,
                has_files_in_image=settings.image_files is agent_settings.ImageFiles.BAKED,
                can_soft_reboot=settings.reboot is agent_settings.RebootMode.AUTO,
                # No later agent would unpin the previous deployment.
                retention_s=0.0 if self._inputs.is_until_done else settings.health.retention_s,
                health_mode=settings.health.mode,
                identity=self._identity,
            ),
            status_file=self._status_file,
            metrics=metrics.NodeMetrics(self._machine.files, self._machine.clock),
            wakeup=self._wakeup,
            stop=self._stop,
            limits=limits,
            hooks=loop.LoopHooks(
                on_rest=self._release_memory,
                has_new_inputs=self._inputs.reload,
                poll_s=float("inf") if self._identity.name else _NAME_POLL_S,
            ),
        )

    def _release_memory(self) -> None:
        """End the process that talks to D-Bus, and return the memory of the last work."""
        self._start_pinned_images()
        node = self._node_client.get_cached_node()
        if self._inputs.is_until_done and node is not None and is_update_over(node.annotations):
            log.info("nothing is left to do")
            self._exit_code = node_mode.EXIT_DONE
            self._stop.set()
            self._wakeup.notify("nothing is left to do")
        if not self._bus_process.is_running:
            return  # nothing was done since the last rest
        self._bus_process.close_connection()
        gc.collect()
        memory.release_freed_memory()

    def _start_pinned_images(self) -> None:
        """Pull and pin images in a unit of its own, if the Node names other sets than before."""
        if self._inputs.hosted:
            return
        node = self._node_client.get_cached_node()
        sets = None if node is None else node.annotations.get(key.PINNED_IMAGE_SETS, "")
        if sets is None or sets == self._pinned_sets:
            return
        description = f"treenail: pin images {hashlib.sha256(sets.encode()).hexdigest()[:16]}"
        argv = (sys.executable, "-P", "-m", "treenail", *sys.argv[1:], "--pinned-images")
        files = self._machine.files
        try:
            has_job = files.has_entry(node_paths.PINNED_IMAGES)
            if sets or has_job:
                if not has_job:
                    # Without the sets a later agent must find the job that still pulls.
                    files.write_file(node_paths.PINNED_IMAGES, b"")
                self._machine.transient_units.start_job(_PINNED_UNIT, description, argv)
                log.info("pulling the images of the PinnedImageSets %s", sets or "(none)")
            self._pinned_sets = sets
        except errors.HostError as error:
            log.warning("cannot pull the images of PinnedImageSets: %s", error)

    def _handle_signal(self, number: int, _frame: object) -> None:
        self._stop.set()
        self._wakeup.notify(signal.Signals(number).name)

    def _handle_thread_death(self, death: threading.ExceptHookArgs) -> None:
        # Without its watch the agent would never see another request.
        name = death.thread.name if death.thread else "a thread"
        if isinstance(death.exc_value, MemoryError):
            self._lacks_memory = True
        else:
            log.critical("thread %s died", name, exc_info=death.exc_value)
        self._exit_code = 1
        self._stop.set()
        self._wakeup.notify(f"{name} died")

    def _handle_node_change(self, node: api_client.Json | None) -> None:
        if node is None:
            self._report_missing_node()
            return
        self._node_client.accept_node(node)
        self._status_file.show_api_server(is_reachable=True)

    def _handle_controller_config(self, document: api_client.Json | None) -> None:
        self._controller_config.accept_document(document)
        self._wakeup.notify("the ControllerConfig changed")

    def _handle_watch_connected(self) -> None:
        if self._node_client.get_cached_node() is None:
            self._report_missing_node()
        else:
            log.info("Node watch connected")
            self._status_file.show_api_server(is_reachable=True)
        self._wakeup.notify("the Node watch connected")

    def _report_missing_node(self) -> None:
        problem = f"Node {self._identity.name} does not exist"
        log.warning("%s; waiting for the kubelet to register it", problem)
        self._status_file.show_api_server(is_reachable=True, problem=problem)

    def _handle_watch_lost(self, error: errors.ClusterError) -> None:
        problem = str(error)
        if isinstance(error, errors.ForbiddenError):
            problem += (
                f"; check that {self._settings.kubeconfig} is a credential of "
                f"Node {self._identity.name}"
            )
        log.warning("Node watch disconnected: %s", problem)
        self._status_file.show_api_server(
            is_reachable=not isinstance(error, errors.UnreachableError), problem=problem
        )

    def _write_status(self, content: bytes) -> None:
        # The status is informative: an update continues without it.
        try:
            self._machine.files.write_file(local_machine.STATUS_PATH, content, mode=0o644)
        except errors.FileError as error:
            log.debug("cannot write the status: %s", error)
