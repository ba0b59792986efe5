"""Faults between a client and rpm-ostreed's bus name, injected on purpose."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gi.repository import GLib

from tests.fakes.bus_service import BusService, Exports, Refusal, Silence
from tests.fakes.clock import FakeClock
from tests.fakes.private_bus import PrivateBus
from treenail.errors import BusError, BusyError
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.rpmostree.backend import RpmOstreeBackend
from treenail.host.systemd.system_bus import BusInterface, SystemBus

NAME = "org.projectatomic.rpmostree1"
BASE = "/org/projectatomic/rpmostree1"
BUS = BusInterface("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
SYSROOT_XML = f"""<node><interface name="{NAME}.Sysroot">
  <method name="RegisterClient"><arg type="a{{sv}}" direction="in"/></method>
  <method name="UnregisterClient"><arg type="a{{sv}}" direction="in"/></method>
  <method name="Reload"/>
  <property name="Booted" type="o" access="read"/>
  <property name="Deployments" type="aa{{sv}}" access="read"/>
</interface></node>"""
OS_XML = f"""<node><interface name="{NAME}.OS">
  <method name="FinalizeDeployment">
    <arg type="a{{sv}}" direction="in"/><arg type="s" direction="out"/>
  </method>
</interface></node>"""
STAGED = {
    "id": GLib.Variant("s", "os-abc.0"),
    "checksum": GLib.Variant("s", "abc"),
    "staged": GLib.Variant("b", True),
}
BUSY = "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code26"


class Daemon:
    """A daemon that notes what it is asked, and may exit instead of answering."""

    def __init__(self, address: str, staged: dict[str, GLib.Variant]) -> None:
        sysroot = Exports(SYSROOT_XML, {
            "RegisterClient": self._register,
            "UnregisterClient": lambda _options: self.asked.append("UnregisterClient"),
            "Reload": lambda: self.asked.append("Reload"),
        })  # fmt: skip
        sysroot.properties = {
            "Booted": GLib.Variant("o", f"{BASE}/os"),
            "Deployments": GLib.Variant("aa{sv}", [staged]),
        }
        system = Exports(OS_XML, {"FinalizeDeployment": self._finalize})
        self.service = BusService(address, NAME, {f"{BASE}/Sysroot": sysroot, f"{BASE}/os": system})
        self.asked: list[str] = []
        self.exits = 0
        self.refusal: Refusal | None = None

    def _register(self, options: dict[str, object]) -> None:
        self.asked.append(f"RegisterClient {options}")
        if self.exits:
            self.exits -= 1
            self.service.restart()
            raise Silence

    def _finalize(self, _options: object) -> GLib.Variant:
        if self.refusal:
            raise self.refusal
        return GLib.Variant("(s)", ("unix:path=/tmp/treenail-no-such-transaction",))


REGISTERED = "RegisterClient {'id': 'treenail'}"


@pytest.fixture
def daemon(private_bus: PrivateBus) -> Iterator[Daemon]:
    daemon = Daemon(private_bus.address, STAGED)
    with daemon.service:
        yield daemon


@pytest.fixture
def bus(private_bus: PrivateBus, daemon: Daemon) -> Iterator[SystemBus]:
    bus = SystemBus(private_bus.address)
    yield bus
    bus.close_connection()


@pytest.fixture
def rpmostree(bus: SystemBus, tmp_path: Path) -> RpmOstreeBackend:
    return RpmOstreeBackend(Machine(Root(tmp_path), clock=FakeClock(), bus=bus))


def test_register_while_daemon_exits_is_retried(
    daemon: Daemon, rpmostree: RpmOstreeBackend
) -> None:
    daemon.exits = 2
    assert [each.id for each in rpmostree.read_deployments().in_boot_order] == ["os-abc.0"]
    assert daemon.asked == [REGISTERED] * 3 + ["Reload"]


def test_register_with_daemon_that_always_exits_fails(
    daemon: Daemon, rpmostree: RpmOstreeBackend
) -> None:
    daemon.exits = 100
    with pytest.raises(BusError) as caught:
        rpmostree.read_deployments()
    assert caught.value.name == "org.freedesktop.DBus.Error.NoReply"
    assert daemon.asked == [REGISTERED] * 4


def test_restarted_daemon_is_registered_with_again(
    daemon: Daemon, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.read_deployments()
    daemon.service.run(daemon.service.restart)
    rpmostree.read_deployments()
    assert daemon.asked == [REGISTERED, "Reload"] * 2


def test_release_unregisters_once(daemon: Daemon, rpmostree: RpmOstreeBackend) -> None:
    rpmostree.read_deployments()
    rpmostree.release_daemon()
    rpmostree.release_daemon()
    assert daemon.asked == [REGISTERED, "Reload", "UnregisterClient"]


def test_release_without_a_bus_is_no_error(
    private_bus: PrivateBus, daemon: Daemon, rpmostree: RpmOstreeBackend
) -> None:
    rpmostree.read_deployments()
    private_bus.stop()
    rpmostree.release_daemon()
    assert daemon.asked == [REGISTERED, "Reload"]


def test_unreachable_transaction_does_not_keep_daemon_busy(
    private_bus: PrivateBus, bus: SystemBus, rpmostree: RpmOstreeBackend
) -> None:
    """It is not started, so it lasts as long as its caller is on the bus."""
    watcher = SystemBus(private_bus.address)
    without = watcher.call_method(BUS, "ListNames", timeout_s=10)
    bus.call_method(BUS, "GetId", timeout_s=10)
    assert watcher.call_method(BUS, "ListNames", timeout_s=10) != without
    with pytest.raises(BusError, match=r"cannot connect to .*Transaction: .*No such file"):
        rpmostree.finalize_staged("os-abc.0")
    assert watcher.call_method(BUS, "ListNames", timeout_s=10) == without
    watcher.close_connection()


def test_sysroot_lock_of_another_program_is_named(
    daemon: Daemon, rpmostree: RpmOstreeBackend
) -> None:
    daemon.refusal = Refusal(BUSY, "System transaction in progress")
    with pytest.raises(BusyError, match="another program, such as bootc or ostree, holds") as e:
        rpmostree.finalize_staged("os-abc.0")
    assert e.value.name == BUSY
