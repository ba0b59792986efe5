"""The process that talks to D-Bus: its start, its end, and what its loss means for the caller."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.private_bus import PrivateBus
from tests.waiting import wait_until
from treenail.errors import BusError
from treenail.host.systemd.bus_process import BusProcess
from treenail.host.systemd.system_bus import BusInterface, BusSignal, SystemBus

NAME = "org.freedesktop.DBus"
DRIVER = BusInterface(NAME, "/org/freedesktop/DBus", NAME)


@pytest.fixture
def process(private_bus: PrivateBus) -> Iterator[BusProcess]:
    process = BusProcess(os.environ, private_bus.address)
    yield process
    process.close_connection()


@pytest.fixture
def bus(process: BusProcess) -> SystemBus:
    return SystemBus(service=process)


def test_first_call_starts_the_process_and_closing_ends_it(
    process: BusProcess, bus: SystemBus
) -> None:
    states = [process.is_running]
    bus.call_method(DRIVER, "GetId", timeout_s=5)
    (child,) = list_children()
    states.append(process.is_running)
    bus.close_connection()
    states.append(process.is_running)
    assert (states, Path(f"/proc/{child}").exists()) == ([False, True, False], False)
    assert bus.call_method(DRIVER, "GetId", timeout_s=5)


def test_killed_process_is_a_call_without_reply_and_the_next_works(bus: SystemBus) -> None:
    bus.call_method(DRIVER, "GetId", timeout_s=5)
    os.kill(*list_children(), signal.SIGKILL)
    with pytest.raises(BusError, match="lost the process that talks to it: it ended") as caught:
        bus.call_method(DRIVER, "GetId", timeout_s=5)
    assert (caught.value.name, caught.value.remedy) == ("", "see: journalctl -u treenail")
    assert bus.call_method(DRIVER, "GetId", timeout_s=5)


def test_killed_process_ends_the_wait_for_signals_like_a_closed_bus(bus: SystemBus) -> None:
    ticks: list[BusSignal | None] = []

    def kill(signal_: BusSignal | None) -> bool:
        if not ticks:
            os.kill(*list_children(), signal.SIGKILL)
        ticks.append(signal_)
        return False

    with bus.receive_signals(DRIVER) as signals:
        assert not signals.run_until(kill)
        bus.call_method(DRIVER, "GetId", timeout_s=5)
        # The new process has not subscribed.
        assert not signals.run_until(lambda _: False)
    assert ticks


def test_process_ignores_the_signal_that_stops_its_agent(bus: SystemBus) -> None:
    """At a stop systemd sends SIGTERM to all processes of the unit, and the agent goes on."""
    bus.call_method(DRIVER, "GetId", timeout_s=5)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(*list_children(), number)
    assert bus.call_method(DRIVER, "GetId", timeout_s=5)


def test_process_ends_with_a_killed_agent(private_bus: PrivateBus) -> None:
    program = f"""
import os
from treenail.host.systemd.system_bus import BusInterface, SystemBus
from treenail.host.systemd.bus_process import BusProcess
process = BusProcess(os.environ, {private_bus.address!r})
bus = SystemBus(service=process)
target = BusInterface("{NAME}", "/org/freedesktop/DBus", "{NAME}")
print(bus.call_method(target, "GetId", timeout_s=5), process._pid, flush=True)
os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    child = done.stdout.split()[1]
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not is_alive(child))


@pytest.mark.process
def test_interpreter_that_is_missing_is_a_bus_error() -> None:
    bus = SystemBus(service=BusProcess(os.environ, interpreter="/no/such/python"))
    with pytest.raises(BusError, match="cannot start the process that talks to D-Bus: No such"):
        bus.call_method(DRIVER, "GetId", timeout_s=5)


def test_process_without_memory_ends_without_a_traceback(
    bus: SystemBus, capfd: pytest.CaptureFixture[str]
) -> None:
    bus.call_method(DRIVER, "GetId", timeout_s=5)
    (child,) = list_children()
    resource.prlimit(child, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
    with pytest.raises(BusError, match="lost the process that talks to it: it ended"):
        bus.call_method(DRIVER, "NameHasOwner", "a" * 1_000_000, timeout_s=5)
    wait_until(lambda: not is_alive(str(child)))
    assert capfd.readouterr().err == "the process that talks to D-Bus cannot allocate memory\n"
    assert bus.call_method(DRIVER, "GetId", timeout_s=5)


def list_children() -> list[int]:
    """List the D-Bus processes of this process."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    pids = [int(word) for word in text.split()]
    return [pid for pid in pids if b"bus_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
