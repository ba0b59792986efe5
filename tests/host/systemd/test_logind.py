"""The client of logind with the fake logind of the lab."""

import os
from collections.abc import Iterator

import pytest
from gi.repository import GLib

from tests.fakes.inhibitor import hold_inhibitor
from tests.fakes.services import Services
from treenail.errors import BusError
from treenail.host.systemd.logind import InhibitorLock, Logind
from treenail.host.systemd.system_bus import SystemBus
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process


@pytest.fixture
def services() -> Iterator[Services]:
    # Long enough that the end of the delay lock, and no timeout, continues the shutdown.
    with Services(MachineSettings(inhibit_delay_max_s=600)) as services:
        yield services
    assert not GLib.MainContext.default().pending()


@pytest.fixture
def logind(bus: SystemBus) -> Logind:
    return Logind(bus)


def test_reboot_is_requested_once_and_then_in_progress(
    services: Services, bus: SystemBus, logind: Logind
) -> None:
    before = logind.is_shutting_down()
    with hold_inhibitor(
        "shutdown", "treenail", "writes a deployment", "delay", address=services.address
    ):
        logind.reboot_machine()
        during = logind.is_shutting_down()
        logind.reboot_machine()
    assert services.read_line() == "reboot"
    assert (before, during) == (False, True)


def test_list_inhibitors_returns_locks_of_others(services: Services, logind: Logind) -> None:
    with hold_inhibitor("shutdown:sleep", "treenail", "testing", "block", address=services.address):
        held = logind.list_inhibitors()
    after = logind.list_inhibitors()
    lock = InhibitorLock("shutdown:sleep", "treenail", "testing", "block", os.getuid(), os.getpid())
    assert (held, after) == ((lock,), ())


@pytest.mark.parametrize("version", [252, 257, 258])
def test_blocked_reboot_names_the_holder(services: Services, logind: Logind, version: int) -> None:
    services.change(MachineSettings(systemd_version=version))
    with (
        hold_inhibitor("shutdown", "backup", "copying", "block", address=services.address),
        pytest.raises(BusError, match=rf"blocked by backup \(process {os.getpid()}\): copying$"),
    ):
        logind.reboot_machine()
    assert not logind.is_shutting_down()


@pytest.mark.parametrize(
    ("version", "action"), [(252, "reboot"), (254, "soft-reboot"), (258, "soft-reboot")]
)
def test_soft_reboot_without_support_is_a_reboot(
    services: Services, logind: Logind, version: int, action: str
) -> None:
    services.change(MachineSettings(systemd_version=version))
    logind.reboot_machine(is_soft=True)
    assert services.read_line() == action


def test_missing_logind_is_a_bus_error(services: Services, logind: Logind) -> None:
    services.vanish()
    with pytest.raises(BusError, match="cannot connect to the system bus"):
        logind.reboot_machine()
