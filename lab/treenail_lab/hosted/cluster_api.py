"""Cluster API in the namespace of one control plane, a step at a time.

It has what the controllers of a hosted cluster see of the real one: MachineSets of a
MachineDeployment with surge or OnDelete, and Machines that boot from the user data that their
template names. A machine that is deleted stays until its provider has drained and removed it.
"""

import base64
import hashlib
import json
from dataclasses import replace
from typing import Any, Protocol

from treenail.api.hosted import annotations as hosted_key
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    MACHINEDEPLOYMENTS,
    MACHINES,
    MACHINESETS,
    SECRETS,
    Resource,
)

Json = dict[str, Any]
_PREFIX = hosted_key.CAPI_PREFIX
_DEPLOYMENT_NAME = f"{_PREFIX}deployment-name"
_SET_NAME = f"{_PREFIX}set-name"
_FINALIZER = "machine.cluster.x-k8s.io"
_NO_CREATION = f"{_PREFIX}disable-machine-create"
_V1BETA2 = "v1beta2"


class MachineProvider(Protocol):
    """Boots and removes machines. A Machine and its Node have the same name."""

    def create_machine(self, name: str, user_data: bytes) -> None:
        """Boot a machine, without waiting for it."""

    def has_joined(self, name: str) -> bool:
        """Return whether the Node of a machine is Ready."""

    def remove_machine(self, name: str) -> bool:
        """Drain a machine and remove it; return whether it is gone. Called until then."""


class ClusterApi:
    """Cluster API; `step` does what is due and raises `ClusterError`."""

    def __init__(
        self, client: Client, namespace: str, provider: MachineProvider, version: str = _V1BETA2
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._provider = provider
        self._version = version
        self.replaced: list[str] = []
        """Machines of an old template that were deleted."""
        self._number = 0

    def step(self) -> None:
        """Let Machines join and leave, then create and delete those of their owners."""
        for machine in self._list(MACHINES):
            self._sync_machine(machine)
        for deployment in self._list(MACHINEDEPLOYMENTS):
            if not deployment["metadata"].get("deletionTimestamp"):
                self._sync_deployment(deployment)
        for machine_set in self._list(MACHINESETS):
            meta = machine_set["metadata"]
            if not meta.get("deletionTimestamp") and not meta.get("ownerReferences"):
                self._scale_set(machine_set)

    def _sync_machine(self, machine: Json) -> None:
        meta, status = machine["metadata"], machine.get("status", {})
        name = meta["name"]
        if meta.get("deletionTimestamp"):
            if status.get("phase") != "Deleting":
                self._patch_status(MACHINES, name, {"phase": "Deleting"})
            if self._provider.remove_machine(name):
                self._patch(MACHINES, name, {"metadata": {"finalizers": None}})
        elif not status.get("nodeRef") and self._provider.has_joined(name):
            self._patch_status(MACHINES, name, {"phase": "Running", "nodeRef": {"name": name}})

    def _scale_set(self, machine_set: Json) -> None:
        """Give a MachineSet without a MachineDeployment its number of Machines."""
        machines = self._list_members(machine_set)
        wanted = machine_set["spec"]["replicas"]
        for _ in range(wanted - len(machines)):
            self._create_machine(machine_set)
        for machine in machines[wanted:]:
            self._delete_machine(machine)
        self._report(MACHINESETS, machine_set, self._list_members(machine_set))

    def _sync_deployment(self, deployment: Json) -> None:
        strategy = (
            deployment["spec"].get("strategy")
            or deployment["spec"].get("rollout", {}).get("strategy")
            or {}
        )
        is_on_delete = strategy.get("type") == "OnDelete"
        current = self._find_set(deployment)
        sets = self._list_sets(deployment)
        members = {each["metadata"]["name"]: self._list_members(each) for each in sets}
        new = members[current["metadata"]["name"]]
        old = [one for name, found in members.items() for one in found if one not in new]
        rolling, wanted = strategy.get("rollingUpdate") or {}, deployment["spec"]["replicas"]
        surge = 0 if is_on_delete else int(rolling.get("maxSurge", 1))
        room = wanted + (surge if old else 0) - len(new) - len(old)
        for _ in range(max(min(room, wanted - len(new)), 0)):
            self._create_machine(current)
        for machine in [] if old else new[wanted:]:
            self._delete_machine(machine)
        if not is_on_delete:
            joined = [one for one in (*new, *old) if _has_joined(one)]
            least = wanted - int(rolling.get("maxUnavailable", 0))
            # Those that never joined go first: they are not available.
            old.sort(key=_has_joined)
            waiting = [one for one in old if not _has_joined(one)]
            for machine in old[: len(waiting) + max(len(joined) - least, 0)]:
                self.replaced.append(machine["metadata"]["name"])
                self._delete_machine(machine)
        for machine_set in sets:
            found = self._list_members(machine_set)
            is_old = machine_set["metadata"]["name"] != current["metadata"]["name"]
            note = "true" if is_old and is_on_delete else None
            changes = {
                "metadata": {"annotations": {_NO_CREATION: note}},
                "spec": {"replicas": len(found)},
            }
            name = machine_set["metadata"]["name"]
            has_note = machine_set["metadata"].get("annotations", {}).get(_NO_CREATION) == note
            if machine_set["spec"].get("replicas") != len(found) or not has_note:
                self._patch(MACHINESETS, name, changes)
            self._report(MACHINESETS, machine_set, found)
        every = [one for each in sets for one in self._list_members(each)]
        counted = "upToDateReplicas" if self._version == _V1BETA2 else "updatedReplicas"
        self._report(MACHINEDEPLOYMENTS, deployment, every, **{counted: len(new)})

    def _find_set(self, deployment: Json) -> Json:
        """Return the MachineSet of the present template; create it if it is missing."""
        meta, template = deployment["metadata"], deployment["spec"]["template"]
        spec = template["spec"]
        text = json.dumps([spec.get(name) for name in _ROLLING_FIELDS], sort_keys=True)
        name = f"{meta['name']}-{hashlib.sha256(text.encode()).hexdigest()[:5]}"
        resource = self._serve(MACHINESETS)
        if found := self._client.find(resource, name, namespace=self._namespace):
            return found
        owner = {
            "apiVersion": resource.api_version,
            "kind": "MachineDeployment",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        document: Json = {
            "apiVersion": resource.api_version,
            "kind": "MachineSet",
            "metadata": {
                "name": name,
                "labels": {**meta.get("labels", {}), _DEPLOYMENT_NAME: meta["name"]},
                "annotations": {
                    hosted_key.NODE_POOL: meta["annotations"][hosted_key.NODE_POOL],
                },
                "ownerReferences": [owner],
            },
            "spec": {
                "clusterName": deployment["spec"]["clusterName"],
                "replicas": 0,
                "selector": deployment["spec"]["selector"],
                "template": template,
            },
        }
        return self._client.create(resource, document, namespace=self._namespace)

    def _list_sets(self, deployment: Json) -> list[Json]:
        uid = deployment["metadata"]["uid"]
        return [
            each
            for each in self._list(MACHINESETS)
            if uid in [owner["uid"] for owner in each["metadata"].get("ownerReferences", [])]
        ]

    def _list_members(self, machine_set: Json) -> list[Json]:
        """Return the Machines of a MachineSet that are not being deleted."""
        name = machine_set["metadata"]["name"]
        return [
            each
            for each in self._list(MACHINES)
            if each["metadata"].get("labels", {}).get(_SET_NAME) == name
            and not each["metadata"].get("deletionTimestamp")
        ]

    def _create_machine(self, machine_set: Json) -> None:
        meta, template = machine_set["metadata"], machine_set["spec"]["template"]
        secret = template["spec"]["bootstrap"]["dataSecretName"]
        found: Any = self._client.get(SECRETS, secret, namespace=self._namespace)
        self._number += 1
        resource, pool = self._serve(MACHINES), meta["annotations"][hosted_key.NODE_POOL]
        name = f"{pool.rpartition('/')[2]}-{self._number}"
        owner = {
            "apiVersion": resource.api_version,
            "kind": "MachineSet",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        document: Json = {
            "apiVersion": resource.api_version,
            "kind": "Machine",
            "metadata": {
                "name": name,
                "labels": {
                    **template["metadata"].get("labels", {}),
                    _SET_NAME: meta["name"],
                },
                "annotations": template["metadata"].get("annotations", {}),
                "ownerReferences": [owner],
                "finalizers": [_FINALIZER],
            },
            "spec": template["spec"],
        }
        self._client.create(resource, document, namespace=self._namespace)
        self._provider.create_machine(name, base64.b64decode(found["data"]["value"]))

    def _delete_machine(self, machine: Json) -> None:
        meta = machine["metadata"]
        self._client.delete(
            self._serve(MACHINES), meta["name"], namespace=self._namespace, uid=meta["uid"]
        )

    def _report(self, kind: Resource, owner: Json, machines: list[Json], **more: int) -> None:
        joined = sum(map(_has_joined, machines))
        status = {
            "replicas": len(machines),
            "readyReplicas": joined,
            "availableReplicas": joined,
            "observedGeneration": owner["metadata"]["generation"],
            **more,
        }
        if owner.get("status") != status:
            self._patch_status(kind, owner["metadata"]["name"], status)

    def _patch_status(self, kind: Resource, name: str, status: Json) -> None:
        self._patch(kind, name, {"status": status}, "status")

    def _patch(self, kind: Resource, name: str, body: Json, subresource: str = "") -> Json:
        return self._client.patch(
            self._serve(kind), name, body, namespace=self._namespace, subresource=subresource
        )

    def _list(self, kind: Resource) -> list[Json]:
        found: Any = self._client.list(self._serve(kind), namespace=self._namespace).items
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def _serve(self, kind: Resource) -> Resource:
        return replace(kind, version=self._version)


_ROLLING_FIELDS = ("bootstrap", "version", "infrastructureRef")
"""Fields of a template of which another value replaces Machines."""


def _has_joined(machine: Json) -> bool:
    return bool(machine.get("status", {}).get("nodeRef"))
