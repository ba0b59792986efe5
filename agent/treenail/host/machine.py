"""The context of one machine: its root, clock, bus and heartbeat, and the adapters made of them.

Adapters are imported when they are first used, so that a process loads only what it runs: a
command that reads one file needs neither gi nor libselinux.
"""

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Self

from treenail.clocks import Clock
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.filesystem.disk import Disk
from treenail.host.ostree.backend_settings import TransactionLimits

if TYPE_CHECKING:
    from treenail.host.container.podman import Podman
    from treenail.host.ostree.admin import OstreeSoftReboot
    from treenail.host.ostree.jobs import JobRunner
    from treenail.host.ostree.sysroot import OstreeMetadata
    from treenail.host.rollback.backups import FileBackups
    from treenail.host.rollback.transaction import PendingChange, UndoTransaction
    from treenail.host.system.disk_space import SpaceReservation
    from treenail.host.system.kernel import HostKernel
    from treenail.host.system.state_file import CrashRecordFile, Ledger
    from treenail.host.system.users import ShadowFile
    from treenail.host.systemd.journal import SystemdJournal
    from treenail.host.systemd.logind import Logind
    from treenail.host.systemd.system_bus import SystemBus
    from treenail.host.systemd.systemd import Systemd, Timedate
    from treenail.host.systemd.transient import TransientUnits, UnsandboxedRunner
    from treenail.process import ProgramRunner
    from treenail.sd_notify import SystemdNotifier
    from treenail.units.unit_files import UnitFileReader

_LIMITS = TransactionLimits()


class Machine:
    """The machine below a root. Each adapter is made once; all of them are for one thread.

    Paths of programs are below ``root`` too, and systemd must see them under the same names.
    """

    def __init__(
        self,
        root: root_directory.Root,
        *,
        clock: Clock,
        bus: "SystemBus | None" = None,
        heartbeat: Callable[[], None] = lambda: None,
        limits: TransactionLimits = _LIMITS,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Without ``bus``, connect to the system bus on first use; `close` disconnects it.

        ``heartbeat`` is called once a second while a transaction or a job runs that has no watcher.
        """
        self.root = root
        self.clock = clock
        self.heartbeat = heartbeat
        self.limits = limits
        self.environ = environ
        self._given_bus = bus

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from the bus, unless the caller gave it."""
        if self._given_bus is None and "bus" in self.__dict__:
            self.bus.close_connection()

    # Files.

    @cached_property
    def disk(self) -> Disk:
        """The disk, with labels from the machine's SELinux policy where it has one."""
        from treenail.host.filesystem.selinux import load_policy

        return Disk(load_policy(self.root))

    @cached_property
    def files(self) -> atomic_files.HostFiles:
        """Files of treenail itself, in /run and /var/lib: the kernel labels new ones."""
        return atomic_files.HostFiles(self.root)

    @cached_property
    def labelled_files(self) -> atomic_files.HostFiles:
        """Files of the operating system: new ones get the label that the policy has for them."""
        return atomic_files.HostFiles(self.root, self.disk)

    @cached_property
    def crash_record(self) -> "CrashRecordFile":
        """The record of the agent's crashes during a boot trial."""
        from treenail.host.system.state_file import CrashRecordFile

        return CrashRecordFile(self.root, self.files)

    @cached_property
    def ledger(self) -> "Ledger":
        from treenail.host.system.state_file import Ledger

        return Ledger(self.root, self.files)

    @cached_property
    def reservation(self) -> "SpaceReservation":
        from treenail.host.system.disk_space import SpaceReservation

        return SpaceReservation(self.root)

    @cached_property
    def shadow(self) -> "ShadowFile":
        from treenail.host.system.users import ShadowFile

        return ShadowFile(self.root, self.clock, self.disk)

    @cached_property
    def undo(self) -> "UndoTransaction":
        """The change in progress. Its state is per object, so all users must share this one."""
        from treenail.host.rollback.transaction import UndoTransaction

        return UndoTransaction(self.root, self.disk)

    @cached_property
    def pending_change(self) -> "PendingChange":
        from treenail.host.rollback.transaction import PendingChange

        return PendingChange(self.root, self.disk)

    @cached_property
    def backups(self) -> "FileBackups":
        from treenail.host.rollback.backups import FileBackups

        return FileBackups(self.root, self.disk)

    # Kernel and programs.

    @cached_property
    def kernel(self) -> "HostKernel":
        """The running kernel; its boot ID counts soft reboots, which systemd reports."""
        from treenail.host.system.kernel import HostKernel

        return HostKernel(self.root, count_soft_reboots=self._count_soft_reboots)

    def _count_soft_reboots(self) -> int | None:
        # Connect only when the boot ID is read: most commands read /proc alone.
        from treenail.retry import retry_bus_call

        return retry_bus_call(self.systemd.count_soft_reboots, self.clock)

    @cached_property
    def programs(self) -> "ProgramRunner":
        from treenail.host.system.proxies import read_proxies
        from treenail.process import ProgramRunner

        return ProgramRunner(
            self.clock, self.environ, read_variables=lambda: read_proxies(self.files)
        )

    @cached_property
    def unsandboxed(self) -> "UnsandboxedRunner":
        """Programs that systemd runs, outside the sandbox of the agent's unit."""
        from treenail.host.systemd.transient import UnsandboxedRunner

        return UnsandboxedRunner(
            self.transient_units, self.journal, self.root, heartbeat=self.heartbeat
        )

    @cached_property
    def podman(self) -> "Podman":
        from treenail.host.container.podman import Podman

        return Podman(self.programs, self.unsandboxed, self.root, self.clock)

    # systemd and its services.

    @cached_property
    def bus(self) -> "SystemBus":
        if self._given_bus is not None:
            return self._given_bus
        from treenail.host.systemd.system_bus import SystemBus

        return SystemBus()

    @cached_property
    def systemd(self) -> "Systemd":
        from treenail.host.systemd.systemd import Systemd

        return Systemd(self.bus, self.clock)

    @cached_property
    def logind(self) -> "Logind":
        from treenail.host.systemd.logind import Logind

        return Logind(self.bus)

    @cached_property
    def timedate(self) -> "Timedate":
        from treenail.host.systemd.systemd import Timedate

        return Timedate(self.bus)

    @cached_property
    def journal(self) -> "SystemdJournal":
        from treenail.host.systemd.journal import SystemdJournal

        return SystemdJournal(self.programs, self.root, self.clock)

    @cached_property
    def notifier(self) -> "SystemdNotifier":
        from treenail.sd_notify import SystemdNotifier

        return SystemdNotifier(self.environ)

    @cached_property
    def unit_files(self) -> "UnitFileReader":
        """Unit files read from disk, for a machine whose systemd does not run."""
        from treenail.units.unit_files import UnitFileReader

        return UnitFileReader(self.files)

    @cached_property
    def transient_units(self) -> "TransientUnits":
        from treenail.host.systemd.transient import TransientUnits

        return TransientUnits(self.bus)

    @cached_property
    def jobs(self) -> "JobRunner":
        """Commands of ostree, bootc and podman as transient units."""
        from treenail.host.ostree.jobs import JobRunner

        return JobRunner(
            self.transient_units,
            self.journal,
            self.clock,
            self.limits,
            heartbeat=self.heartbeat,
        )

    # Deployments.

    @cached_property
    def ostree_metadata(self) -> "OstreeMetadata":
        from treenail.host.ostree.sysroot import OstreeMetadata

        return OstreeMetadata(self.programs, self.root)

    @cached_property
    def soft_reboot(self) -> "OstreeSoftReboot":
        from treenail.host.ostree.admin import OstreeSoftReboot

        return OstreeSoftReboot(self.jobs, self.root)
