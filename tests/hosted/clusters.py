"""A management cluster and a hosted cluster with InPlace pools, whose NodePools nothing reconciles.

The test plays the NodePool controller: it writes the annotations of MachineSets and the token
Secrets.
"""

import base64
import gzip
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures import hosted
from tests.fixtures.objects import Json, make_object
from tests.hosted import programs
from tests.hosted.processes import LoggedProcess
from tests.realcluster import MASTERS, RealCluster
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi
from treenail.api.node import Node
from treenail.errors import AlreadyExistsError
from treenail.kube.api_client import Client
from treenail.kube.resources import MACHINES, MACHINESETS, NODES, PODS, SECRETS
from treenail_lab.apiserver.serving.server import LabServer

RELEASE_VERSION = "4.22.1"
WORKLOADS = "default"
"""The namespace of the pods that drains evict."""
_EMPTY_PAYLOAD = base64.b64encode(gzip.compress(b'{"ignition": {"version": "3.4.0"}}'))


@dataclass(frozen=True, slots=True)
class HostedClusters:
    """Both API servers, and an administrator's client of each."""

    management_server: LabServer | RealCluster
    management_kubeconfig: Path
    guest_kubeconfig: Path
    management: Client
    guest: Client

    def write_user(self, name: str) -> Path:
        """Write the kubeconfig of another administrator of the management cluster."""
        return self.management_server.write_kubeconfig(name, MASTERS)

    def create_control_plane(self) -> None:
        """Create what the upgrader reads beside MachineSets; once for a management cluster."""
        hosted.install_hosted_kinds(self.management, "v1beta2", "v1beta1")
        hosted.add_object(self.management, hosted.HYPERSHIFT_KINDS[2], hosted.make_control_plane())
        encoded = base64.b64encode(b'{"auths": {}}').decode()
        pull_secret = make_object(
            SECRETS,
            "pull-secret",
            top={"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": encoded}},
        )
        self.management.create(SECRETS, pull_secret, namespace=hosted.CONTROL_PLANE)


def run_upgrader(clusters: HostedClusters, directory: Path) -> LoggedProcess:
    """Return HyperShift's in-place upgrader and drainer of the hosted cluster."""
    command: list[str | Path] = [
        programs.find_program("inplace"),
        f"--management-kubeconfig={clusters.management_kubeconfig}",
        f"--guest-kubeconfig={clusters.guest_kubeconfig}",
        f"--namespace={hosted.CONTROL_PLANE}",
        f"--hcp-name={hosted.CLUSTER}",
        "--qps=500",
    ]
    return LoggedProcess(command, directory / "inplace.log")


class InPlacePool:
    """A NodePool of the type InPlace: its MachineSet, its Machines and their Nodes."""

    def __init__(self, clusters: HostedClusters, name: str, nodes: Iterable[str]) -> None:
        self._clusters = clusters
        self.name = name
        self.nodes = list(nodes)

    def create(self, *, limit: str = "-1", value: str = hosted.OLD_HASH) -> None:
        """Create the objects of a pool that was installed at a hash and never updated."""
        document = hosted.make_machine_set(self.name, value, value, limit)
        self._uid = _get_uid(hosted.add_object(self._clusters.management, MACHINESETS, document))
        for node in self.nodes:
            self.add_node(node, value)

    def add_node(self, node: str, value: str) -> None:
        """Create the Machine and the Node of a machine that was provisioned at a hash."""
        notes, labels = self.describe_node(node)
        self._clusters.guest.create(
            NODES, make_object(NODES, node, annotations=notes, labels=labels)
        )
        self.add_machine(node, value)

    def describe_node(self, node: str) -> tuple[Json, Json]:
        """Return the annotations and labels of the Node of a machine."""
        notes = {
            "cluster.x-k8s.io/machine": node,
            "cluster.x-k8s.io/cluster-namespace": hosted.CONTROL_PLANE,
        }
        return notes, {hosted_key.NODE_POOL: self.name, "kubernetes.io/hostname": node}

    def add_machine(self, node: str, value: str) -> None:
        """Create the Machine of a Node that exists: the upgrader fails without the Node."""
        reference: Json = {
            "apiVersion": MACHINESETS.api_version,
            "kind": "MachineSet",
            "name": self.name,
            "uid": self._uid,
            "controller": True,
        }
        machine = hosted.make_machine(
            node, self.name, value, labels={self.name: self.name}, ownerReferences=[reference]
        )
        hosted.add_object(self._clusters.management, MACHINES, machine)

    def add_workload(self, node: str) -> str:
        """Create a pod without a controller on a node; return its name."""
        name = f"work-{node}"
        pod = make_object(
            PODS, name, {"nodeName": node, "containers": [{"name": "one", "image": "one"}]}
        )
        self._clusters.guest.create(PODS, pod, namespace=WORKLOADS)
        return name

    def set_target(
        self, value: str, *, limit: str | None = None, payload: bytes = _EMPTY_PAYLOAD
    ) -> None:
        """Begin an update, as the NodePool controller and the Ignition server do."""
        data = {"payload": payload, "release-version": RELEASE_VERSION.encode()}
        secret = hosted.make_secret(
            f"token-{self.name}-{value}",
            self.name,
            {name: base64.b64encode(text).decode() for name, text in data.items()},
        )
        with suppress(AlreadyExistsError):  # a target that the pool had before
            self._clusters.management.create(SECRETS, secret, namespace=hosted.CONTROL_PLANE)
        notes: Json = {hosted_key.TARGET_CONFIG_VERSION: value}
        self._annotate(notes if limit is None else {**notes, hosted_key.MAX_UNAVAILABLE: limit})

    def _annotate(self, notes: Json) -> None:
        self._clusters.management.patch(
            MACHINESETS,
            self.name,
            {"metadata": {"annotations": notes}},
            namespace=hosted.CONTROL_PLANE,
        )

    def label(self, node: str, labels: Json) -> None:
        self._clusters.guest.patch(NODES, node, {"metadata": {"labels": labels}})

    def select(self, node: str, value: str) -> None:
        """Write a node's desiredConfig, as the conductor of the update does."""
        notes = {key.DESIRED_CONFIG: value}
        self._clusters.guest.patch(NODES, node, {"metadata": {"annotations": notes}})

    def read_machine_set(self) -> clusterapi.MachineSet:
        document = self._clusters.management.get(
            MACHINESETS, self.name, namespace=hosted.CONTROL_PLANE
        )
        return clusterapi.MachineSet.from_json(document)

    def read_machine(self, name: str) -> clusterapi.ClusterMachine:
        document = self._clusters.management.get(MACHINES, name, namespace=hosted.CONTROL_PLANE)
        return clusterapi.ClusterMachine.from_json(document)

    def read_node(self, name: str) -> Node:
        return Node.from_json(self._clusters.guest.get(NODES, name))

    def find_pods(self) -> set[str]:
        """Return the names of the nodes that have an upgrade pod."""
        pods = self._clusters.guest.list(PODS, namespace=f"{self.name}-upgrade").items
        return {str(get_pod_node(pod)) for pod in pods}


def clear_state(clusters: HostedClusters, node: str) -> None:
    """Do what the command does that treenail prints for a degraded node."""
    clusters.guest.patch(NODES, node, {"metadata": {"annotations": {key.STATE: None}}})


def get_pod_node(pod: Json) -> str:
    """Return the name of the node of an upgrade pod; nothing schedules the pods."""
    return str(pod["metadata"]["name"]).removeprefix("machine-config-daemon-")


def _get_uid(document: Json) -> str:
    return str(document["metadata"]["uid"])
