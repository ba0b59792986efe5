"""Benchmark of all controllers in one process: CPU and memory of a rollout of many pools.

The Nodes have the size that kubelets write, 12 kB. Of the 30 pods of a node, 5 kB each, six belong
to DaemonSets and two are mirror pods; a drain evicts the other 22. The controllers run as users run
them. The agents are simulated, in the process of the API server.

    make bench ARGS=scale
    python -m bench.scale 500 5000 --pods 30
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.node import read_cpu
from bench.result import Result
from bench.rollout import wait_for_rollout
from tests.controllers.rollout.agents import Agents
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import add_config, add_pool, install_kinds, make_ready_condition
from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.clocks import format_rfc3339
from treenail.errors import ClusterError
from treenail.kube.api_client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.apiserver.registry.builtin_kinds import prepare_changed
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.controllers import CONTROLLER_COMMAND

USER = "controllers"
SIZES = (500, 5000)
NODES_PER_POOL = 25
PODS_PER_NODE = 30
DAEMONSETS_PER_NODE, MIRRORS_PER_NODE = 6, 2
DRAINED_NODES = 100
REPLICASET = "web-6f7d8c9b5"
# Shared by all pods, as above.
NETWORK = '[{"name": "cluster", "interface": "eth0", "ips": ["10.128.0.17"], "default": true}]'
POD_MANAGERS = [
    {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "time": "2026-01-01T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": {f"f:{part}": {f"f:field-{number}": {".": {}} for number in range(18)}},
    }
    for manager, part in (("kube-controller-manager", "spec"), ("kubelet", "status"))
]
POD_SPEC = {
    "containers": [
        {
            "name": f"container-{number}",
            "image": f"registry.example.com/team/service-{number}@sha256:{number:064x}",
            "env": [{"name": f"VARIABLE_{each}", "value": f"value {each}"} for each in range(8)],
            "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
            "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets", "readOnly": True}],
            "terminationMessagePath": "/dev/termination-log",
            "imagePullPolicy": "IfNotPresent",
        }
        for number in range(2)
    ],
    "volumes": [
        {"name": "token", "projected": {"sources": [{"configMap": {"name": "kube-root-ca.crt"}}]}}
    ],
    "tolerations": [
        {"key": f"node.kubernetes.io/{cause}", "operator": "Exists", "effect": "NoExecute"}
        for cause in ("not-ready", "unreachable")
    ],
    "serviceAccountName": "default",
    "terminationGracePeriodSeconds": 30,
}
POD_STATUS = {
    "phase": "Running",
    "conditions": [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ],
    "containerStatuses": [
        {
            "name": f"container-{number}",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            "imageID": f"registry.example.com/team/service-{number}@sha256:{number:064x}",
            "containerID": f"cri-o://{number:064x}",
        }
        for number in range(2)
    ],
    "podIP": "10.128.0.17",
    "qosClass": "Burstable",
}
TO_NEW = {"spec": {"configuration": {"name": "new"}}}
CPU_TARGET_S, RSS_TARGET_MIB = 30.0, 160.0
LIMIT_S = 7200.0
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
    yield from measure_size(DRAINED_NODES, pods=PODS_PER_NODE)


class DrainedAgents(Agents):
    """Agents that request drains. Their pods exist from the request to the end of the drain.

    The lab's server reads all its pods for each list. So it holds only those of drained nodes. The
    controllers watch the pods of a node only during its drain, so they notice no difference.
    """

    def __init__(self, server: LabServer, client: Client, pods: int) -> None:
        super().__init__(client, drains=True)
        self._server = server
        self._pods = pods

    def _note_on(self, name: str, notes: Json) -> None:
        requested = str(notes.get(key.DESIRED_DRAIN, ""))
        if requested.startswith("drain-"):
            pods = [build_pod(name, number) for number in range(self._pods)]
            self._change_store(store_pods(pods))
        elif requested:
            self._change_store(lambda api: self._remove_pods(api, name))
        super()._note_on(name, notes)

    def _change_store(self, change: Callable[[Any], None]) -> None:
        try:
            self._server.call_api(change)
        except TimeoutError as error:
            # The agent tries again, as after an error of the API server.
            raise ClusterError("the lab's server is overloaded") from error

    def _remove_pods(self, api: Any, node: str) -> None:
        for number in range(self._pods):
            where = ("default", build_pod_name(node, number))
            if api.store.find_object(("", "pods"), where) is not None:
                api.store.remove_object(("", "pods"), where)


def measure_size(size: int, *, pods: int = 0) -> Iterator[Result]:
    """Measure the start and a rollout of a cluster with this number of nodes and pods."""
    pools = [f"pool-{number:03}" for number in range(max(1, size // NODES_PER_POOL))]
    what = f"controllers, {size} nodes{f' with {pods} pods' if pods else ''}"
    with (
        cluster(size, pools) as (server, client),
        DrainedAgents(server, client, pods) if pods else Agents(client),
        running(server) as process,
    ):
        wait_for_rollout(lambda: count_updated(client, "old") == len(pools))
        wait_for_rollout(lambda: is_at_rest(server))
        idle_s = read_cpu(process.pid)
        yield Result(f"{what}: CPU of the start", "s", idle_s)
        yield Result(f"{what}: RSS at rest", "MiB", read_rss(process.pid))
        started_at = time.monotonic()
        for pool in pools:
            client.patch(MACHINECONFIGPOOLS, pool, TO_NEW)
        wait_for_rollout(lambda: count_updated(client, "new") == len(pools), limit_s=LIMIT_S)
        duration_s = time.monotonic() - started_at
        wait_for_rollout(lambda: is_at_rest(server))
        is_largest = size >= max(SIZES)
        yield Result(f"{what}: rollout", "s", duration_s)
        spent_s = read_cpu(process.pid) - idle_s
        target_s = CPU_TARGET_S if is_largest else None
        yield Result(f"{what}: CPU of the rollout", "s", spent_s, target_s)
        yield Result("  for each node", "ms", 1000 * spent_s / size)
        evictions = server.count_requests(user=USER, verb="create", resource="pods/eviction")
        yield Result("  evictions for each node", "", evictions / size)
        yield Result(
            f"{what}: maximum of RSS",
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
        open_client(server.admin_kubeconfig) as client,
    ):
        install_kinds(client)
        for config in ("old", "new"):
            add_config(client, config)
        for number in range(0, size, 250):
            names = range(number, min(number + 250, size))
            nodes = [build_node(f"n{each:05}", pools[each % len(pools)]) for each in names]
            # Directly into the store: admission of 5,000 Nodes would take minutes.
            server.call_api(store_objects("nodes", nodes))
        # Without its owner the lab's garbage collector would delete a pod.
        daemonsets = [
            build_owner("DaemonSet", f"agent-{number}") for number in range(DAEMONSETS_PER_NODE)
        ]
        server.call_api(store_objects("daemonsets", daemonsets, group="apps"))
        owners = [build_owner("ReplicaSet", REPLICASET)]
        server.call_api(store_objects("replicasets", owners, group="apps"))
        for pool in pools:
            add_pool(client, pool, "old", maxUnavailable="20%")
        yield server, client


def store_objects(plural: str, objects: list[Json], *, group: str = "") -> Callable[[Any], None]:
    def store(api: Any) -> None:
        for each in objects:
            api.store.put_object((group, plural), each)

    return store


def store_pods(pods: list[Json]) -> Callable[[Any], None]:
    """Store pods with the defaults of the API server, which an eviction must not add."""

    def store(api: Any) -> None:
        kind = api.kinds.find_kind("", "v1", "pods")
        store_objects("pods", [prepare_changed(kind, each, each) for each in pods])(api)

    return store


def build_owner(kind: str, name: str) -> Json:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": {}}


def build_pod_name(node: str, number: int) -> str:
    return f"{node}-{REPLICASET}-{number:05}"


def build_pod(node: str, number: int) -> Json:
    """Build a running pod of about 5 kB, which ends at once when it is evicted."""
    name = build_pod_name(node, number)
    annotations: Json = {"lab.treenail/stop-seconds": "0", "example.com/network": NETWORK}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": REPLICASET}
    uid = f"uid-{REPLICASET}"
    if number < DAEMONSETS_PER_NODE:
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": f"agent-{number}"}
        uid = f"uid-agent-{number}"
    elif number < DAEMONSETS_PER_NODE + MIRRORS_PER_NODE:
        annotations["kubernetes.io/config.mirror"] = f"{number:032x}"
        owner = {"apiVersion": "v1", "kind": "Node", "name": node}
        uid = build_node_uid(node)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"00000000-0000-0000-0000-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "web", "pod-template-hash": "6f7d8c9b5"},
            "annotations": annotations,
            "ownerReferences": [{**owner, "uid": uid, "controller": True}],
            "managedFields": POD_MANAGERS,
        },
        "spec": {"nodeName": node, **POD_SPEC},
        "status": POD_STATUS,
    }


@contextmanager
def running(server: LabServer, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run controllers; without ``options`` those of ordinary rollouts."""
    kubeconfig = server.write_kubeconfig(USER, ["system:masters"])
    command = [
        *CONTROLLER_COMMAND, "run", *(options or ("--enable=render,rollout,drain",)),
        "--no-leader-election",
        f"--kubeconfig={kubeconfig}", "--metrics=127.0.0.1:0",
    ]  # fmt: skip
    log = kubeconfig.with_suffix(".log")
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        yield process
        process.terminate()
        process.wait(60)


def build_node_uid(name: str) -> str:
    return f"00000000-0000-0000-0000-{name:0>12}"


def build_node(name: str, pool: str) -> Json:
    """Build a Node as a kubelet and an agent write it, of about 12 kB."""
    conditions = [
        {
            **make_ready_condition(),
            "type": kind,
            "status": "False",
            "message": f"kubelet has no {kind} now",
        }
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
            "uid": build_node_uid(name),
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
            "conditions": [*conditions, make_ready_condition()],
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    parser.add_argument("sizes", nargs="+", type=int, metavar="NODES")
    parser.add_argument("--pods", type=int, default=0, help="pods of each node (default: 0)")
    arguments = parser.parse_args()
    for size in arguments.sizes:
        for result in measure_size(size, pods=arguments.pods):
            print(f"{result.name:<60} {result.value:>10.3g} {result.unit}", flush=True)


if __name__ == "__main__":
    main()
