"""The contract over rpm-ostree's D-Bus interface, of the lab's daemon."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.os_contract import OperatingSystemContract
from tests.contract.os_machines import Images
from tests.fakes import login1
from tests.fakes.bus_service import BusService
from treenail.clock import SystemClock
from treenail.host.filesystem.root import Root
from treenail.host.machine import Machine
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.systemd.bus import SystemBus
from treenail_lab.images import ARCHITECTURE, make_image, make_manifest_list
from treenail_lab.machine.node.rpmostree_only import RpmOstreeHost
from treenail_lab.machine.settings import MachineSettings

HERE = make_image("os/node", "1.0", 1_000_000)
THERE = make_image("os/node", "2.0", 1_000_000)
BROKEN = make_image("os/node", "2.1", 1_000_000, faults={"pull": "corrupt layer"})
LISTED, FOREIGN = make_manifest_list(
    make_image("os/node", "2.5", 1_000_000, architecture=ARCHITECTURE),
    make_image("os/node", "2.5", 1_000_000, architecture="s390x"),
)
QUICK = MachineSettings(staging_s=0.02)


class LabMachine:
    """A root directory with the lab's rpm-ostreed, and a logind that only counts."""

    images = Images(
        HERE.pull_spec,
        THERE.pull_spec,
        BROKEN.pull_spec,
        listed=LISTED.list_pull_spec,
        listed_manifest=LISTED.digest,
    )

    def __init__(self, host: RpmOstreeHost, opened: ExitStack) -> None:
        self._host = host
        self._opened = opened
        self._serve_login1()

    def os(self) -> RpmOstreeBackend:
        bus = SystemBus(self._host.address)
        self._opened.callback(bus.close_connection)
        return RpmOstreeBackend(Machine(Root(self._host.root), clock=SystemClock(), bus=bus))

    def reboot(self) -> None:
        self._opened.close()
        self._host.reboot()
        self._serve_login1()

    def slow_down(self) -> None:
        self._host.change_settings(MachineSettings(pull_bytes_per_s=1000))

    def _serve_login1(self) -> None:
        objects = {login1.PATH: login1.Login1()}
        self._opened.enter_context(BusService(self._host.address, login1.NAME, objects))


@pytest.mark.integration
class TestRpmOstree(OperatingSystemContract):
    @pytest.fixture
    def machine(self) -> Iterator[LabMachine]:
        with (
            tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
            RpmOstreeHost(
                Path(folder),
                booted=HERE,
                images=(THERE, BROKEN, LISTED, FOREIGN),
                settings=QUICK,
            ) as host,
            ExitStack() as opened,
        ):
            yield LabMachine(host, opened)
