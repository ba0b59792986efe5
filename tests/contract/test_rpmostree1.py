"""The contract over rpm-ostree's D-Bus interface, of the lab's daemon."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.os_contract import OperatingSystemContract
from tests.contract.os_machines import Images
from tests.contract.rpmostree_transactions import RpmOstreeContract
from tests.fakes import login1
from tests.fakes.bus_service import BusService
from treenail.clocks import SystemClock
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.backend_settings import TransactionLimits
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.rpmostree.client import RpmOstreeClient, TransactionOutcome
from treenail.host.systemd.system_bus import BusInterface, SystemBus, make_options
from treenail_lab.images import ARCHITECTURE, Credential, make_image, make_manifest_list
from treenail_lab.machine.node.daemons import RpmOstreeHost
from treenail_lab.machine.settings import MachineSettings

HERE = make_image("os/node", "1.0", 1_000_000)
THERE = make_image("os/node", "2.0", 1_000_000)
BROKEN = make_image("os/node", "2.1", 1_000_000, faults={"pull": "corrupt layer"})
INSANE = make_image("os/node", "2.2", 1_000_000, faults={"sanity": "bwrap(/usr/bin/true): exit 1"})
CLOSED = make_image(
    "os/node", "2.3", 1_000_000, registry="r.example", credential=Credential("node", "secret")
)
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
        insane=INSANE.pull_spec,
    )

    def __init__(self, host: RpmOstreeHost, opened: ExitStack) -> None:
        self._host = host
        self._opened = opened
        self._serve_login1()

    def os(self) -> RpmOstreeBackend:
        machine = Machine(Root(self._host.root), clock=SystemClock(), bus=self._connect())
        return RpmOstreeBackend(machine)

    def transact(self, method: str, *arguments: object) -> TransactionOutcome:
        client = RpmOstreeClient(
            self._connect(), SystemClock(), TransactionLimits(), heartbeat=lambda: None
        )
        values = [make_options(each) if isinstance(each, dict) else each for each in arguments]
        return client.run_transaction(method, *values)

    def call(self, target: BusInterface, method: str, *arguments: object) -> object:
        return self._connect().call_method(target, method, *arguments, timeout_s=10.0)

    def withhold_login(self) -> str:
        return CLOSED.pull_spec

    def reboot(self) -> None:
        self._opened.close()
        self._host.reboot()
        self._serve_login1()

    def slow_down(self) -> None:
        self._host.change_settings(MachineSettings(pull_bytes_per_s=1000))

    def unlock_staged(self) -> None:
        assert self._host.sysroot.unlock_staged()

    def set_pinned(self, index: int, *, is_pinned: bool) -> None:
        sysroot = self._host.sysroot
        sysroot.set_pinned(sysroot.list_deployments()[index], pinned=is_pinned)

    def block_shutdown(self) -> None:
        self._opened.close()
        self._serve_login1(("shutdown", "backup", "running", "block", 0, 1))

    def _connect(self) -> SystemBus:
        bus = SystemBus(self._host.address)
        self._opened.callback(bus.close_connection)
        return bus

    def _serve_login1(self, *inhibitors: tuple[str, str, str, str, int, int]) -> None:
        objects = {login1.PATH: login1.Login1(*inhibitors)}
        self._opened.enter_context(BusService(self._host.address, login1.NAME, objects))


@pytest.fixture
def machine() -> Iterator[LabMachine]:
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        RpmOstreeHost(
            Path(folder),
            booted=HERE,
            images=(THERE, BROKEN, INSANE, CLOSED, LISTED, FOREIGN),
            settings=QUICK,
        ) as host,
        ExitStack() as opened,
    ):
        yield LabMachine(host, opened)


@pytest.mark.integration
class TestRpmOstree(OperatingSystemContract):
    """On the lab's deployments."""


@pytest.mark.integration
class TestTransactions(RpmOstreeContract):
    """On the lab's deployments."""
