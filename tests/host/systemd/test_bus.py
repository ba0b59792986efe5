"""Calls, time limits, descriptors, signals, peers and errors with a real dbus-daemon."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gi.repository import GLib

from tests.fakes.bus_service import BusService, Exports, PeerService, Refusal, Silence
from tests.fakes.private_bus import PrivateBus
from treenail.errors import BusError, BusTimeoutError, BusyError
from treenail.host.systemd.bus_process import BusProcess
from treenail.host.systemd.gio_bus import GioBus, make_argument
from treenail.host.systemd.system_bus import (
    BusInterface,
    BusPeer,
    BusSignal,
    SystemBus,
    make_options,
)
from treenail.host.systemd.system_bus import BusService as Connector

NAME = "org.example.Echo"
ECHO = BusInterface(NAME, "/echo", "org.example.Echo")
XML = """<node><interface name="org.example.Echo">
  <method name="Say"><arg type="s" direction="in"/><arg type="s" direction="out"/></method>
  <method name="Pair"><arg type="s" direction="out"/><arg type="u" direction="out"/></method>
  <method name="Note"><arg type="a{sv}" direction="in"/></method>
  <method name="Hang"/>
  <method name="Fail"><arg type="s" direction="in"/></method>
  <method name="Start"><arg type="b" direction="out"/></method>
  <property name="Booted" type="o" access="read"/>
  <property name="Busy" type="(ss)" access="read"/>
  <signal name="Heard"><arg type="s"/></signal>
</interface></node>"""
BUSY = "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code26"


class Echo(Exports):
    """A service that answers, hangs or fails, by method."""

    def __init__(self) -> None:
        super().__init__(XML, {
            "Say": lambda text: GLib.Variant("(s)", (text,)),
            "Pair": lambda: GLib.Variant("(su)", ("one", 1)),
            "Note": self._note,
            "Hang": self._hang,
            "Fail": self._fail,
            "Start": lambda: GLib.Variant("(b)", (True,)),
        })  # fmt: skip
        self.noted: list[dict[str, object]] = []

    def _note(self, values: dict[str, object]) -> None:
        self.noted.append(values)

    def _hang(self) -> None:
        raise Silence

    def _fail(self, name: str) -> None:
        raise Refusal(name, "no: https://me:secret@registry.example/v2?token=abc")


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def service(private_bus: PrivateBus, echo: Echo) -> Iterator[BusService]:
    with BusService(private_bus.address, NAME, {"/echo": echo}) as service:
        yield service


@pytest.fixture(params=["this process", "a process of its own"])
def connector(request: pytest.FixtureRequest, private_bus: PrivateBus) -> Iterator[Connector]:
    """Gio in this process, or the process that the agent starts."""
    if request.param == "this process":
        connector: Connector = GioBus(private_bus.address)
    else:
        connector = BusProcess(os.environ, private_bus.address)
    yield connector
    connector.close_connection()


@pytest.fixture
def bus(connector: Connector, service: BusService) -> SystemBus:
    return SystemBus(service=connector)


@pytest.fixture
def peers(echo: Echo) -> Iterator[PeerService]:
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        PeerService(f"unix:path={folder}/peer", echo) as peers,
    ):
        yield peers
    assert not GLib.MainContext.default().pending()


def test_call_returns_none_value_or_tuple(bus: SystemBus) -> None:
    found = (
        bus.call_method(ECHO, "Note", {}, timeout_s=5),
        bus.call_method(ECHO, "Say", "ahoy", timeout_s=5),
        bus.call_method(ECHO, "Pair", timeout_s=5),
    )
    assert found == (None, "ahoy", ("one", 1))


def test_options_keep_the_type_of_each_value(bus: SystemBus, echo: Echo) -> None:
    given = make_options({"lock": True, "title": "treenail", "args": ("a", "b"), "none": ()})
    bus.call_method(ECHO, "Note", given, timeout_s=5)
    assert echo.noted == [{"lock": True, "title": "treenail", "args": ["a", "b"], "none": []}]


def test_call_without_reply_ends_at_its_time_limit(bus: SystemBus) -> None:
    with pytest.raises(
        BusTimeoutError, match=r"cannot call org.example.Echo Hang: no answer within 0.2 s"
    ) as e:
        bus.call_method(ECHO, "Hang", timeout_s=0.2)
    assert e.value.name == ""
    # The limit may be minutes: the Node shows the first failure.
    assert e.value.report_after_failures == 1


def test_call_without_a_time_limit_is_refused(bus: SystemBus) -> None:
    with pytest.raises(TypeError, match="timeout_s"):
        bus.call_method(ECHO, "Say", "ahoy")  # type: ignore[call-arg]


def test_properties_are_read_within_a_time_limit(
    bus: SystemBus, echo: Echo, service: BusService
) -> None:
    echo.properties = {"Booted": GLib.Variant("o", "/"), "Busy": GLib.Variant("(ss)", ("a", "b"))}
    found = bus.read_properties(ECHO, timeout_s=5)
    stuck, free = threading.Event(), threading.Event()

    def stall() -> None:
        stuck.set()
        free.wait(10)

    blocker = threading.Thread(target=lambda: service.run(stall))
    blocker.start()
    assert stuck.wait(10)
    with pytest.raises(BusTimeoutError, match=r"no answer within 0.2 s"):
        bus.read_properties(ECHO, timeout_s=0.2)
    free.set()
    blocker.join(10)
    assert found == {"Booted": "/", "Busy": ("a", "b")}


def test_busy_reply_is_a_busy_error_with_its_name(bus: SystemBus) -> None:
    with pytest.raises(BusyError, match=r"cannot call org.example.Echo Fail: no: ") as caught:
        bus.call_method(ECHO, "Fail", BUSY, timeout_s=5)
    assert caught.value.name == BUSY


def test_error_reply_keeps_its_name_without_credentials(bus: SystemBus) -> None:
    with pytest.raises(BusError) as caught:
        bus.call_method(ECHO, "Fail", "org.example.No", timeout_s=5)
    assert (caught.value.name, str(caught.value)) == (
        "org.example.No",
        "cannot call org.example.Echo Fail: no: https://registry.example/v2?…",
    )


@pytest.mark.parametrize(
    ("target", "member", "name"),
    [
        (BusInterface(NAME, "/echo", NAME), "Nope", "org.freedesktop.DBus.Error.UnknownMethod"),
        (BusInterface(NAME, "/echo", "a.b"), "Say", "org.freedesktop.DBus.Error.UnknownMethod"),
        (BusInterface(NAME, "/else", NAME), "Say", "org.freedesktop.DBus.Error.UnknownMethod"),
        (BusInterface("a.b", "/echo", NAME), "Say", "org.freedesktop.DBus.Error.ServiceUnknown"),
    ],
)
def test_missing_object_is_named_and_has_a_remedy(
    bus: SystemBus, target: BusInterface, member: str, name: str
) -> None:
    with pytest.raises(BusError) as caught:
        bus.call_method(target, member, timeout_s=5)
    assert (caught.value.name, caught.value.remedy != "") == (name, True)


def test_service_that_exits_during_a_call_is_no_reply(bus: SystemBus, service: BusService) -> None:
    def leave() -> None:
        service.vanish()
        raise Silence

    bus.call_method(ECHO, "Say", "up", timeout_s=5)
    service._objects["/echo"].methods = {"Hang": leave}
    with pytest.raises(BusError) as caught:
        bus.call_method(ECHO, "Hang", timeout_s=5)
    assert caught.value.name == "org.freedesktop.DBus.Error.NoReply"


def test_lost_bus_fails_one_call_and_the_next_reconnects(
    private_bus: PrivateBus, bus: SystemBus, service: BusService
) -> None:
    bus.call_method(ECHO, "Say", "before", timeout_s=5)
    private_bus.stop()
    with pytest.raises(BusError):
        bus.call_method(ECHO, "Say", "lost", timeout_s=5)
    private_bus.start()
    service.run(service.appear)
    assert bus.call_method(ECHO, "Say", "after", timeout_s=5) == "after"


def test_unreachable_bus_is_a_bus_error_that_names_it() -> None:
    with pytest.raises(BusError, match=r"cannot connect to the system bus: .*No such file"):
        SystemBus("unix:path=/tmp/treenail-no-such-bus").call_method(ECHO, "Say", "x", timeout_s=5)


def test_lost_bus_does_not_end_the_process(private_bus: PrivateBus) -> None:
    """By default GLib sends this process SIGTERM when the bus closes while a loop runs."""
    program = """
import sys
from gi.repository import GLib
from treenail.host.systemd.system_bus import BusInterface, SystemBus
bus = SystemBus()
name = "org.freedesktop.DBus"
bus.call_method(BusInterface(name, "/org/freedesktop/DBus", name), "GetId", timeout_s=5)
print("connected", flush=True)
sys.stdin.readline()
loop = GLib.MainLoop()
GLib.timeout_add(300, loop.quit)
loop.run()
print("alive", flush=True)
"""
    environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": private_bus.address}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        first = process.stdout.readline()
        private_bus.stop()
        rest, _ = process.communicate("go\n", timeout=20)
    assert (first, rest, process.returncode) == ("connected\n", "alive\n", 0)


def test_signals_arrive_in_the_calling_thread_without_main_loop(
    bus: SystemBus, service: BusService
) -> None:
    arrived: list[BusSignal] = []
    threads: set[int] = set()

    def each(signal: BusSignal | None) -> bool:
        if signal:
            arrived.append(signal)
            threads.add(threading.get_ident())
        return len(arrived) == 2

    with bus.receive_signals(ECHO) as signals:
        bus.call_method(ECHO, "Say", "the match rule is in place", timeout_s=5)
        for word in ("one", "two"):
            service.emit("/echo", NAME, "Heard", GLib.Variant("(s)", (word,)))
        ended = signals.run_until(each)
    assert ended
    assert arrived == [BusSignal("Heard", ("one",)), BusSignal("Heard", ("two",))]
    assert threads == {threading.get_ident()}


def test_signals_arrive_in_a_thread_with_its_own_context(
    private_bus: PrivateBus, service: BusService
) -> None:
    arrived: list[BusSignal | None] = []
    listening = threading.Event()

    def listen() -> None:
        bus = SystemBus(private_bus.address)
        with bus.receive_signals(ECHO) as signals:
            bus.call_method(ECHO, "Say", "the match rule is in place", timeout_s=5)
            listening.set()
            signals.run_until(lambda signal: signal is not None and not arrived.append(signal))
        bus.close_connection()

    thread = threading.Thread(target=listen)
    thread.start()
    assert listening.wait(10)
    service.emit("/echo", NAME, "Heard", GLib.Variant("(s)", ("there",)))
    thread.join(10)
    assert arrived == [BusSignal("Heard", ("there",))]


def test_run_until_ticks_without_signals(bus: SystemBus) -> None:
    ticks: list[BusSignal | None] = []
    with bus.receive_signals(ECHO) as signals:
        signals.run_until(lambda signal: not ticks.append(signal))
    assert ticks == [None]


def test_run_until_ends_when_the_bus_stops(bus: SystemBus, private_bus: PrivateBus) -> None:
    with bus.receive_signals(ECHO) as signals:
        private_bus.stop()
        assert not signals.run_until(lambda _: False)


def test_peer_is_called_without_hello(connector: Connector, peers: PeerService) -> None:
    with BusPeer(peers.address, NAME, timeout_s=5, service=connector) as peer:
        assert (peer.call_method("Start", timeout_s=5), peer.call_method("Pair", timeout_s=5)) == (
            True,
            "one",
        )


def test_peer_receives_signals_emitted_before_it_ran(
    connector: Connector, peers: PeerService
) -> None:
    arrived: list[BusSignal] = []

    def each(signal: BusSignal | None) -> bool:
        if signal:
            arrived.append(signal)
        return len(arrived) == 2

    with BusPeer(peers.address, NAME, timeout_s=5, service=connector) as peer:
        peer.call_method("Start", timeout_s=5)
        peers.emit(NAME, "Heard", GLib.Variant("(s)", ("early",)))
        peer.call_method("Start", timeout_s=5)
        peers.emit(NAME, "Heard", GLib.Variant("(s)", ("late",)))
        assert peer.run_until(each)
    assert arrived == [BusSignal("Heard", ("early",)), BusSignal("Heard", ("late",))]


def test_peer_dispatches_last_signals_before_it_reports_the_end(
    connector: Connector, peers: PeerService
) -> None:
    arrived: list[BusSignal] = []

    def each(signal: BusSignal | None) -> bool:
        if signal:
            arrived.append(signal)
        return False

    with BusPeer(peers.address, NAME, timeout_s=5, service=connector) as peer:
        peer.call_method("Start", timeout_s=5)
        peers.emit(NAME, "Heard", GLib.Variant("(s)", ("last words",)))
        peers.run(peers.vanish)
        assert not peer.run_until(each)
    assert arrived == [BusSignal("Heard", ("last words",))]


def test_peer_closes_after_an_exception(connector: Connector, peers: PeerService) -> None:
    def fail(_: BusSignal | None) -> bool:
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        BusPeer(peers.address, NAME, timeout_s=5, service=connector) as peer,
    ):
        peer.run_until(fail)
    assert peers.hung_up.wait(10)


def test_closed_peers_leave_no_descriptor_open(connector: Connector, peers: PeerService) -> None:
    """A context with undispatched sources would keep its connection and itself alive."""

    def wakeups() -> int:
        links = (Path(entry.path) for entry in os.scandir("/proc/self/fd"))
        return sum("anon_inode" in str(link.readlink()) for link in links if link.is_symlink())

    def meet() -> int:
        with BusPeer(peers.address, NAME, timeout_s=5, service=connector) as peer:
            peer.call_method("Start", timeout_s=5)
        return wakeups()

    # GLib may hold a few of its own for a moment; one for each peer would be a leak.
    found = [meet() for _ in range(20)]
    assert found[-1] - found[0] < 5


def test_peer_call_without_reply_ends_at_its_time_limit(
    connector: Connector, peers: PeerService
) -> None:
    with (
        BusPeer(peers.address, NAME, timeout_s=5, service=connector) as peer,
        pytest.raises(BusTimeoutError, match=r"cannot call org.example.Echo Hang: no answer"),
    ):
        peer.call_method("Hang", timeout_s=0.2)


def test_peer_without_handshake_ends_at_its_time_limit(
    connector: Connector, private_bus: PrivateBus
) -> None:
    import socket

    path = private_bus.address.removeprefix("unix:path=") + "-mute"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        with pytest.raises(BusTimeoutError, match=r"no connection within 0.2 s"):
            BusPeer(f"unix:path={path}", NAME, timeout_s=0.2, service=connector)


def test_missing_peer_is_a_bus_error(connector: Connector) -> None:
    with pytest.raises(BusError, match=r"cannot connect to org.example.Echo: .*No such file"):
        BusPeer("unix:path=/tmp/treenail-no-such-peer", NAME, timeout_s=5, service=connector)


def test_dollar_signs_in_arguments_of_units_are_no_variables_of_systemd() -> None:
    command = ("/bin/sh", "-c", 'echo "$1" ${HOME} $$', "$IMAGE")
    made = make_argument("unit", (command, {"Type": "oneshot"}))
    assert isinstance(made, list)
    ((name, start), (other, _)) = made
    assert (name, other) == ("ExecStart", "Type")
    assert isinstance(start, GLib.Variant)
    escaped = ["/bin/sh", "-c", 'echo "$$1" $${HOME} $$$$', "$$IMAGE"]
    assert start.unpack() == [("/bin/sh", escaped, False)]
