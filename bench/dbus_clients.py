"""Compare D-Bus clients for Python: memory, file descriptors, time of a call, lost signals.

``python -m bench.dbus_clients`` runs each client in a process of its own, on a private bus. Each
requests and releases a name, which is a method call and a signal each, and counts the signals that
arrive during its calls and after them. A client that is not installed is skipped.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CYCLES = 500
PRELUDE = """
import gc, json, os, statistics, sys, time
from pathlib import Path
address, cycles = sys.argv[1], int(sys.argv[2])
NAME, PATH = "org.freedesktop.DBus", "/org/freedesktop/DBus"
received = []

def read_memory(kind):
    gc.collect()
    status = Path("/proc/self/smaps_rollup").read_text()
    return int(status.split(kind + ":")[1].split()[0])

before = {kind: read_memory(kind) for kind in ("Rss", "Pss")}
"""
EPILOGUE = """
    durations = []
    for _ in range(cycles):
        started = time.perf_counter()
        request("org.example.Name")
        release("org.example.Name")
        durations.append((time.perf_counter() - started) / 2)
    end = time.monotonic() + 5
    while len(received) < 2 * cycles and time.monotonic() < end:
        dispatch()
    print(json.dumps({
        **{kind: read_memory(kind) - value for kind, value in before.items()},
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "threads": len(os.listdir("/proc/self/task")),
        "call_us": round(statistics.median(durations) * 1e6),
        "lost": 2 * cycles - len(received),
    }))
"""
GLIB = """
def dispatch():
    GLib.MainContext.default().iteration(False)

def count(*values):
    if "org.example.Name" in str(values):
        received.append(1)
"""
CLIENTS = {
    "Gio": f"""
from gi.repository import Gio, GLib
{GLIB}
if True:
    flags = Gio.DBusConnectionFlags
    bus = Gio.DBusConnection.new_for_address_sync(
        address, flags.AUTHENTICATION_CLIENT | flags.MESSAGE_BUS_CONNECTION, None, None
    )
    bus.signal_subscribe(NAME, NAME, "NameOwnerChanged", PATH, None, 0, count)

    def call(member, arguments):
        return bus.call_sync(NAME, PATH, NAME, member, arguments, None, 0, 5000, None)

    def request(name):
        call("RequestName", GLib.Variant("(su)", (name, 0)))

    def release(name):
        call("ReleaseName", GLib.Variant("(s)", (name,)))
""",
    "pydbus": f"""
from gi.repository import GLib
import pydbus
{GLIB}
if True:
    bus = pydbus.connect(address)
    proxy = bus.get(NAME, PATH)[NAME]
    bus.subscribe(sender=NAME, iface=NAME, signal="NameOwnerChanged", signal_fired=count)

    def request(name):
        proxy.RequestName(name, 0)

    def release(name):
        proxy.ReleaseName(name)
""",
    "dasbus": f"""
from gi.repository import GLib
from dasbus.connection import AddressedMessageBus
{GLIB}
if True:
    bus = AddressedMessageBus(address)
    proxy = bus.get_proxy(NAME, PATH)
    proxy.NameOwnerChanged.connect(count)

    def request(name):
        proxy.RequestName(name, 0)

    def release(name):
        proxy.ReleaseName(name)
""",
    "jeepney": """
from jeepney import DBusAddress, MatchRule, new_method_call
from jeepney.io.blocking import open_dbus_connection
if True:
    bus = open_dbus_connection(bus=address)
    target = DBusAddress(PATH, bus_name=NAME, interface=NAME)
    rule = MatchRule(type="signal", interface=NAME, member="NameOwnerChanged", path=PATH)
    bus.send_and_get_reply(new_method_call(target, "AddMatch", "s", (rule.serialise(),)))

    class Received:
        def append(self, message):
            if message.body[0] == "org.example.Name":
                received.append(1)

    watch = bus.filter(rule, queue=Received()).__enter__()

    def dispatch():
        try:
            bus.recv_messages(timeout=1)
        except TimeoutError:
            pass

    def request(name):
        bus.send_and_get_reply(new_method_call(target, "RequestName", "su", (name, 0)), timeout=5)

    def release(name):
        bus.send_and_get_reply(new_method_call(target, "ReleaseName", "s", (name,)), timeout=5)
""",
}


@contextmanager
def run_bus() -> Iterator[str]:
    """Yield the address of a private bus."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bus.conf"
        config.write_text(
            f"<busconfig><type>session</type><listen>unix:path={folder}/bus</listen>"
            "<policy context='default'><allow send_destination='*'/><allow own='*'/>"
            "<allow eavesdrop='true'/></policy>"
            "</busconfig>"
        )
        bus = subprocess.Popen(
            ["dbus-daemon", f"--config-file={config}", "--nofork", "--print-address"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert bus.stdout is not None
            yield bus.stdout.readline().strip()
        finally:
            bus.kill()
            bus.communicate()


def measure_client(name: str, address: str) -> dict[str, int]:
    """Return what the client measured of itself; empty when it is not installed."""
    program = f"{PRELUDE}{CLIENTS[name]}{EPILOGUE}"
    done = subprocess.run(
        [sys.executable, "-c", program, address, str(CYCLES)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if re.search(r"^(ModuleNotFound|Import)Error", done.stderr, re.MULTILINE):
        return {}
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print one line for each client: medians, memory in KiB above that of the interpreter."""
    columns = ("Rss", "Pss", "descriptors", "threads", "call_us", "lost")
    print(f"{'client':8}", *(f"{column:>11}" for column in columns))
    for name in CLIENTS:
        with run_bus() as address:
            found = measure_client(name, address)
        numbers = [found[column] for column in columns] if found else ["not installed"]
        print(f"{name:8}", *(f"{number:>11}" for number in numbers))


if __name__ == "__main__":
    main()
