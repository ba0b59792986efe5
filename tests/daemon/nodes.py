"""A node of a model world: the real reconcile loop, restarted whenever it ends."""

import hashlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.daemon.machines import ROOT, TOP, Systemd, planned
from tests.fakes import disk
from tests.fakes.bootc_host import bootc_of
from tests.fakes.clock import FakeClock
from tests.fakes.disk import Entry
from tests.fakes.host_machine import make_machine
from tests.fakes.world import (
    PLATFORM,
    FakeCluster,
    FakeControllerConfigSync,
    FakeCrashRecord,
    FakeHealth,
    FakeLedger,
    FakeMachine,
    FakeNotifier,
    FakePreflight,
    FakePullSecrets,
    FakeRequests,
    FakeTrustStore,
    Json,
    Killed,
    PowerCut,
    WentDown,
    World,
)
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.config.image_content import ImageContent, list_image_paths
from treenail.config.wanted_state import WantedState, read_wanted_state
from treenail.daemon.agent_settings import LimitSettings
from treenail.daemon.cluster.pull_secrets import BootstrapRegistryFiles
from treenail.daemon.configuration.config_cache import ConfigCache, NodeConfigs
from treenail.daemon.configuration.drift import DriftCheck
from treenail.daemon.configuration.drift_repair import DriftMonitor
from treenail.daemon.configuration.mcd_state import MCDState
from treenail.daemon.configuration.node_configuration import MachineInspector, NodeConfiguration
from treenail.daemon.configuration.path_watcher import TouchedPaths
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.daemon.local.metrics import NodeMetrics
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.daemon.reconcile.crash_counter import CrashCounter
from treenail.daemon.reconcile.loop import ReconcileLoop, Wakeup
from treenail.daemon.reconcile.observe import Observer
from treenail.deployment_change import are_effective
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.machine import Machine
from treenail.host.rollback.undo_log import UNDO_DIRECTORY as UNDO
from treenail.host.system.state_file import CrashRecordFile, Ledger
from treenail.observations import EntryKind, PathEntry
from treenail.units.unit_files import UnitFileReader
from treenail.update.drift.drift_policy import DriftPolicy, DriftReaction
from treenail.update.state import ledger_record as records
from treenail.update.state.ledger_record import Target, UpdateOutcome
from treenail.update.steps.step_types import BackUpEntry, RecordOwnership

TURNS_TO_REST = 60
TURNS_LIMIT = 5000
"""After so many turns of one node its test fails, whatever it waits for."""
IDLE_TURNS = 12
"""After so many turns of a minute without any change, with a full drift check in one of them."""
BACK_ENDS = ("rpm-ostree", "bootc")


HEALED = (("*/healed", DriftReaction.REPAIR),)


class SilentWatcher:
    """A watcher that reports nothing, so that only full checks find drift."""

    def watch_paths(self, paths: Iterable[str], *, directories: Iterable[str]) -> None:
        """Nothing to arm."""

    def take_touched(self) -> TouchedPaths:
        return TouchedPaths()


class FakeImages:
    """The images of a world: their /usr/etc."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read_booted(self, wanted: WantedState) -> ImageContent:
        return self._read(self._world.booted, wanted)

    def read_staged(self, staged_id: str, wanted: WantedState) -> ImageContent:
        pulled = (each.partition("@")[2] for each in self._world.stored)
        return self._read(self._world.staged or next(pulled, ""), wanted)

    def _read(self, digest: str, wanted: WantedState) -> ImageContent:
        tree = self._world.vendor.get(digest, {})
        return ImageContent(
            entries={
                path: _describe_entry(tree[path.removeprefix("/etc/")])
                for path in list_image_paths(wanted)
                if path.removeprefix("/etc/") in tree
            }
        )


def _describe_entry(entry: Entry) -> PathEntry:
    digest = hashlib.sha256(entry.content).hexdigest()
    return PathEntry(EntryKind(entry.kind), digest, entry.mode, entry.uid, entry.gid)


class DiskLedger(FakeLedger):
    """The ledger as a file of the world's disk; the world has what was read or written last."""

    def __init__(self, world: World, files: HostFiles) -> None:
        super().__init__(world)
        self._file = Ledger(ROOT, files)

    def read_document(self) -> Json | None:
        document = self._file.read_document()
        # The flush of the directory may have failed when the new file was in place.
        if document is not None:
            self.store_text(json.dumps(document))
        return document

    def write_document(self, document: Json) -> None:
        self._file.write_document(document)
        self.store_text(json.dumps(document))


def make_interfaces(
    world: World,
    host: Machine,
    clock: Any,
    cluster: Any,
    machine: FakeMachine,
    *,
    system: Any = None,
    ledger: FakeLedger | Ledger | None = None,
    crash_record: FakeCrashRecord | CrashRecordFile | None = None,
    services: Systemd | None = None,
    policy: DriftPolicy = DriftPolicy(),  # noqa: B008  # frozen
) -> NodeInterfaces:
    """Interfaces of an agent to a world; ``cluster`` is the Node client."""
    files = host.files
    configuration = NodeConfiguration(MachineInspector(host), StepRunner(host, services))
    configs = ConfigCache(files, cluster.fetch_machine_config)
    return NodeInterfaces(
        os=system or machine,
        images=FakeImages(world),
        power=machine,
        soft_reboots=machine,
        pins=machine,
        kernel=machine,
        ledger=ledger or FakeLedger(world),
        crash_record=crash_record or FakeCrashRecord(world),
        cluster=cluster,
        pull_secrets=FakePullSecrets(),
        bootstrap_registry=BootstrapRegistryFiles(files),
        certificates=FakeControllerConfigSync(),
        trust_store=FakeTrustStore(),
        requests=FakeRequests(world),
        mcd_state=MCDState(files),
        configuration=configuration,
        config_cache=configs,
        drift=DriftMonitor(
            host,
            NodeConfigs(configs, FakeImages(world).read_booted),
            DriftCheck(host, UnitFileReader(files)),
            SilentWatcher(),
            configuration,
            policy=policy,
            full_check_s=600.0,
        ),
        preflight=FakePreflight(world),
        health=FakeHealth(world, clock),
        clock=clock,
    )


def count_start(ports: NodeInterfaces) -> None:
    """Count the start of the agent, as its first step does."""
    CrashCounter(
        ports.ledger,
        ports.crash_record,
        ports.kernel,
        ports.clock,
        open_machine=lambda: (ports.os, ports.power, ports.configuration),
    ).count_start()


class Process:
    """The agent's process: what is lost with it, and nothing else."""

    def __init__(
        self,
        world: World,
        clock: FakeClock,
        *,
        drains: bool = True,
        softly: bool = False,
        bootc: str = "",
    ) -> None:
        """``bootc``: the directory where its adapter leaves things, if that is the back end."""
        machine = FakeMachine(world)
        system = bootc_of(world, clock, bootc) if bootc else machine
        self.cluster = FakeCluster(world)
        self.notifier = FakeNotifier()
        host = self.open_machine(world, clock)
        files = host.files
        ports = make_interfaces(
            world,
            host,
            clock,
            self.cluster,
            machine,
            system=system,
            ledger=self.open_ledger(world, host),
            crash_record=self.open_crash_record(world, host),
            services=self.open_services(world),
            policy=DriftPolicy(paths=HEALED, repairs_per_hour=1000),
        )
        self.config_cache = ports.config_cache
        count_start(ports)
        if world.crashes(world):
            raise Killed
        self.stop = threading.Event()
        self.loop = ReconcileLoop(
            ports,
            observer=Observer(
                ports, should_drain=drains, drain_limit_s=3600.0, can_soft_reboot=softly
            ),
            status_file=StatusFile(
                write=lambda content: self.write_status(host, content),
                notifier=self.notifier,
                clock=clock,
                node="node-1",
            ),
            metrics=NodeMetrics(files, clock),
            wakeup=self.make_wakeup(clock),
            stop=self.stop,
            limits=LimitSettings(),
        )

    def open_machine(self, world: World, clock: FakeClock) -> Machine:
        return make_machine(ROOT, world.disk, clock=clock)

    def open_services(self, _world: World) -> Systemd | None:
        """Return the running systemd; without one the agent makes the links of units itself."""
        return None

    def make_wakeup(self, _clock: FakeClock) -> Wakeup:
        return Wakeup()

    def open_ledger(self, world: World, machine: Machine) -> FakeLedger | Ledger:
        if world.keeps_records_on_disk:
            return DiskLedger(world, machine.files)
        return FakeLedger(world)

    def open_crash_record(
        self, world: World, machine: Machine
    ) -> FakeCrashRecord | CrashRecordFile:
        if world.keeps_records_on_disk:
            return CrashRecordFile(ROOT, machine.files)
        return FakeCrashRecord(world)

    def write_status(self, _machine: Machine, content: bytes) -> None:
        """The status is lost."""


class Node:
    """A node whose agent is started again whenever it ends, as systemd would."""

    def __init__(
        self, world: World, *, drains: bool = True, softly: bool = False, bootc: str = ""
    ) -> None:
        self.bootc = bootc
        self.world = world
        self.softly = softly
        self.clock = FakeClock(monotonic=100.0)
        self.drains = drains
        self.process: Process | None = None
        self.turns = 0
        self.disk_kills = False
        """When the disk's calls are used up, the process is killed; else the power goes."""

    def turn(self) -> float:
        """One turn of the agent, and what becomes of the machine in it."""
        self.turns += 1
        assert self.turns < TURNS_LIMIT, self.world.annotations
        try:
            if self.process is None:
                self.process = self.start_process()
                self.process.loop.finish_boot()
                self.check_start()
            self.process.cluster.see()
            delay_s = self.process.loop.reconcile_once()
        except Killed:
            self.process = None
            return 0.0
        except PowerCut:
            self.process = None
            self._cut_power()
            return 0.0
        except disk.PowerCut:
            self.process = None
            self.world.disk.calls_left = None
            if self.disk_kills:
                self.disk_kills = False
            else:
                self._cut_power()
            return 0.0
        except WentDown:
            self.process = None
            self._reboot()
            return 0.0
        if self.world.is_going_down:
            # rpm-ostreed had requested the reboot before the agent died, which was about to.
            self.process = None
            self._reboot()
        self.clock.move(min(delay_s, 60.0))
        return delay_s

    def _cut_power(self) -> None:
        self.world.power_cut()
        self.clock.begin_boot()

    def _reboot(self) -> None:
        is_soft = self.world.soft
        self.world.reboot()
        if not is_soft:
            self.clock.begin_boot()

    def start_process(self) -> Process:
        return Process(
            self.world, self.clock, drains=self.drains, softly=self.softly, bootc=self.bootc
        )

    def check_start(self) -> None:
        """The machine after a start, before the kubelet starts."""

    def settle(self) -> None:
        """Calm turns, with the drain controller at work."""
        before, idle_turns = self._snapshot(), 0
        for _ in range(TURNS_TO_REST):
            self.world.drain_controller()
            self.turn()
            now = self._snapshot()
            is_done = self.world.annotations.get(key.STATE) == "Done"
            idle_turns = idle_turns + 1 if now == before and is_done and self.process else 0
            if idle_turns == IDLE_TURNS:
                return
            before = now
        for _ in range(TURNS_TO_REST):
            if not self._is_retrying():
                return
            self.world.drain_controller()
            self.turn()

    def settle_in_outage(self) -> tuple[str, int]:
        """Settle without the API server and with it again.

        Returns what was booted and the number of rollbacks at the end of the outage.
        """
        self.world.api_up = False
        self.settle()
        at_end = self.world.booted, self.world.returns
        self.world.api_up = True
        self.settle()
        return at_end

    def _is_retrying(self) -> bool:
        """Return whether a target whose step failed is just being tried again."""
        record = records.from_json(json.loads(self.world.ledger) if self.world.ledger else None)
        has_failed = bool(record.history) and record.history[0].outcome is UpdateOutcome.FAILED
        return has_failed and (record.update is not None or record.quarantined is None)

    def _snapshot(self) -> tuple[object, ...]:
        world = self.world
        return (
            dict(world.annotations),
            world.ledger,
            world.request,
            world.system,
            world.staging,
            world.pending,
            world.boots,
            world.soft_boots,
            world.unschedulable,
            world.api_up,
            len(world.writes),
            len(world.events),
        )


NodeOf = Callable[[World], Node]


@contextmanager
def directories() -> Iterator[Callable[[str], str]]:
    """Where the adapter of a back end, by name, leaves things while within; in memory, as /run."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tn", dir=memory) as directory:
        yield lambda back_end: directory if back_end == "bootc" else ""


def world_at(target: Target, *configs: MachineConfig) -> World:
    """A world with these configs, whose node was installed from the target's image."""
    world = World(booted=target.digest)
    world.configs = {each.name: each for each in configs}
    world.request_target(target)
    return world


def assert_has_arguments(world: World, wish: WantedState) -> None:
    """The machine's kernel arguments are where they were, and those of the config come last."""
    own, added = world.system.arguments[: len(PLATFORM)], world.system.arguments[len(PLATFORM) :]
    assert own == PLATFORM
    assert are_effective(wish.os.kernel_arguments, world.system.arguments)
    assert not Counter(added) - Counter(wish.os.kernel_arguments)


def assert_at_rest(world: World, target: Target) -> None:
    """The node is all that the target asks for, in service, and says so; nothing is left over."""
    assert world.violations == []
    config = world.configs[target.config]
    image = target.image or config.os_image_url
    if image:
        assert world.booted == image.partition("@")[2]
    assert not world.staged
    assert not world.unschedulable
    notes = world.annotations
    assert notes[key.STATE] == "Done", notes
    assert (notes[key.CURRENT_CONFIG], notes.get(key.CURRENT_OS_IMAGE, "")) == (
        target.config,
        target.image,
    )
    assert notes.get(key.DESIRED_DRAIN) == notes.get(key.LAST_APPLIED_DRAIN)
    wish = read_wanted_state(config)
    steps = planned(world.disk, wish, target.config).steps
    # What is in the image does not belong to the config.
    ignored = (RecordOwnership, BackUpEntry) if target.image else (RecordOwnership,)
    assert [str(step) for step in steps if not isinstance(step, ignored)] == []
    assert_has_arguments(world, wish)
    hidden = [path for path in world.disk.tree() if "/.treenail" in path]
    assert hidden == []
    assert [p for p in world.disk.tree() if p.startswith(f"{TOP}{UNDO}/")] == []
