"""What manages the operating system of this host, and talking to it."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from treenail.clock import Clock
from treenail.daemon.settings.settings import BackendSetting
from treenail.errors import FileError, HostError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.filesystem.selinux import load_policy
from treenail.host.ostree.deployments import DeploymentStatus
from treenail.host.ostree.watch import TransactionLimits
from treenail.host.systemd.bus import SystemBus

if TYPE_CHECKING:
    # The port drags the whole daemon behind it.
    from treenail.daemon.reconcile.interfaces import OSBackend
    from treenail.host.ostree.jobs import JobRunner
    from treenail.host.ostree.pins import OstreePins
    from treenail.host.ostree.soft_reboot import OstreeSoftReboot
    from treenail.host.rpmostree.extensions import ExtensionsRepository

log = logging.getLogger(__name__)

STATUS_PATH = "/run/treenail/status.json"
_MAX_STATUS_BYTES = 1024 * 1024
_RPM_OSTREED_UNIT = "/usr/lib/systemd/system/rpm-ostreed.service"
_BOOTC_PROGRAM = "/usr/bin/bootc"
_STATUS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One of the two, and the reason, for people."""

    backend: BackendSetting
    reason: str


def choose_backend(setting: BackendSetting, root: Root) -> BackendChoice:
    """The back end that is set, or else the one that can do most of those that are installed."""
    if setting is not BackendSetting.AUTO:
        return BackendChoice(setting, "the setting backend says so")
    if root.resolve_path(_RPM_OSTREED_UNIT).exists():
        return BackendChoice(
            BackendSetting.RPM_OSTREE,
            "it is installed, and changes kernel arguments and packages too",
        )
    if root.resolve_path(_BOOTC_PROGRAM).exists():
        return BackendChoice(BackendSetting.BOOTC, "it is installed, and rpm-ostree is not")
    return BackendChoice(
        BackendSetting.RPM_OSTREE, f"there is neither {_RPM_OSTREED_UNIT} nor {_BOOTC_PROGRAM}"
    )


def is_composefs(root: Root, clock: Clock) -> bool:
    """Whether bootc manages this host, and without OSTree, so that treenail can't."""
    program = root.resolve_path(_BOOTC_PROGRAM)
    if not program.exists():
        return False
    from treenail.host.bootc.status import is_composefs
    from treenail.host.system.process import ProgramRunner
    from treenail.host.systemd.journal import SystemdJournal
    from treenail.host.systemd.transient import TransientUnits
    from treenail.host.systemd.unsandboxed import UnsandboxedRunner

    command = [str(program), "status", "--json", "--format-version=1"]
    bus = SystemBus()
    try:
        journal = SystemdJournal(ProgramRunner(clock, os.environ), root, clock)
        outside = UnsandboxedRunner(TransientUnits(bus), journal, root, heartbeat=lambda: None)
        return is_composefs(outside.run_command(command, timeout_s=_STATUS_TIMEOUT_S))
    except HostError as error:
        log.info("bootc tells nothing of this host: %s", error)
        return False
    finally:
        bus.close_connection()


def create_operating_system(
    choice: BackendChoice,
    bus: SystemBus,
    root: Root,
    clock: Clock,
    limits: TransactionLimits,
    *,
    alive: Callable[[], None] = lambda: None,
) -> "OSBackend":
    """The chosen back end; ``alive`` is called once a second while it is waited for."""
    # Each is imported when it is asked for, so that a process has only what it runs.
    from treenail.daemon.checks.signature_policy import needs_signature

    signed = partial(needs_signature, HostFiles(root))
    if choice.backend is BackendSetting.BOOTC:
        from treenail.host.bootc.backend import BootcBackend
        from treenail.host.system.process import ProgramRunner

        programs = ProgramRunner(clock, os.environ)
        return BootcBackend(
            bus, programs, root, clock, limits, heartbeat=alive, needs_signature=signed
        )
    from treenail.host.rpmostree.backend import RpmOstreeBackend
    from treenail.host.system.reservation import SpaceReservation

    def unlock() -> None:
        create_soft_reboots(bus, root, clock, limits, alive=alive).unlock_staged()

    return RpmOstreeBackend(
        bus,
        clock,
        limits,
        heartbeat=alive,
        needs_signature=signed,
        unlock_staged=unlock,
        extensions=_create_extensions(bus, root, clock, limits, alive),
        reservation=SpaceReservation(root),
    )


def _create_extensions(
    bus: SystemBus, root: Root, clock: Clock, limits: TransactionLimits, alive: Callable[[], None]
) -> "ExtensionsRepository":
    from treenail.host.container.podman import Podman
    from treenail.host.ostree.jobs import JobRunner
    from treenail.host.rpmostree.extensions import ExtensionsRepository
    from treenail.host.system.process import ProgramRunner
    from treenail.host.systemd.journal import SystemdJournal
    from treenail.host.systemd.transient import TransientUnits
    from treenail.host.systemd.unsandboxed import UnsandboxedRunner

    units, programs = TransientUnits(bus), ProgramRunner(clock, os.environ)
    journal = SystemdJournal(programs, root, clock)
    return ExtensionsRepository(
        root,
        HostFiles(root, Disk(load_policy(root))),
        Podman(programs, UnsandboxedRunner(units, journal, root, heartbeat=alive), root),
        units,
        JobRunner(units, journal, clock, limits, heartbeat=alive, program="podman"),
        timeout_s=limits.transaction_s,
    )


def create_soft_reboots(
    bus: SystemBus,
    root: Root,
    clock: Clock,
    limits: TransactionLimits,
    *,
    alive: Callable[[], None] = lambda: None,
) -> "OstreeSoftReboot":
    """What prepares soft reboots, whichever the back end."""
    from treenail.host.ostree.soft_reboot import OstreeSoftReboot

    return OstreeSoftReboot(_create_ostree_jobs(bus, root, clock, limits, alive), root)


def create_pins(
    bus: SystemBus,
    root: Root,
    clock: Clock,
    limits: TransactionLimits,
    *,
    look: Callable[[], DeploymentStatus],
    alive: Callable[[], None] = lambda: None,
) -> "OstreePins":
    """What keeps deployments, whichever the back end."""
    from treenail.host.ostree.pins import OstreePins

    return OstreePins(_create_ostree_jobs(bus, root, clock, limits, alive), root, look)


def _create_ostree_jobs(
    bus: SystemBus, root: Root, clock: Clock, limits: TransactionLimits, alive: Callable[[], None]
) -> "JobRunner":
    from treenail.host.ostree.jobs import JobRunner
    from treenail.host.system.process import ProgramRunner
    from treenail.host.systemd.journal import SystemdJournal
    from treenail.host.systemd.transient import TransientUnits

    journal = SystemdJournal(ProgramRunner(clock, os.environ), root, clock)
    return JobRunner(TransientUnits(bus), journal, clock, limits, heartbeat=alive, program="ostree")


def read_deployments(root: Root, clock: Clock) -> DeploymentStatus:
    """The deployments as the agent's back end sees them, for a command; raises `HostError`."""
    bus = SystemBus()
    try:
        os = create_operating_system(
            choose_backend(_find_agent_backend(root), root), bus, root, clock, TransactionLimits()
        )
        found = os.read_deployments()
        os.release_daemon()
    finally:
        bus.close_connection()
    return found


def _find_agent_backend(root: Root) -> BackendSetting:
    """What the agent chose in this boot; if it has not run, what it would."""
    try:
        content = HostFiles(root).read_file(STATUS_PATH, limit=_MAX_STATUS_BYTES)
        match json.loads(content or b"{}"):
            case {"backend": {"name": str(name)}}:
                return BackendSetting(name)
            case _:
                return BackendSetting.AUTO
    except (FileError, ValueError):
        return BackendSetting.AUTO
