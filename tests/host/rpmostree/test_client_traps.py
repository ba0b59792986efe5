"""What goes wrong between a client and rpm-ostreed's bus name, made to happen on purpose."""

from collections.abc import Iterator

import pytest
from gi.repository import GLib

from tests.fakes.bus_service import BusService, Exports, Refusal, Silence
from tests.fakes.clock import FakeClock
from tests.fakes.private_bus import PrivateBus
from treenail.errors import BusError, BusyError
from treenail.host.rpmostree.backend import RpmOstree
from treenail.host.systemd.bus import NO_REPLY, SystemBus, Target

NAME = "org.projectatomic.rpmostree1"
BASE = "/org/projectatomic/rpmostree1"
BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
SYSROOT_XML = f"""<node><interface name="{NAME}.Sysroot">
  <method name="RegisterClient"><arg type="a{{sv}}" direction="in"/></method>
  <method name="UnregisterClient"><arg type="a{{sv}}" direction="in"/></method>
  <method name="Reload"/>
  <method name="GetOS"><arg type="s" direction="in"/><arg type="o" direction="out"/></method>
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
            "GetOS": lambda _name: GLib.Variant("(o)", (f"{BASE}/os",)),
        })  # fmt: skip
        sysroot.properties = {"Deployments": GLib.Variant("aa{sv}", [staged])}
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
    bus.close()


@pytest.fixture
def rpmostree(bus: SystemBus) -> RpmOstree:
    return RpmOstree(bus, FakeClock())


def test_daemon_that_exits_for_idleness_just_then_is_asked_again(
    daemon: Daemon, rpmostree: RpmOstree
) -> None:
    daemon.exits = 2
    assert [each.id for each in rpmostree.look().all] == ["os-abc.0"]
    assert daemon.asked == [REGISTERED] * 3 + ["Reload"]


def test_daemon_that_always_exits_is_an_error_in_the_end(
    daemon: Daemon, rpmostree: RpmOstree
) -> None:
    daemon.exits = 100
    with pytest.raises(BusError) as caught:
        rpmostree.look()
    assert caught.value.name == NO_REPLY


def test_new_owner_of_the_name_is_registered_with_anew(
    daemon: Daemon, rpmostree: RpmOstree
) -> None:
    rpmostree.look()
    daemon.service.run(daemon.service.restart)
    rpmostree.look()
    assert daemon.asked == [REGISTERED, "Reload"] * 2


def test_release_is_told_once(daemon: Daemon, rpmostree: RpmOstree) -> None:
    rpmostree.look()
    rpmostree.release()
    rpmostree.release()
    assert daemon.asked == [REGISTERED, "Reload", "UnregisterClient"]


def test_release_without_a_bus_is_no_error(
    private_bus: PrivateBus, daemon: Daemon, rpmostree: RpmOstree
) -> None:
    rpmostree.look()
    private_bus.stop()
    rpmostree.release()
    assert daemon.asked == [REGISTERED, "Reload"]


def test_transaction_out_of_reach_does_not_keep_the_daemon_busy(
    private_bus: PrivateBus, bus: SystemBus, rpmostree: RpmOstree
) -> None:
    """It is not started, so it lasts as long as its caller is on the bus."""
    watcher = SystemBus(private_bus.address)
    without = watcher.call(BUS, "ListNames", timeout_s=10)
    bus.call(BUS, "GetId", timeout_s=10)
    assert watcher.call(BUS, "ListNames", timeout_s=10) != without
    with pytest.raises(BusError, match=r"connecting to .*Transaction failed: .*No such file"):
        rpmostree.finalize("os-abc.0")
    assert watcher.call(BUS, "ListNames", timeout_s=10) == without
    watcher.close()


def test_lock_held_outside_rpm_ostree_is_said_to_be(daemon: Daemon, rpmostree: RpmOstree) -> None:
    daemon.refusal = Refusal(BUSY, "System transaction in progress")
    with pytest.raises(BusyError, match="another program, such as bootc or ostree, holds") as e:
        rpmostree.finalize("os-abc.0")
    assert e.value.name == BUSY
