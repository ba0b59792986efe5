"""Benchmarks of the rollout controller: one sync, a pool change, a whole rollout, a window.

The syncs run in this process without a server. The rest runs against the lab's API server with
simulated agents. There the controller is a separate process with HTTPS and its own user, so that
its memory and its requests are counted separately.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.node import read_memory, wait_until
from bench.result import Result
from tests.controllers.rollout.agents import Agents, add_nodes
from tests.controllers.rollout.world import World, build_reconciler
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import add_config, add_policy, add_pool, install_kinds
from treenail.api import annotations as key
from treenail.controllers.pools.maintenance_windows import DAYS
from treenail.controllers.pools.pool_index import PoolIndex
from treenail.kube.api_client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.apiserver.serving.server import LabServer

SIZES = (500, 2000, 5000)
USER, DRAINER = "rollout", "drain"
WRITES = ("create", "update", "patch", "delete")
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
SPREAD = "{order: spread, rebootTimeout: 1h}"
CAREFUL = {
    "canary": {},
    "soak": "0s",
    "waves": ["50%"],
    "order": "spread",
    "rebootTimeout": "1h",
}


def measure(_seconds: float) -> Iterator[Result]:
    for size in SIZES:
        yield measure_sync(size)
    yield from measure_window()
    for size in SIZES:
        yield from measure_cluster(size)
    yield from measure_drains(min(SIZES))


def measure_sync(size: int) -> Result:
    """Measure one sync during a rollout: one node is updated and another one is chosen."""
    world = World()
    for number in range(size):
        zone = {"topology.kubernetes.io/zone": f"zone-{number % 3}"}
        world.add_node(f"n{number:05}", "new" if number % 2 else "old", labels=zone)
    world.set_pool("worker", "new", SPREAD, maxUnavailable="10%")
    world.deliver()
    caches = FrozenCaches(world)
    controller = build_reconciler(world, caches=caches)
    controller.sync_pool("worker")
    updating = iter([name for name, node in world.truth.items() if not node.is_done])
    durations_ms = []
    for _ in range(11):
        updated = {key.CURRENT_CONFIG: "new", key.STATE: "Done"}
        world.change("nodes", next(updating), {"metadata": {"annotations": updated}})
        world.deliver()
        caches.read(world)
        started_at = time.perf_counter()
        controller.sync_pool("worker")
        durations_ms.append((time.perf_counter() - started_at) * 1000)
        assert len([1 for plural, _, _ in world.writes if plural == "nodes"]) > size // 10
    aim = 250.0 if size == max(SIZES) else None
    return Result(f"rollout sync, {size} nodes", "ms", median(durations_ms), aim)


class FrozenCaches:
    """Caches at one moment: updating them is the work of the watches, not of a sync."""

    def __init__(self, world: World) -> None:
        self.read(world)

    def read(self, world: World) -> None:
        self._policies = world.list_policies()
        self._pools, self._nodes = world.list_pools(), world.list_nodes()
        self._index = PoolIndex(self._pools.get, self._nodes.get)
        for name, pool in self._pools.items():
            self._index.set_pool(name, pool)
        for name, node in self._nodes.items():
            self._index.set_node(name, node.labels)

    def read_pool(self, name: str) -> Any:
        return self._index.read_pool(name)

    def list_policies(self) -> Any:
        return self._policies

    def list_pools(self) -> Any:
        return self._pools

    def list_nodes(self) -> Any:
        return self._nodes


def measure_window() -> Iterator[Result]:
    """Update 500 nodes of 8 minutes each inside a window of two hours, in virtual time."""
    world = World(takes_s=480.0)
    days = ", ".join(DAYS)
    policy = f'{{windows: [{{days: [{days}], start: "01:00", duration: 2h, timeZone: UTC}}]}}'
    limit = 40
    for number in range(500):
        world.add_node(f"n{number:03}", "old")
    midnight = world.seconds - world.seconds % 86400
    world.seconds = midnight + 3600.0 - 60.0
    world.set_pool("worker", "new", policy, maxUnavailable=limit)
    world.deliver()
    controller = build_reconciler(world)
    most, closes = 0, midnight + 3 * 3600.0
    while world.seconds < closes + 3600.0:
        controller.sync_pool("worker")
        world.deliver()
        nodes = world.truth.values()
        most = max(most, sum(node.is_unavailable for node in nodes))
        if all(node.is_done and node.desired_config == "new" for node in nodes):
            break
        world.pass_time(30.0)
        world.deliver()
    duration_s = world.seconds - midnight - 3600.0
    yield Result("500 nodes of 8 min in a window of 120 min", "min", duration_s / 60, 120.0)
    yield Result("  maximum of unavailable nodes", "nodes", most, float(limit))


def measure_cluster(size: int) -> Iterator[Result]:
    with (
        cluster(size) as (server, client),
        Agents(client) as agents,
        controller(server, USER) as process,
    ):
        yield from measure_rollout(server, client, agents, process, size)


def measure_drains(size: int) -> Iterator[Result]:
    """Measure the writes per node of both controllers, with nodes that request drains."""
    with (
        cluster(size) as (server, client),
        Agents(client, drains=True),
        controller(server, USER),
        controller(server, DRAINER),
    ):
        wait_for_rollout(lambda: read_condition(client, "Updated") == "True")
        wait_for_rollout(lambda: server.count_requests(user=USER, verb="create") >= size)
        before = {user: count_writes(server, user) for user in (USER, DRAINER)}
        started_at = time.monotonic()
        client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"configuration": {"name": "new"}}})
        wait_for_rollout(lambda: read_configuration(client) == "new")
        duration_s = time.monotonic() - started_at
        made = {user: (count_writes(server, user) - count) / size for user, count in before.items()}
    yield Result(f"whole rollout with drains, {size} nodes", "s", duration_s)
    yield Result(f"writes per node without drains, {size} nodes", "calls", made[USER], 3.0)
    yield Result(f"writes per node for drains, {size} nodes", "calls", made[DRAINER])


@contextmanager
def cluster(size: int) -> Iterator[tuple[LabServer, Client]]:
    # The path of a Unix socket has at most 107 characters (unix(7)).
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        LabServer(Path(folder)) as server,
        open_client(server.admin_kubeconfig) as client,
    ):
        install_kinds(client)
        for config in ("old", "new"):
            add_config(client, config)
        add_nodes(client, [f"n{number:05}" for number in range(size)], "old")
        add_policy(client, "careful", CAREFUL)
        add_pool(client, "worker", "old", maxUnavailable="10%", rolloutPolicy="careful")
        yield server, client


@contextmanager
def controller(server: LabServer, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    kubeconfig = server.write_kubeconfig(name, ["system:masters"])
    command = [sys.executable, "-m", "bench.controller", str(kubeconfig), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def measure_rollout(
    server: LabServer,
    client: Client,
    agents: Agents,
    process: "subprocess.Popen[bytes]",
    size: int,
) -> Iterator[Result]:
    wait_for_rollout(lambda: read_condition(client, "Updated") == "True")
    wait_for_rollout(lambda: server.count_requests(user=USER, verb="create") >= size)
    yield Result(f"controller idle, {size} nodes: RSS", "MiB", read_memory(process.pid, "Rss"))
    before = count_calls(server)
    started_at = time.monotonic()
    client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"configuration": {"name": "new"}}})
    wait_until(lambda: bool(agents.touched), poll_s=0.001)
    first_s = time.monotonic() - started_at
    yield Result(f"pool change to first annotation, {size} nodes", "s", first_s, 0.05)
    wait_for_rollout(lambda: read_configuration(client) == "new")
    yield Result(f"whole rollout, {size} nodes", "s", time.monotonic() - started_at)
    yield Result(
        f"controller after the rollout, {size} nodes: RSS", "MiB", read_memory(process.pid, "Rss")
    )
    made = {verb: count - before[verb] for verb, count in count_calls(server).items()}
    for verb, count in made.items():
        if count:
            yield Result(f"calls per node, {size} nodes: {verb}", "calls", count / size)
    written = sum(made[verb] for verb in WRITES)
    yield Result(f"writes per node, {size} nodes", "calls", written / size, 3.0)


def wait_for_rollout(condition: Callable[[], bool], *, limit_s: float = 600.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the rollout did not finish in time"
        time.sleep(0.2)


def count_calls(server: LabServer) -> dict[str, int]:
    return {verb: server.count_requests(user=USER, verb=verb) for verb in VERBS}


def count_writes(server: LabServer, user: str) -> int:
    return sum(server.count_requests(user=user, verb=verb) for verb in WRITES)


def status(client: Client) -> Any:
    found: Any = client.get(MACHINECONFIGPOOLS, "worker")
    return found.get("status", {})


def read_configuration(client: Client) -> str:
    return str(status(client).get("configuration", {}).get("name", ""))


def read_condition(client: Client, kind: str) -> str:
    found = status(client).get("conditions", ())
    return next((each["status"] for each in found if each["type"] == kind), "")
