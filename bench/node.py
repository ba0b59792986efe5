"""Benchmark of one node of the lab and its agent, idle, during updates and at its start.

The agent is the real program with HTTPS to an API server and its own bus. Memory and CPU are those
that the kernel counts for its process. A minimal watch of one kind with the official client is
there for comparison. On a machine with stolen CPU time only CPU time, and the fastest of several
runs, say something about the program.
"""

import os
import subprocess
import sys
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
from treenail.clocks import SystemClock
from treenail.kube.resources import NODES
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from treenail_lab.images import make_image

NODE = "node-a"
USER = f"system:node:{NODE}"
BEFORE = make_image("os", "1", 50_000_000)
AFTER = make_image("os", "2", 50_000_000)
RPM_OSTREE = "org.projectatomic.rpmostree1"
LIMIT_S = 60.0
WRITES = ("create", "update", "patch", "delete")
EMPTY_PATCHES = 1
"""Patches without a change: agents may not get a MachineConfigNode, and read it so after a boot."""
UPDATES = 10
STARTS = 3
FILES = 20
# A path that needs no reboot by the default node disruption policy.
LIVE_PATH = "/etc/nmstate/openshift/file"
WATCH = """
import sys
from kubernetes import client, config, watch
config.load_kube_config(sys.argv[1])
listing = client.CustomObjectsApi().list_cluster_custom_object
kind = ("machineconfiguration.openshift.io", "v1", "machineconfigs")
for event in watch.Watch().stream(listing, *kind):
    print(event["type"], flush=True)
"""


def measure(seconds: float) -> Iterator[Result]:
    # The path of a Unix socket has at most 107 characters (unix(7)).
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
        write = 'image_files = "write"\n'  # no new image for each config
        plan = LabPlan((NODE,), (BEFORE, AFTER), agent_settings=write)
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
                yield from measure_live_updates(lab)
                yield from measure_rest(lab, seconds)
                yield measure_official_watch(lab)
                yield from measure_start(lab)
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


def measure_live_updates(lab: Lab) -> Iterator[Result]:
    """Apply configs of 20 files that need no reboot."""
    pid = lab.machines[NODE].agent.pid
    durations_s: list[float] = []
    cpu_s = read_cpu(pid)
    for number in range(UPDATES):
        name = f"rendered-worker-live-{number}"
        files = [
            {"path": f"{LIVE_PATH}-{each}", "contents": {"source": f"data:,{number}"}}
            for each in range(FILES)
        ]
        ignition = {"ignition": {"version": "3.5.0"}, "storage": {"files": files}}
        lab.add_config(build_rendered_config(name, {"config": ignition}))
        requested_at = time.monotonic()
        lab.request_update(NODE, name, AFTER.pull_spec)
        wait_until(lambda name=name: is_updated(lab, name), poll_s=0.005)
        durations_s.append(time.monotonic() - requested_at)
    yield Result("update without reboot: annotation to Done, fastest", "s", min(durations_s), 0.5)
    yield Result("update without reboot: CPU", "ms", (read_cpu(pid) - cpu_s) / UPDATES * 1000)


def measure_rest(lab: Lab, seconds: float) -> Iterator[Result]:
    """Measure the agent after the updates, once it is at rest."""
    pid = lab.machines[NODE].agent.pid
    wait_until(lambda: not has_children(pid))
    time.sleep(1.0)  # it returns memory after the end of its child
    cpu_s, requests = read_cpu(pid), lab.server.count_requests(user=USER)
    time.sleep(seconds)
    at_rest = f"at rest after {UPDATES} updates"
    yield Result(f"{at_rest}: RSS", "MiB", read_memory(pid, "Rss"), 32.0)
    yield Result(f"{at_rest}: PSS", "MiB", read_memory(pid, "Pss"))
    yield Result(f"{at_rest}: private memory", "MiB", read_memory(pid, "Anonymous"))
    yield Result(f"{at_rest}: CPU", "%", (read_cpu(pid) - cpu_s) / seconds * 100, 0.1)
    made = lab.server.count_requests(user=USER) - requests
    yield Result(f"{at_rest}: requests", "1/min", made / seconds * 60, 0.0)


def measure_official_watch(lab: Lab) -> Result:
    """Measure a program that only watches MachineConfigs, with the official client."""
    command = [sys.executable, "-c", WATCH, str(lab.server.admin_kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        rss_mib = read_memory(process.pid, "Rss")
        process.kill()
    return Result("for comparison: watch with the official client: RSS", "MiB", rss_mib)


def measure_start(lab: Lab) -> Iterator[Result]:
    """Start the agent again; it is ready once systemd gets READY=1."""
    agent = lab.machines[NODE].agent
    costs: list[tuple[float, float]] = []
    for _ in range(STARTS):
        agent.stop()
        begun = time.monotonic()
        agent.start()
        assert agent.wait_until(lambda unit: unit.is_ready, LIMIT_S), "the agent is not ready"
        costs.append((time.monotonic() - begun, read_cpu(agent.pid)))
    yield Result("start to READY, fastest", "ms", min(cost[0] for cost in costs) * 1000, 400.0)
    yield Result("start to READY: CPU, least", "ms", min(cost[1] for cost in costs) * 1000)


def measure_update(lab: Lab) -> Iterator[Result]:
    before = count_calls(lab)
    with closing(BusMonitor(lab.machines[NODE].address)) as monitor:
        requested_at = time.monotonic()
        lab.request_update(NODE, "rendered-worker-b", AFTER.pull_spec)
        outage = Outage(lab)
        wait_until(lambda: outage.observe("rendered-worker-b"), poll_s=0.005)
        yield Result(
            "annotation to first D-Bus call",
            "ms",
            (monitor.wait_for_call() - requested_at) * 1000,
            200.0,
        )
    yield Result("update with reboot: unschedulable", "s", outage.lasted_s)
    yield Result("  of that the machine was off", "s", outage.reboot_s)
    yield Result("  more than the reboot", "s", outage.lasted_s - outage.reboot_s, 3.0)
    made = {verb: count - before.get(verb, 0) for verb, count in count_calls(lab).items()}
    for verb, count in sorted(made.items()):
        yield Result(f"one update: {verb}", "calls", count)
    writes = sum(made.get(verb, 0) for verb in WRITES) - EMPTY_PATCHES
    yield Result("one update: writes that change an object", "calls", writes, 12.0)


class Outage:
    """The time of a node out of service in an update, and that of its reboot."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._machine = lab.machines[NODE]
        self._seen: dict[str, float] = {}

    def observe(self, config: str) -> bool:
        """Look once; return whether the node has the config and is in service again."""
        spec = self._lab.client.get(NODES, NODE)["spec"]
        is_out = isinstance(spec, dict) and spec.get("unschedulable") is True
        now, is_on = time.monotonic(), self._machine.is_on
        for name, happened in (
            ("out", is_out),
            ("off", not is_on),
            ("on", is_on and "off" in self._seen),
            ("in", not is_out and is_on and "on" in self._seen and is_updated(self._lab, config)),
        ):
            if happened:
                self._seen.setdefault(name, now)
        return "in" in self._seen

    @property
    def lasted_s(self) -> float:
        return self._seen["in"] - self._seen["out"]

    @property
    def reboot_s(self) -> float:
        return self._seen["on"] - self._seen["off"]


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


def wait_until(condition: Callable[[], bool], *, poll_s: float = 0.05) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the node did not reach the state in time"
        time.sleep(poll_s)


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


def has_children(pid: int) -> bool:
    """Return whether the process has children, such as the one that talks to D-Bus."""
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


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
