"""The machine below a root, for commands that look at it or change it."""

from treenail.clock import SystemClock
from treenail.daemon.configuration.inspect import AskedStates, Survey, UnitStates
from treenail.daemon.configuration.step_runner import Runner
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.filesystem.selinux import policy
from treenail.host.system.users import Shadow
from treenail.host.systemd.unit_files import Units


def unit_states(root: Root, *, running: bool) -> UnitStates:
    """Who knows whether units are enabled: systemd, or their files."""
    if not running:
        return Units(Files(root))
    # As below.
    from treenail.host.systemd.bus import SystemBus
    from treenail.host.systemd.systemd import Systemd

    return AskedStates(Systemd(SystemBus(), SystemClock()))


def labelled_disk(root: Root) -> Disk:
    """The disk, with labels as this machine's SELinux policy says, where it has one."""
    return Disk(policy(root))


def survey_and_runner(root: Root, *, running: bool) -> tuple[Survey, Runner]:
    """Who looks and who changes; ``running`` is a machine whose services take notice."""
    clock = SystemClock()
    disk = labelled_disk(root)
    shadow = Shadow(root, clock, disk)
    if not running:
        return Survey(root, shadow, disk), Runner(root, shadow, disk)
    # Rare, and a directory needs no bus.
    from treenail.host.systemd.bus import SystemBus
    from treenail.host.systemd.systemd import Systemd

    systemd = Systemd(SystemBus(), clock)
    survey = Survey(root, shadow, disk, AskedStates(systemd))
    return survey, Runner(root, shadow, disk, systemd)
