"""The actors of `HostedWorld` on two lab API servers, beside the controller as a process."""

import json
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tests.controllers.hosted.conduct.world import POOL, Api, HostedWorld
from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import make_object
from treenail.api.hosted import clusterapi
from treenail.errors import ConflictError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.discovery import iter_objects
from treenail.kube.resources import (
    CONFIGMAPS,
    EVENTS,
    HOSTEDCLUSTERS,
    HOSTEDCONTROLPLANES,
    MACHINEDEPLOYMENTS,
    MACHINES,
    MACHINESETS,
    NAMESPACES,
    NODEPOOLS,
    NODES,
    ROLLOUTPOLICIES,
    SECRETS,
    Resource,
)
from treenail_lab.apiserver.serving.server import LabServer

Json = dict[str, Any]
_KINDS = {
    each.plural: each
    for each in (
        CONFIGMAPS, HOSTEDCLUSTERS, HOSTEDCONTROLPLANES, MACHINEDEPLOYMENTS, MACHINES, MACHINESETS,
        NODEPOOLS, NODES, ROLLOUTPOLICIES, SECRETS,
    )
}  # fmt: skip
_USER_KINDS = (NODEPOOLS, HOSTEDCLUSTERS)


class ServerApi:
    """The interface of `Api` on a real API server, for the HostedCluster of one namespace."""

    def __init__(self, client: Client, namespace: str, version: str = "v1beta2") -> None:
        self.client = client
        self.version = version
        self.user_namespace = namespace
        self.namespace = f"{namespace}-{hosted.CLUSTER}"
        self.objects = _ServerObjects(self)

    def find_kind(self, plural: str) -> Resource:
        """The resource, of Cluster API in the version of this server."""
        kind = _KINDS[plural]
        is_versioned = kind.group == clusterapi.GROUP
        return replace(kind, version=self.version) if is_versioned else kind

    def find_namespace(self, resource: Resource) -> str:
        if not resource.namespaced:
            return ""
        return self.user_namespace if resource in _USER_KINDS else self.namespace

    def put(self, resource: Resource, document: Json) -> Json:
        """Create or replace an object with its status; those of HyperShift stay in namespaces."""
        text = json.dumps(document).replace(hosted.NAMESPACE, self.user_namespace)
        document = json.loads(
            text.replace(f"{clusterapi.GROUP}/v1beta2", f"{clusterapi.GROUP}/{self.version}")
        )
        if "rollout" in document.get("spec", {}):  # the place in v1beta1
            document["spec"]["strategy"] = document["spec"]["rollout"]["strategy"]
        resource = self.find_kind(resource.plural)
        document = {"apiVersion": resource.api_version, "kind": resource.kind, **document}
        name, namespace = document["metadata"]["name"], self.find_namespace(resource)
        found: Any = self.client.find(resource, name, namespace=namespace)
        if found is None:
            self.client.create(resource, document, namespace=namespace)
        else:
            meta = {**found["metadata"], "annotations": document["metadata"].get("annotations", {})}
            self.client.update(resource, name, {**document, "metadata": meta}, namespace=namespace)
        return self.change(resource.plural, name, {"status": document.get("status", {})})

    def change(self, plural: str, name: str, body: Json) -> Json:
        resource = self.find_kind(plural)
        place: Any = {"namespace": self.find_namespace(resource)}
        rest = {key: value for key, value in body.items() if key != "status" and value}
        stored: Json = {}
        if rest:
            stored = self.client.patch(resource, name, rest, **place)
        if body.get("status"):
            part = {"status": body["status"]}
            stored = self.client.patch(resource, name, part, subresource="status", **place)
        return stored or self.objects[plural, name]

    def list(self, plural: str) -> list[Json]:
        resource = self.find_kind(plural)
        items = self.client.list(resource, namespace=self.find_namespace(resource)).items
        return sorted(items, key=lambda item: cast("Any", item)["metadata"]["name"])


class _ServerObjects:
    def __init__(self, api: ServerApi) -> None:
        self._api = api

    def __getitem__(self, place: tuple[str, str]) -> Json:
        resource = self._api.find_kind(place[0])
        namespace = self._api.find_namespace(resource)
        return self._api.client.get(resource, place[1], namespace=namespace)

    def get(self, place: tuple[str, str]) -> Json | None:
        try:
            return self[place]
        except NotFoundError:
            return None

    def __contains__(self, place: tuple[str, str]) -> bool:
        return self.get(place) is not None

    def __delitem__(self, place: tuple[str, str]) -> None:
        resource = self._api.find_kind(place[0])
        namespace = self._api.find_namespace(resource)
        if resource.plural == MACHINES.plural:
            body: Json = {"metadata": {"finalizers": []}}
            self._api.client.patch(resource, place[1], body, namespace=namespace)
            return
        self._api.client.delete(resource, place[1], namespace=namespace)


class HostedSite(HostedWorld):
    """A pool on two API servers; its Machines have the finalizer of Cluster API."""

    def __init__(
        self, management: ServerApi, guest: ServerApi, upgrade_type: str, size: int
    ) -> None:
        self.apis = (management, guest)
        super().__init__(upgrade_type, size)

    def make_apis(self) -> tuple[Api, Api]:
        return cast("tuple[Api, Api]", self.apis)

    def now(self) -> float:
        return time.time()

    def start(self) -> None:
        """The controller is a process of its own."""

    def add_machine(self, owner: Json, name: str, *, joined: bool) -> None:
        super().add_machine(owner, name, joined=joined)
        finalizers = {"finalizers": ["machine.cluster.x-k8s.io"]}
        self.management.change("machines", name, {"metadata": finalizers})

    def record(self) -> Json:
        found = self.management.objects.get(("configmaps", "treenail-rollouts"))
        text = ((found or {}).get("data") or {}).get(POOL, "{}")
        return cast("Json", json.loads(text))

    def find_message(self, kind: str, text: str) -> str:
        """The message of a condition, if it contains the text."""
        message = str(self.conditions().get(kind, {}).get("message"))
        return message if text in message else ""

    def count_at(self, target: str) -> int:
        """How many nodes were given the target."""
        return sum(node.desired_config == target for node in self.nodes().values())

    def is_done(self, target: str = hosted.NEW_HASH) -> bool:
        """Let the others act once; return whether the rollout is complete."""
        try:
            self.act()
        except (ConflictError, NotFoundError):
            return False
        return self.is_finished(target)


@contextmanager
def open_management(directory: Path, *capi_versions: str) -> Iterator[tuple[LabServer, Client]]:
    """A management cluster with the kinds of HyperShift and Cluster API."""
    with LabServer(directory) as server, open_client(server.admin_kubeconfig) as client:
        hosted.install_hosted_kinds(client, *capi_versions)
        yield server, client


@contextmanager
def open_site(
    client: Client, directory: Path, upgrade_type: str = "InPlace", *,
    namespace: str = hosted.NAMESPACE, size: int = 3, version: str = "v1beta2",
) -> Iterator[tuple[HostedSite, LabServer]]:  # fmt: skip
    """A hosted cluster with its own API server and certificate authority."""
    with ExitStack() as stack:
        guest = stack.enter_context(LabServer(directory))
        guest_client = stack.enter_context(open_client(guest.admin_kubeconfig))
        management = ServerApi(client, namespace, version)
        for name in (namespace, management.namespace):
            if client.find(NAMESPACES, name) is None:
                client.create(NAMESPACES, make_object(NAMESPACES, name))
        management.put(HOSTEDCONTROLPLANES, hosted.make_control_plane())
        put_kubeconfig(management, guest.admin_kubeconfig.read_text())
        yield HostedSite(management, ServerApi(guest_client, namespace), upgrade_type, size), guest


def put_kubeconfig(
    management: ServerApi, text: str, name: str = "admin-kubeconfig", key: str = "kubeconfig"
) -> None:
    """Write the Secret with the kubeconfig of a hosted cluster."""
    data = {key: b64encode(text.encode()).decode()}
    secret = make_object(SECRETS, name, top={"data": data}, namespace=management.namespace)
    management.put(SECRETS, secret)


def list_events(client: Client, namespace: str = hosted.NAMESPACE) -> list[tuple[str, str]]:
    """Reason and message of the Events in a namespace."""
    found = iter_objects(list(client.list(EVENTS, namespace=namespace).items))
    return [(str(each["reason"]), str(each["message"])) for each in found]
