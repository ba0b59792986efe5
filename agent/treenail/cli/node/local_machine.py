"""Inspector and step runner of the machine below a root."""

from treenail.clock import SystemClock
from treenail.daemon.configuration.inspect import (
    MachineInspector,
    SystemdUnitStates,
    UnitStateSource,
)
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.filesystem.selinux import load_policy
from treenail.host.system.users import ShadowFile
from treenail.host.systemd.unit_files import UnitFileReader


def create_unit_states(root: Root, *, is_running: bool) -> UnitStateSource:
    """Who knows whether units are enabled: systemd, or their files."""
    if not is_running:
        return UnitFileReader(HostFiles(root))
    # As below.
    from treenail.host.systemd.bus import SystemBus
    from treenail.host.systemd.systemd import Systemd

    return SystemdUnitStates(Systemd(SystemBus(), SystemClock()))


def create_labelled_disk(root: Root) -> Disk:
    """The disk, with labels as this machine's SELinux policy says, where it has one."""
    return Disk(load_policy(root))


def create_inspector_and_runner(
    root: Root, *, is_running: bool
) -> tuple[MachineInspector, StepRunner]:
    """Who looks and who changes; ``is_running`` is a machine whose services take notice."""
    clock = SystemClock()
    disk = create_labelled_disk(root)
    shadow = ShadowFile(root, clock, disk)
    if not is_running:
        return MachineInspector(root, shadow, disk), StepRunner(root, shadow, disk)
    # Rare, and a directory needs no bus.
    from treenail.host.systemd.bus import SystemBus
    from treenail.host.systemd.systemd import Systemd

    systemd = Systemd(SystemBus(), clock)
    survey = MachineInspector(root, shadow, disk, SystemdUnitStates(systemd))
    return survey, StepRunner(root, shadow, disk, systemd)
