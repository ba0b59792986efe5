"""Calls of systemd and logind that fail on the way: each error names the service and a remedy."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from gi.repository import GLib

from tests.fakes.bus_proxy import BusCall, BusProxy, FaultKind
from tests.fakes.clock import FakeClock
from tests.fakes.services import Services
from treenail.errors import BusError, UnitError
from treenail.host.ostree.backend_settings import TransactionLimits
from treenail.host.ostree.deployments import TransactionVerdict
from treenail.host.rpmostree.client import TransactionFinished, follow_transaction
from treenail.host.systemd.logind import Logind
from treenail.host.systemd.system_bus import BusPeer, BusSignal, SystemBus
from treenail.host.systemd.systemd import Systemd
from treenail_lab.lifetime.owner import owner

pytestmark = pytest.mark.process

LOGIND = "org.freedesktop.login1"
SYSTEMD = "org.freedesktop.systemd1"
UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"


@pytest.fixture
def services() -> Iterator[Services]:
    with Services(units={"web.service": UNIT}) as services:
        yield services
    assert not GLib.MainContext.default().pending()


class ProxiedBus:
    """A bus on which all calls fail that are not about introspection, once ``fault`` is set."""

    def __init__(self, folder: Path, address: str) -> None:
        self.fault: FaultKind | None = None
        self.proxy = BusProxy(folder, address, self._choose_fault)
        self.bus = SystemBus(self.proxy.address)

    def _choose_fault(self, call: BusCall) -> FaultKind | None:
        return None if call.member == "Introspect" else self.fault


@pytest.fixture
def broken(services: Services) -> Iterator[ProxiedBus]:
    with owner.temporary_directory() as folder:
        found = ProxiedBus(folder, services.address)
        yield found
        found.bus.close_connection()
        found.proxy.close()


def fail(call: Callable[[], object]) -> BusError:
    with pytest.raises(BusError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("fault", [FaultKind.MISTYPED, FaultKind.SHORT])
def test_answer_of_another_type_is_an_error_with_the_service(
    broken: ProxiedBus, fault: FaultKind
) -> None:
    logind = Logind(broken.bus)
    broken.fault = fault
    for call in (logind.is_shutting_down, logind.list_inhibitors):
        error = fail(call)
        assert LOGIND in str(error)
        assert "returned type" in str(error)
        assert "interfaces differ" in error.remedy
    broken.fault = None
    assert logind.is_shutting_down() is False


@pytest.mark.parametrize("fault", [FaultKind.ABSENT, FaultKind.INACTIVE])
def test_systemd_that_left_the_bus_does_not_reject_the_unit(
    broken: ProxiedBus, fault: FaultKind
) -> None:
    """A rejection is final for a step; systemd that executes itself again answers soon."""
    systemd = Systemd(broken.bus, FakeClock())
    broken.fault = fault
    for call in (
        lambda: systemd.enable_units("web.service"),
        lambda: systemd.read_unit_file_state("web.service"),
        systemd.start_default_target,
    ):
        error = fail(call)
        assert not isinstance(error, UnitError)
        assert SYSTEMD in str(error)
        assert error.remedy
    broken.fault = None
    systemd.enable_units("web.service")


def test_text_of_a_hostile_error_is_short_and_without_token(broken: ProxiedBus) -> None:
    logind = Logind(broken.bus)
    broken.fault = FaultKind.HOSTILE
    error = fail(logind.list_inhibitors)
    assert "abcdefghijklmnop" not in str(error)
    assert len(str(error)) < 600
    assert f"busctl status {LOGIND}" in error.remedy


def test_lost_answer_is_an_error_and_the_next_call_connects(broken: ProxiedBus) -> None:
    logind = Logind(broken.bus)
    broken.fault = FaultKind.DISCONNECTED
    error = fail(logind.list_inhibitors)
    assert (error.name, LOGIND in str(error)) == ("", True)
    broken.fault = None
    assert logind.list_inhibitors() == ()


class OddTransaction:
    """A peer whose transaction ends with a result that has these values."""

    def __init__(self, *values: object) -> None:
        self._values = values

    def call_method(self, member: str, *, timeout_s: float) -> object:
        return True

    def run_until(self, handle: Callable[[BusSignal | None], bool]) -> bool:
        return handle(BusSignal("Finished", self._values))


@pytest.mark.parametrize("values", [(), (True,), ("yes", ""), (1, 2, 3)])
def test_transaction_with_another_result_has_failed(values: tuple[object, ...]) -> None:
    peer = cast("BusPeer", OddTransaction(*values))
    outcome = follow_transaction(
        peer,
        lambda _: TransactionVerdict.CONTINUE,
        clock=FakeClock(),
        limits=TransactionLimits(),
        is_ours=True,
    )
    assert isinstance(outcome, TransactionFinished)
    assert not outcome.is_success
    assert "another type" in outcome.text
