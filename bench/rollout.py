"""The rollout controller: a decision, a pool change, a whole rollout, a night in virtual time.

Decisions are taken in this process, without a server. The rest runs against the lab's API server
with simulated agents; the controller is then a process of its own, with HTTPS and a user of its
own, so that its memory and its requests can be told from the others'.
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

from bench.node import memory, until
from bench.result import Result
from tests.controllers.rollout.agents import (
    Agents,
    add_config,
    add_nodes,
    add_pool,
    client_of,
    install_kinds,
)
from tests.controllers.rollout.world import World, build_reconciler
from treenail.api import annotations as key
from treenail.controllers.rollout.policy import ROLLOUT_POLICY
from treenail.kube.client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.apiserver.serving.server import LabServer

SIZES = (500, 2000, 5000)
USER, DRAINER = "rollout", "drain"
WRITES = ("create", "update", "patch", "delete")
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
SPREAD = "{order: spread, rebootTimeout: 1h}"
CAREFUL = "{canary: {}, soak: 0s, waves: [50%], order: spread, rebootTimeout: 1h}"


def measure(_seconds: float) -> Iterator[Result]:
    for size in SIZES:
        yield decision(size)
    yield from night()
    for size in SIZES:
        yield from on_a_cluster(size)
    yield from drained(min(SIZES))


def decision(size: int) -> Result:
    """One pass in the middle of a rollout: a node is through, and another one is chosen."""
    world = World()
    for number in range(size):
        zone = {"topology.kubernetes.io/zone": f"zone-{number % 3}"}
        world.add_node(f"n{number:05}", "new" if number % 2 else "old", labels=zone)
    world.set_pool("worker", "new", SPREAD, maxUnavailable="10%")
    world.deliver()
    caches = Frozen(world)
    controller = build_reconciler(world, caches=caches)
    controller.sync_pool("worker")
    under_way = iter([name for name, node in world.truth.items() if not node.is_done])
    took = []
    for _ in range(11):
        through = {key.CURRENT_CONFIG: "new", key.STATE: "Done"}
        world.change("nodes", next(under_way), {"metadata": {"annotations": through}})
        world.deliver()
        caches.look(world)
        began = time.perf_counter()
        controller.sync_pool("worker")
        took.append((time.perf_counter() - began) * 1000)
        assert len([1 for plural, _, _ in world.writes if plural == "nodes"]) > size // 10
    aim = 250.0 if size == max(SIZES) else None
    return Result(f"decision pass, {size} nodes", "ms", median(took), aim)


class Frozen:
    """The caches at a moment: keeping them current is the work of the watches."""

    def __init__(self, world: World) -> None:
        self.look(world)

    def look(self, world: World) -> None:
        self._pools, self._nodes = world.list_pools(), world.list_nodes()

    def list_pools(self) -> Any:
        return self._pools

    def list_nodes(self) -> Any:
        return self._nodes


def night() -> Iterator[Result]:
    """500 nodes of 8 minutes each inside a window of two hours."""
    world = World(takes_s=480.0)
    policy = '{windows: [{start: "01:00", duration: 2h, timeZone: UTC}]}'
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
    took_s = world.seconds - midnight - 3600.0
    yield Result("night: 500 nodes of 8 min, window of 120 min", "min", took_s / 60, 120.0)
    yield Result("night: most nodes out of service at a time", "nodes", most, float(limit))


def on_a_cluster(size: int) -> Iterator[Result]:
    with (
        cluster(size) as (server, client),
        Agents(client) as agents,
        controller(server, USER) as process,
    ):
        yield from rollout(server, client, agents, process, size)


def drained(size: int) -> Iterator[Result]:
    """The same with nodes that ask for their drain: what either controller writes for a node."""
    with (
        cluster(size) as (server, client),
        Agents(client, drains=True),
        controller(server, USER),
        controller(server, DRAINER),
    ):
        wait(lambda: said(client, "Updated") == "True")
        wait(lambda: server.count_requests(user=USER, verb="create") >= size)
        before = {user: writes(server, user) for user in (USER, DRAINER)}
        began = time.monotonic()
        client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"configuration": {"name": "new"}}})
        wait(lambda: done(client) == "new")
        took_s = time.monotonic() - began
        made = {user: (writes(server, user) - count) / size for user, count in before.items()}
    yield Result(f"whole rollout with drains, {size} nodes", "s", took_s)
    yield Result(f"writes per node beside drains, {size} nodes", "calls", made[USER], 3.0)
    yield Result(f"writes per node for drains, {size} nodes", "calls", made[DRAINER])


@contextmanager
def cluster(size: int) -> Iterator[tuple[LabServer, Client]]:
    # The sockets' names must stay short.
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        LabServer(Path(folder)) as server,
    ):
        client, transport = client_of(server.admin_kubeconfig)
        install_kinds(client)
        for config in ("old", "new"):
            add_config(client, config)
        add_nodes(client, [f"n{number:05}" for number in range(size)], "old")
        add_pool(
            client, "worker", "old", maxUnavailable="10%", annotations={ROLLOUT_POLICY: CAREFUL}
        )
        try:
            yield server, client
        finally:
            transport.close()


@contextmanager
def controller(server: LabServer, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    kubeconfig = server.write_kubeconfig(name, ["system:masters"])
    command = [sys.executable, "-m", "bench.controller", str(kubeconfig), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def rollout(
    server: LabServer,
    client: Client,
    agents: Agents,
    process: "subprocess.Popen[bytes]",
    size: int,
) -> Iterator[Result]:
    wait(lambda: said(client, "Updated") == "True")
    wait(lambda: server.count_requests(user=USER, verb="create") >= size)
    yield Result(f"controller at rest, {size} nodes: RSS", "MiB", memory(process.pid, "Rss"))
    before = calls(server)
    began = time.monotonic()
    client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"configuration": {"name": "new"}}})
    until(lambda: bool(agents.touched))
    first_s = time.monotonic() - began
    yield Result(f"pool change to first annotation, {size} nodes", "s", first_s, 2.0)
    wait(lambda: done(client) == "new")
    yield Result(f"whole rollout, {size} nodes", "s", time.monotonic() - began)
    yield Result(f"controller after it, {size} nodes: RSS", "MiB", memory(process.pid, "Rss"))
    made = {verb: count - before[verb] for verb, count in calls(server).items()}
    for verb, count in made.items():
        if count:
            yield Result(f"calls per node, {size} nodes: {verb}", "calls", count / size)
    written = sum(made[verb] for verb in WRITES)
    yield Result(f"writes per node, {size} nodes", "calls", written / size, 3.0)


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600.0
    while not condition():
        assert time.monotonic() < end, "the rollout did not get there"
        time.sleep(0.2)


def calls(server: LabServer) -> dict[str, int]:
    return {verb: server.count_requests(user=USER, verb=verb) for verb in VERBS}


def writes(server: LabServer, user: str) -> int:
    return sum(server.count_requests(user=user, verb=verb) for verb in WRITES)


def status(client: Client) -> Any:
    found: Any = client.get(MACHINECONFIGPOOLS, "worker")
    return found.get("status", {})


def done(client: Client) -> str:
    return str(status(client).get("configuration", {}).get("name", ""))


def said(client: Client, kind: str) -> str:
    found = status(client).get("conditions", ())
    return next((each["status"] for each in found if each["type"] == kind), "")
