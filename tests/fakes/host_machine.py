"""A `Machine` over a given disk, for tests that need no system bus."""

from tests.fakes.clock import FakeClock
from treenail.clocks import Clock
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.system.users import ShadowFile


def make_machine(
    root: Root,
    disk: Disk | None = None,
    *,
    clock: Clock | None = None,
    shadow: ShadowFile | None = None,
) -> Machine:
    """Make the context of the machine on ``disk``; without one, on the real disk, unlabelled."""
    machine = Machine(root, clock=clock or FakeClock())
    machine.disk = disk or Disk()
    machine.files = HostFiles(root, machine.disk)
    if shadow is not None:
        machine.shadow = shadow
    return machine
