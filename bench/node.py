"""Benchmark of one node of the lab and its agent, idle and during an update.

The agent is the real program with HTTPS to an API server and its own bus. Memory and CPU are those
that the kernel counts for its process.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from gi.repository import Gio, GLib

from bench.result import Result
from tests.drains import Drains
from treenail.api import annotations as key
from treenail.clock import SystemClock
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from treenail_lab.images import make_image

NODE = "node-a"
USER = f"system:node:{NODE}"
BEFORE = make_image("os", "1", 50_000_000)
AFTER = make_image("os", "2", 50_000_000)
RPM_OSTREE = "org.projectatomic.rpmostree1"
LIMIT_S = 60.0
WRITES = ("create", "update", "patch", "delete")


def measure(seconds: float) -> Iterator[Result]:
    # The path of a Unix socket has at most 107 characters (unix(7)).
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
        plan = LabPlan((NODE,), (BEFORE, AFTER))
        with Lab(Path(folder), plan) as lab:
            for config in ("rendered-worker-a", "rendered-worker-b"):
                lab.add_config(build_rendered_config(config))
            drains = Drains(lab.client, SystemClock())
            drains.start()
            try:
                lab.request_update(NODE, "rendered-worker-a", BEFORE.pull_spec)
                wait_until(lambda: is_updated(lab, "rendered-worker-a"))
                yield from measure_idle(lab, seconds)
                yield from measure_update(lab)
            finally:
                drains.stop()


def measure_idle(lab: Lab, seconds: float) -> Iterator[Result]:
    pid = lab.machines[NODE].agent.pid
    time.sleep(2.0)  # let the work after the last report end
    cpu_s, requests = read_cpu(pid), lab.server.count_requests(user=USER)
    time.sleep(seconds)
    yield Result("agent idle: RSS", "MiB", read_memory(pid, "Rss"), 40.0)
    yield Result("agent idle: PSS", "MiB", read_memory(pid, "Pss"))
    yield Result("agent idle: CPU", "%", (read_cpu(pid) - cpu_s) / seconds * 100, 0.1)
    made = lab.server.count_requests(user=USER) - requests
    yield Result("agent idle: requests", "1/min", made / seconds * 60)


def measure_update(lab: Lab) -> Iterator[Result]:
    before = count_calls(lab)
    with closing(BusMonitor(lab.machines[NODE].address)) as monitor:
        requested_at = time.monotonic()
        lab.request_update(NODE, "rendered-worker-b", AFTER.pull_spec)
        wait_until(lambda: is_updated(lab, "rendered-worker-b"))
        yield Result(
            "annotation to first D-Bus call",
            "ms",
            (monitor.wait_for_call() - requested_at) * 1000,
            200.0,
        )
    made = {verb: count - before.get(verb, 0) for verb, count in count_calls(lab).items()}
    for verb, count in sorted(made.items()):
        yield Result(f"one update: {verb}", "calls", count)
    yield Result("one update: all writes", "calls", sum(made.get(verb, 0) for verb in WRITES), 12.0)


class BusMonitor:
    """Monitors the bus of a machine for the first call to rpm-ostreed."""

    def __init__(self, address: str) -> None:
        self._first: list[float] = []
        self._heard = threading.Event()
        flags = Gio.DBusConnectionFlags
        self._bus = Gio.DBusConnection.new_for_address_sync(
            address, flags.AUTHENTICATION_CLIENT | flags.MESSAGE_BUS_CONNECTION, None, None
        )
        self._bus.add_filter(self._hear)
        rules = GLib.Variant("(asu)", ([f"type='method_call',destination='{RPM_OSTREE}'"], 0))
        self._bus.call_sync(
            "org.freedesktop.DBus",
            "/org/freedesktop/DBus",
            "org.freedesktop.DBus.Monitoring",
            "BecomeMonitor",
            rules,
            None,
            Gio.DBusCallFlags.NONE,
            5000,
            None,
        )

    def wait_for_call(self) -> float:
        """Wait for the first call and return its monotonic time."""
        assert self._heard.wait(LIMIT_S), "no call to rpm-ostreed"
        return self._first[0]

    def close(self) -> None:
        with suppress(GLib.Error):  # a reboot closes the bus
            self._bus.close_sync(None)

    def _hear(
        self,
        _bus: Gio.DBusConnection,
        message: Gio.DBusMessage,
        incoming: bool,  # noqa: FBT001 - the signature of Gio
    ) -> Gio.DBusMessage | None:
        if incoming and message.get_destination() == RPM_OSTREE:
            self._first.append(time.monotonic())
            self._heard.set()
            return None
        return message


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the node did not reach the state in time"
        time.sleep(0.05)


def is_updated(lab: Lab, config: str) -> bool:
    notes = lab.read_annotations(NODE)
    return (notes.get(key.CURRENT_CONFIG), notes.get(key.STATE)) == (config, "Done")


def count_calls(lab: Lab) -> dict[str, int]:
    """Count the node's requests by verb."""
    counts: dict[str, int] = {}
    for (user, verb, _), count in lab.server.call_api(
        lambda api: api.requests.count_by_user()
    ).items():
        if user == USER:
            counts[verb] = counts.get(verb, 0) + count
    return counts


def read_memory(pid: int, field: str) -> float:
    """Read a field of smaps_rollup, in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {field}")


def read_cpu(pid: int) -> float:
    """Read the CPU time of the process in seconds, in steps of a tick, with ended threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
