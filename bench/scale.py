"""Benchmark of all controllers in one process: CPU and memory of a rollout of many pools.

The Nodes have the size that kubelets write, 12 kB. The controllers run as users run them, with the
official transport. The agents are simulated, in the process of the API server.

    make bench ARGS=scale
    python -m bench.scale 500 5000
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.node import read_cpu
from bench.result import Result
from bench.rollout import wait_for_rollout
from tests.controllers.rollout.agents import (
    Agents,
    add_config,
    add_pool,
    client_of,
    install_kinds,
    ready,
)
from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.clock import format_rfc3339
from treenail.kube.client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.controllers import CONTROLLER_COMMAND

USER = "controllers"
SIZES = (500, 5000)
NODES_PER_POOL = 25
PODS_PER_NODE = 30
DRAINED_NODES = 100
TO_NEW = {"spec": {"configuration": {"name": "new"}}}
CPU_TARGET_S, RSS_TARGET_MIB = 30.0, 160.0
# Shared by all Nodes, so that 20,000 of them fit into the memory of the lab.
IMAGES = [
    {
        "names": [
            f"registry.example.com/team-{number}/service@sha256:{number:064x}",
            f"registry.example.com/team-{number}/service:v1.{number}",
        ],
        "sizeBytes": 100_000_000 + number,
    }
    for number in range(40)
]


def measure(_seconds: float) -> Iterator[Result]:
    for size in SIZES:
        yield from measure_size(size)
    yield from measure_drains(DRAINED_NODES)


def measure_drains(size: int) -> Iterator[Result]:
    """Measure a rollout that evicts all pods of each node."""
    pools = [f"pool-{number:03}" for number in range(max(1, size // NODES_PER_POOL))]
    with cluster(size, pools) as (server, client):
        for number in range(size):
            pods = [build_pod(f"n{number:05}", each) for each in range(PODS_PER_NODE)]
            server.call_api(store_objects("pods", pods))
        with Agents(client, drains=True), running(server) as process:
            wait_for_rollout(lambda: count_updated(client, "old") == len(pools))
            wait_for_rollout(lambda: is_at_rest(server))
            before_s = read_cpu(process.pid)
            for pool in pools:
                client.patch(MACHINECONFIGPOOLS, pool, TO_NEW)
            wait_for_rollout(lambda: count_updated(client, "new") == len(pools))
            spent_s = read_cpu(process.pid) - before_s
    what = f"controllers, {size} nodes with {PODS_PER_NODE} pods: CPU of the drains"
    yield Result(what, "s", spent_s)
    yield Result("  for each node", "s", spent_s / size)


def measure_size(size: int) -> Iterator[Result]:
    """Measure the start and a rollout of a cluster with this number of nodes."""
    pools = [f"pool-{number:03}" for number in range(max(1, size // NODES_PER_POOL))]
    with cluster(size, pools) as (server, client), Agents(client), running(server) as process:
        wait_for_rollout(lambda: count_updated(client, "old") == len(pools))
        wait_for_rollout(lambda: is_at_rest(server))
        idle_s = read_cpu(process.pid)
        yield Result(f"controllers, {size} nodes: CPU of the start", "s", idle_s)
        yield Result(f"controllers, {size} nodes: RSS at rest", "MiB", read_rss(process.pid))
        started_at = time.monotonic()
        for pool in pools:
            client.patch(MACHINECONFIGPOOLS, pool, TO_NEW)
        wait_for_rollout(lambda: count_updated(client, "new") == len(pools), limit_s=1800.0)
        duration_s = time.monotonic() - started_at
        wait_for_rollout(lambda: is_at_rest(server))
        is_largest = size >= max(SIZES)
        yield Result(f"controllers, {size} nodes: rollout", "s", duration_s)
        yield Result(
            f"controllers, {size} nodes: CPU of the rollout",
            "s",
            read_cpu(process.pid) - idle_s,
            CPU_TARGET_S if is_largest else None,
        )
        yield Result(
            f"controllers, {size} nodes: maximum of RSS",
            "MiB",
            read_rss(process.pid, "VmHWM"),
            RSS_TARGET_MIB if is_largest else None,
        )
        yield Result(f"load of the machine, {size} nodes", "", os.getloadavg()[1])


@contextmanager
def cluster(size: int, pools: list[str]) -> Iterator[tuple[LabServer, Client]]:
    # The path of a Unix socket has at most 107 characters (unix(7)).
    with (
        tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder,
        LabServer(Path(folder)) as server,
    ):
        client, transport = client_of(server.admin_kubeconfig)
        install_kinds(client)
        for config in ("old", "new"):
            add_config(client, config)
        for number in range(0, size, 250):
            names = range(number, min(number + 250, size))
            nodes = [build_node(f"n{each:05}", pools[each % len(pools)]) for each in names]
            # Directly into the store: admission of 5,000 Nodes would take minutes.
            server.call_api(store_objects("nodes", nodes))
        for pool in pools:
            add_pool(client, pool, "old", maxUnavailable="20%")
        try:
            yield server, client
        finally:
            transport.close()


def store_objects(plural: str, objects: list[Json]) -> Callable[[Any], None]:
    def store(api: Any) -> None:
        for each in objects:
            api.store.put_object(("", plural), each)

    return store


def build_pod(node: str, number: int) -> Json:
    """Build a running pod that ends at once when it is evicted."""
    name = f"{node}-{number}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "labels": {"app": "web"},
            "annotations": {"lab.treenail/stop-seconds": "0"},
        },
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "i"}]},
        "status": {"phase": "Running"},
    }


@contextmanager
def running(server: LabServer) -> Iterator["subprocess.Popen[bytes]"]:
    kubeconfig = server.write_kubeconfig(USER, ["system:masters"])
    command = [
        *CONTROLLER_COMMAND, "run", "--enable=render,rollout,drain", "--no-leader-election",
        f"--kubeconfig={kubeconfig}", "--metrics=127.0.0.1:0",
    ]  # fmt: skip
    log = kubeconfig.with_suffix(".log")
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        yield process
        process.terminate()
        process.wait(60)


def build_node(name: str, pool: str) -> Json:
    """Build a Node as a kubelet and an agent write it, of about 12 kB."""
    conditions = [
        {**ready(), "type": kind, "status": "False", "message": f"kubelet has no {kind} now"}
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    managers = ("kubelet", "treenail", "treenail-drain", "kube-controller-manager")
    fields = {f"f:example.com/field-{number}": {".": {}} for number in range(20)}
    labels = {f"feature.example.com/cpu-{number}": "true" for number in range(15)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"00000000-0000-0000-0000-{name:0>12}",
            "creationTimestamp": format_rfc3339(time.time()),
            "labels": {
                **labels,
                "kubernetes.io/hostname": name,
                "topology.kubernetes.io/zone": f"zone-{hash(name) % 3}",
                f"node-role.kubernetes.io/{pool}": "",
            },
            "annotations": {
                key.CURRENT_CONFIG: "old",
                key.DESIRED_CONFIG: "old",
                key.STATE: "Done",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
            },
            "managedFields": [
                {
                    "manager": manager,
                    "operation": "Update",
                    "apiVersion": "v1",
                    "time": format_rfc3339(time.time()),
                    "fieldsType": "FieldsV1",
                    "fieldsV1": {"f:metadata": {"f:annotations": fields}},
                }
                for manager in managers
            ],
        },
        "spec": {"podCIDR": "10.0.0.0/24", "providerID": f"example:///zone/{name}"},
        "status": {
            "conditions": [*conditions, ready()],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            "capacity": {"cpu": "64", "memory": "263919996Ki", "pods": "250"},
            "images": IMAGES,
        },
    }


def count_updated(client: Client, config: str) -> int:
    """Count the pools that are updated with the config."""
    found: Any = client.list(MACHINECONFIGPOOLS).items
    return sum(
        pool.get("status", {}).get("configuration", {}).get("name") == config for pool in found
    )


def is_at_rest(server: LabServer) -> bool:
    """Return True when the controllers send no request for two seconds."""
    before = server.count_requests(user=USER)
    time.sleep(2.0)
    return server.count_requests(user=USER) == before


def read_rss(pid: int, field: str = "VmRSS") -> float:
    """Read the memory of the process, or its maximum (VmHWM), in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {field}")


if __name__ == "__main__":
    for count in sys.argv[1:]:
        for result in measure_size(int(count)):
            print(f"{result.name:<52} {result.value:>10.3g} {result.unit}", flush=True)
