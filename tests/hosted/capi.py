"""The real manager of Cluster API (CAPI), and an actor in the place of an infrastructure provider.

The actor's machines boot at once: a TestMachine gets its providerID and is provisioned, and the
Node that joins is Ready. CAPI itself drains and deletes Nodes.
"""

import base64
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import yaml

from tests.fixtures import hosted
from tests.fixtures.controllers import CLOCK
from tests.fixtures.objects import Json, make_object
from tests.hosted import programs
from tests.hosted.clusters import HostedClusters
from tests.hosted.processes import LoggedProcess
from tests.realcluster import find_ports
from tests.waiting import wait_until
from treenail.api.hosted import annotations as hosted_key
from treenail.clocks import format_rfc3339
from treenail.errors import NotFoundError, TooManyRequestsError
from treenail.kube.informer import Informer
from treenail.kube.resources import (
    CUSTOMRESOURCEDEFINITIONS,
    HOSTEDCONTROLPLANES,
    MACHINEDEPLOYMENTS,
    MACHINES,
    MACHINESETS,
    NAMESPACES,
    NODES,
    SECRETS,
    Resource,
)
from treenail.kube.watch import WatchScope
from treenail_lab.apiserver.access.certificates import CertificateAuthority

_CAPI_KINDS = "cmd/install/assets/crds/cluster-api"
_GROUP = "infrastructure.cluster.x-k8s.io"
CLUSTERS = Resource("cluster.x-k8s.io", "v1beta2", "clusters", "Cluster", namespaced=True)
TEST_CLUSTERS = Resource(_GROUP, "v1beta2", "testclusters", "TestCluster", namespaced=True)
TEST_MACHINES = Resource(_GROUP, "v1beta2", "testmachines", "TestMachine", namespaced=True)
TEST_TEMPLATES = Resource(
    _GROUP, "v1beta2", "testmachinetemplates", "TestMachineTemplate", namespaced=True
)
_NAMESPACE = hosted.CONTROL_PLANE
DEPLOYMENT_NAME = "cluster.x-k8s.io/deployment-name"
"""The label of the MachineSets and Machines of a MachineDeployment."""
MANAGER = "capi"
"""The user as which the manager sends its requests."""


def install_kinds(clusters: HostedClusters) -> None:
    """Create CAPI's kinds of HyperShift's tree, and those of the actor."""
    documents = [
        yaml.load(path.read_text("utf-8"), Loader=yaml.CSafeLoader)
        for path in sorted((programs.TREE.read() / _CAPI_KINDS).glob("*.yaml"))
    ]
    # A label names the version of the contract, and the version of the kind that follows it.
    for resource, contract in (
        (HOSTEDCONTROLPLANES, "v1beta1"),
        (TEST_CLUSTERS, "v1beta2"),
        (TEST_MACHINES, "v1beta2"),
        (TEST_TEMPLATES, "v1beta2"),
    ):
        crd = hosted.build_crd(resource, resource.version)
        crd["metadata"]["labels"] = {f"cluster.x-k8s.io/{contract}": resource.version}
        documents.append(crd)
    others = [each for each in hosted.HYPERSHIFT_KINDS if each != HOSTEDCONTROLPLANES]
    documents += [hosted.build_crd(resource, resource.version) for resource in others]
    for document in documents:
        clusters.management.create(CUSTOMRESOURCEDEFINITIONS, document)
    for document in documents:
        wait_until(lambda document=document: is_served(clusters, document), limit_s=30.0)
    for name in (hosted.NAMESPACE, _NAMESPACE):
        clusters.management.create(NAMESPACES, make_object(NAMESPACES, name))


def is_served(clusters: HostedClusters, kind: Json) -> bool:
    spec = kind["spec"]
    version = next(each["name"] for each in spec["versions"] if each["storage"])
    try:
        clusters.management.read_path(f"/apis/{spec['group']}/{version}/{spec['names']['plural']}")
    except (NotFoundError, TooManyRequestsError):  # its storage is initialized
        return False
    return True


def create_cluster(clusters: HostedClusters) -> None:
    """Create the Cluster as HyperShift does, with the kubeconfig of the hosted cluster."""
    control_plane = hosted.with_status(
        hosted.make_control_plane(), initialized=True, externalManagedControlPlane=True
    )
    hosted.add_object(clusters.management, HOSTEDCONTROLPLANES, control_plane)
    infrastructure = make_object(TEST_CLUSTERS, hosted.CLUSTER, {}, namespace=_NAMESPACE)
    status = {"initialization": {"provisioned": True}}
    hosted.add_object(clusters.management, TEST_CLUSTERS, {**infrastructure, "status": status})
    secret = make_object(
        SECRETS,
        f"{hosted.CLUSTER}-kubeconfig",
        top={
            "type": "cluster.x-k8s.io/secret",
            "data": {"value": base64.b64encode(clusters.guest_kubeconfig.read_bytes()).decode()},
        },
        labels={hosted_key.CLUSTER_NAME: hosted.CLUSTER},
    )
    clusters.management.create(SECRETS, secret, namespace=_NAMESPACE)
    spec = {
        "controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443},
        "controlPlaneRef": {
            "apiGroup": HOSTEDCONTROLPLANES.group,
            "kind": HOSTEDCONTROLPLANES.kind,
            "name": hosted.CLUSTER,
        },
        "infrastructureRef": {
            "apiGroup": _GROUP, "kind": TEST_CLUSTERS.kind, "name": hosted.CLUSTER
        },
    }  # fmt: skip
    document = make_object(CLUSTERS, hosted.CLUSTER, spec, namespace=_NAMESPACE)
    clusters.management.create(CLUSTERS, document, namespace=_NAMESPACE)


def run_manager(clusters: HostedClusters, directory: Path) -> LoggedProcess:
    """Return CAPI's manager with the options of HyperShift, without leader election."""
    identity = CertificateAuthority(directory).make_server_identity()
    (directory / "tls.crt").write_bytes(identity.certificate)
    (directory / "tls.key").write_bytes(identity.private_key)
    command: list[str | Path] = [
        programs.CAPI_MANAGER.read(),
        f"--kubeconfig={clusters.write_user(MANAGER)}",
        f"--namespace={_NAMESPACE}",
        "--feature-gates=MachineSetPreflightChecks=false",
        "--skip-crd-migration-phases=StorageVersionMigration",
        "--skip-crd-migration-phases=CleanupManagedFields",
        f"--webhook-cert-dir={directory}",
        # 0 means 9443.
        f"--webhook-port={find_ports(1)[0]}",
        "--health-addr=0",
        "--diagnostics-address=127.0.0.1:0",
        "--insecure-diagnostics",
        "--v=4",
    ]
    return LoggedProcess(command, directory / "capi-manager.log")


class ReplacePool:
    """A NodePool of the type Replace: its MachineDeployment with the strategy OnDelete."""

    def __init__(self, clusters: HostedClusters, name: str, replicas: int) -> None:
        self._client = clusters.management
        self.name, self.replicas = name, replicas

    def create(self, value: str = hosted.OLD_HASH) -> None:
        template = {"template": {"metadata": {}, "spec": {}}}
        self._client.create(
            TEST_TEMPLATES,
            make_object(TEST_TEMPLATES, self.name, template, namespace=_NAMESPACE),
            namespace=_NAMESPACE,
        )
        document = hosted.make_machine_deployment(self.name, value, "OnDelete")
        document.pop("status")
        document["spec"]["replicas"] = self.replicas
        document["spec"]["template"]["spec"]["infrastructureRef"] = {
            "apiGroup": _GROUP, "kind": TEST_TEMPLATES.kind, "name": self.name
        }  # fmt: skip
        self._client.create(MACHINEDEPLOYMENTS, document, namespace=_NAMESPACE)

    def set_target(self, value: str) -> None:
        """Change the user data of new machines, as the NodePool controller does."""
        bootstrap = {"dataSecretName": f"user-data-{self.name}-{value}"}
        self._client.patch(
            MACHINEDEPLOYMENTS,
            self.name,
            {"spec": {"template": {"spec": {"bootstrap": bootstrap}}}},
            namespace=_NAMESPACE,
        )

    def read_deployment(self) -> Json:
        return self._client.get(MACHINEDEPLOYMENTS, self.name, namespace=_NAMESPACE)

    def read_machines(self) -> dict[str, Json]:
        """Return the Machines of the pool by name."""
        items = self._client.list(
            MACHINES, namespace=_NAMESPACE, params={"labelSelector": f"{self.name}={self.name}"}
        ).items
        return {str(machine["metadata"]["name"]): machine for machine in items}

    def read_machine_sets(self) -> list[Json]:
        selector = {"labelSelector": f"{DEPLOYMENT_NAME}={self.name}"}
        return list(self._client.list(MACHINESETS, namespace=_NAMESPACE, params=selector).items)


class MachineProvider(AbstractContextManager["MachineProvider"]):
    """Runs while entered; ``created`` and ``deleted`` are the names of TestMachines in order."""

    def __init__(self, clusters: HostedClusters) -> None:
        self._clusters = clusters
        self.created: list[str] = []
        self.deleted: list[str] = []
        self._lock = threading.Lock()
        scope = WatchScope(TEST_MACHINES, namespace=_NAMESPACE)
        self._machines: Informer[Json] = Informer(
            clusters.management, scope, CLOCK, lambda document: document
        )
        self._machines.add_handler(self._note_machine)

    def __enter__(self) -> Self:
        self._machines.start()
        assert self._machines.wait_until_synced(30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._machines.stop()

    def _note_machine(self, key: str, before: Json | None, after: Json | None) -> None:
        name = key.rpartition("/")[2]
        if after is None:
            self.deleted.append(name)
        elif before is None:
            self.created.append(name)
            self._boot_machine(name)

    def _boot_machine(self, name: str) -> None:
        provider_id = f"test://{name}"
        now = format_rfc3339(CLOCK.now())
        # CAPI takes a node without one of them for unhealthy.
        states = {"Ready": "True"} | dict.fromkeys(
            ("MemoryPressure", "DiskPressure", "PIDPressure"), "False"
        )
        conditions = [
            {
                "type": kind, "status": status, "reason": "Kubelet", "message": "",
                "lastHeartbeatTime": now, "lastTransitionTime": now,
            }
            for kind, status in states.items()
        ]  # fmt: skip
        labels = {"kubernetes.io/hostname": name}
        node = make_object(NODES, name, {"providerID": provider_id}, labels=labels)
        self._clusters.guest.create(NODES, node)
        self._clusters.guest.patch(
            NODES, name, {"status": {"conditions": conditions}}, subresource="status"
        )
        management = self._clusters.management
        management.patch(
            TEST_MACHINES, name, {"spec": {"providerID": provider_id}}, namespace=_NAMESPACE
        )
        status = {"initialization": {"provisioned": True}}
        management.patch(
            TEST_MACHINES, name, {"status": status}, namespace=_NAMESPACE, subresource="status"
        )
