"""What manages the operating system of this host, and talking to it."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from treenail.clock import Clock
from treenail.daemon.settings.settings import Backend
from treenail.errors import FileError, HostError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.filesystem.selinux import policy
from treenail.host.ostree.deployments import Deployments
from treenail.host.ostree.watch import Limits
from treenail.host.systemd.bus import SystemBus

if TYPE_CHECKING:
    # The port drags the whole daemon behind it.
    from treenail.daemon.reconcile.interfaces import OperatingSystem
    from treenail.host.ostree.jobs import Jobs
    from treenail.host.ostree.pins import Pins
    from treenail.host.ostree.soft_reboot import SoftReboots
    from treenail.host.rpmostree.extensions import Extensions

log = logging.getLogger(__name__)

LIVE = "/run/treenail/status.json"
_LIVE_LIMIT = 1024 * 1024
_RPM_OSTREED = "/usr/lib/systemd/system/rpm-ostreed.service"
_BOOTC = "/usr/bin/bootc"
_STATUS_S = 60.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the two, and the reason, for people."""

    backend: Backend
    why: str


def choose(wanted: Backend, root: Root) -> Choice:
    """The back end that is set, or else the one that can do most of those that are installed."""
    if wanted is not Backend.AUTO:
        return Choice(wanted, "the setting backend says so")
    if root.path(_RPM_OSTREED).exists():
        return Choice(
            Backend.RPM_OSTREE,
            "it is installed, and changes kernel arguments and packages too",
        )
    if root.path(_BOOTC).exists():
        return Choice(Backend.BOOTC, "it is installed, and rpm-ostree is not")
    return Choice(Backend.RPM_OSTREE, f"there is neither {_RPM_OSTREED} nor {_BOOTC}")


def is_composefs(root: Root, clock: Clock) -> bool:
    """Whether bootc manages this host, and without OSTree, so that treenail can't."""
    program = root.path(_BOOTC)
    if not program.exists():
        return False
    from treenail.host.bootc.status import is_composefs
    from treenail.host.system.process import Programs
    from treenail.host.systemd.journal import Journal
    from treenail.host.systemd.transient import TransientUnits
    from treenail.host.systemd.unsandboxed import Outside

    command = [str(program), "status", "--json", "--format-version=1"]
    bus = SystemBus()
    try:
        journal = Journal(Programs(clock, os.environ), root, clock)
        outside = Outside(TransientUnits(bus), journal, root, alive=lambda: None)
        return is_composefs(outside.run(command, limit_s=_STATUS_S))
    except HostError as error:
        log.info("bootc tells nothing of this host: %s", error)
        return False
    finally:
        bus.close()


def operating_system(
    choice: Choice,
    bus: SystemBus,
    root: Root,
    clock: Clock,
    limits: Limits,
    *,
    alive: Callable[[], None] = lambda: None,
) -> "OperatingSystem":
    """The chosen back end; ``alive`` is called once a second while it is waited for."""
    # Each is imported when it is asked for, so that a process has only what it runs.
    from treenail.daemon.checks.signature_policy import verifies

    signed = partial(verifies, Files(root))
    if choice.backend is Backend.BOOTC:
        from treenail.host.bootc.backend import Bootc
        from treenail.host.system.process import Programs

        programs = Programs(clock, os.environ)
        return Bootc(bus, programs, root, clock, limits, alive=alive, verifies=signed)
    from treenail.host.rpmostree.backend import RpmOstree
    from treenail.host.system.reservation import Reserve

    def unlock() -> None:
        soft_reboots(bus, root, clock, limits, alive=alive).unlock()

    return RpmOstree(
        bus,
        clock,
        limits,
        alive=alive,
        verifies=signed,
        unlock=unlock,
        extensions=_extensions(bus, root, clock, limits, alive),
        reserve=Reserve(root),
    )


def _extensions(
    bus: SystemBus, root: Root, clock: Clock, limits: Limits, alive: Callable[[], None]
) -> "Extensions":
    from treenail.host.container.podman import Podman
    from treenail.host.ostree.jobs import Jobs
    from treenail.host.rpmostree.extensions import Extensions
    from treenail.host.system.process import Programs
    from treenail.host.systemd.journal import Journal
    from treenail.host.systemd.transient import TransientUnits
    from treenail.host.systemd.unsandboxed import Outside

    units, programs = TransientUnits(bus), Programs(clock, os.environ)
    journal = Journal(programs, root, clock)
    return Extensions(
        root,
        Files(root, Disk(policy(root))),
        Podman(programs, Outside(units, journal, root, alive=alive), root),
        units,
        Jobs(units, journal, clock, limits, alive=alive, who="podman"),
        limit_s=limits.transaction_s,
    )


def soft_reboots(
    bus: SystemBus,
    root: Root,
    clock: Clock,
    limits: Limits,
    *,
    alive: Callable[[], None] = lambda: None,
) -> "SoftReboots":
    """What prepares soft reboots, whichever the back end."""
    from treenail.host.ostree.soft_reboot import SoftReboots

    return SoftReboots(_ostree_jobs(bus, root, clock, limits, alive), root)


def pins(
    bus: SystemBus,
    root: Root,
    clock: Clock,
    limits: Limits,
    *,
    look: Callable[[], Deployments],
    alive: Callable[[], None] = lambda: None,
) -> "Pins":
    """What keeps deployments, whichever the back end."""
    from treenail.host.ostree.pins import Pins

    return Pins(_ostree_jobs(bus, root, clock, limits, alive), root, look)


def _ostree_jobs(
    bus: SystemBus, root: Root, clock: Clock, limits: Limits, alive: Callable[[], None]
) -> "Jobs":
    from treenail.host.ostree.jobs import Jobs
    from treenail.host.system.process import Programs
    from treenail.host.systemd.journal import Journal
    from treenail.host.systemd.transient import TransientUnits

    journal = Journal(Programs(clock, os.environ), root, clock)
    return Jobs(TransientUnits(bus), journal, clock, limits, alive=alive, who="ostree")


def deployments(root: Root, clock: Clock) -> Deployments:
    """The deployments as the agent's back end sees them, for a command; raises `HostError`."""
    bus = SystemBus()
    try:
        os = operating_system(choose(_agents(root), root), bus, root, clock, Limits())
        found = os.look()
        os.release()
    finally:
        bus.close()
    return found


def _agents(root: Root) -> Backend:
    """What the agent chose in this boot; if it has not run, what it would."""
    try:
        content = Files(root).read(LIVE, limit=_LIVE_LIMIT)
        match json.loads(content or b"{}"):
            case {"backend": {"name": str(name)}}:
                return Backend(name)
            case _:
                return Backend.AUTO
    except (FileError, ValueError):
        return Backend.AUTO
