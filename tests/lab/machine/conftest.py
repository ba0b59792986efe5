"""A directory with a short name, because sockets go into it, and services in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gi.repository import GLib

from treenail_lab.images import make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine import rootfs
from treenail_lab.machine.node.daemons import MachineDaemons
from treenail_lab.machine.settings import MachineSettings, save_settings
from treenail_lab.machine.systemd.journal import EmulatedJournal


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    """A loop for each test, which takes along what the test leaves undispatched."""
    while GLib.MainContext.default().iteration(False):
        pass  # what tests of other folders left is not this one's doing
    own = GLib.MainContext.new()
    own.push_thread_default()
    yield
    own.pop_thread_default()
    assert not GLib.MainContext.default().pending()


@pytest.fixture
def directory() -> Iterator[Path]:
    with owner.temporary_directory() as name:
        yield name


class Services:
    """systemd and logind without the rest of a machine; ``requests`` has their requests."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.requests: list[str] = []
        self._settings = directory / "settings.json"
        self.change(MachineSettings(inhibit_delay_max_s=0.3))
        rootfs.install_root(self.root, make_image("os/node", "41.1", 1000))
        rootfs.boot_root(self.root)
        self.journal = EmulatedJournal(self.root)
        self.daemons = MachineDaemons(
            directory,
            self.root,
            directory / "images.json",
            self._settings,
            on_request=self.requests.append,
        )
        self.address = self.daemons.address

    def change(self, settings: MachineSettings) -> None:
        save_settings(settings, self._settings)

    def write_unit(self, name: str, text: str) -> None:
        path = self.root / "etc/systemd/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def services(directory: Path) -> Iterator[Services]:
    running = Services(directory)
    running.journal.start()
    running.daemons.start()
    yield running
    running.daemons.stop(hard=True)
    running.journal.stop()
