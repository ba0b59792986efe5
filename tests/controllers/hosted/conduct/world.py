"""A management cluster and a hosted cluster in memory, with HyperShift and Cluster API as actors.

The API servers behave as real ones where the conductor depends on it: a write over another version
fails, a deletion names a uid, a Machine with finalizers stays until its provider is done.
"""

import copy
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from tests.controllers.rollout.world import Killed, OpenGates, merged
from tests.fixtures import hosted
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.clocks import format_rfc3339
from treenail.controllers.hosted.conduct.conductor import PoolConductor
from treenail.controllers.hosted.conduct.guests import GuestCluster
from treenail.controllers.hosted.conduct.own_update import ConductTools
from treenail.controllers.hosted.conduct.pool_facts import MAX_UNAVAILABLE, PoolObjects
from treenail.controllers.hosted.rollout_store import RolloutStore
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.errors import ConflictError, NotFoundError, UnreachableError
from treenail.kube import resources
from treenail.kube.resources import Resource

Json = dict[str, Any]
POOL = "np"
FULL_NAME = f"{hosted.NAMESPACE}/{POOL}"
OLD, NEW = hosted.OLD_HASH, hosted.NEW_HASH
STEP_S = 30.0
NO_CREATION = "cluster.x-k8s.io/disable-machine-create"


class Api:
    """One API server. ``before_write`` and ``after_write`` may end the controller process."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.writes: list[tuple[str, str, str, Json]] = []
        self.before_write: Callable[[], None] = lambda: None
        self.after_write: Callable[[], None] = lambda: None
        self.observe: Callable[[str, str, str, Json], None] = lambda *_: None
        """Sees a write that will succeed, before it changes anything."""
        self._now = now
        self._version = 0

    def put(self, resource: Resource, document: Json) -> Json:
        """Store an object as another client; keep uid, creation time and status."""
        meta = document["metadata"]
        place = (resource.plural, meta["name"])
        self._version += 1
        before = self.objects.get(place, {"metadata": {}})
        kept = {
            "uid": f"uid-{meta['name']}-{self._version}",
            "creationTimestamp": format_rfc3339(self._now()),
            **{name: before["metadata"][name] for name in ("uid", "creationTimestamp")
               if name in before["metadata"]},
        }  # fmt: skip
        meta = {**kept, **meta, "resourceVersion": str(self._version)}
        self.objects[place] = {**document, "metadata": meta}
        return self.objects[place]

    def change(self, plural: str, name: str, body: Json) -> Json:
        """Merge something into an object as another client."""
        self._version += 1
        document = merged(self.objects[plural, name], body)
        meta = {**document["metadata"], "resourceVersion": str(self._version)}
        self.objects[plural, name] = {**document, "metadata": meta}
        return self.objects[plural, name]

    def list(self, plural: str) -> list[Json]:
        return [found for (kind, _), found in sorted(self.objects.items()) if kind == plural]

    # The client of the conductor.

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> Json:
        del namespace
        try:
            return copy.deepcopy(self.objects[resource.plural, name])
        except KeyError:
            raise NotFoundError(f"{resource.plural} {name}: not found") from None

    def find(self, resource: Resource, name: str, *, namespace: str = "") -> Json | None:
        found = self.objects.get((resource.plural, name))
        return copy.deepcopy(found)

    def create(self, resource: Resource, body: Json, *, namespace: str = "") -> Json:
        self.before_write()
        stored = self.put(resource, copy.deepcopy(body))
        return self._answer("create", resource, stored, body)

    def patch(self, resource: Resource, name: str, body: Json, **_: Any) -> Json:
        self.before_write()
        found = self.get(resource, name)
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, found["metadata"]["resourceVersion"]):
            raise ConflictError(f"{name} changed")
        self.observe("patch", resource.plural, name, body)
        return self._answer("patch", resource, self.change(resource.plural, name, body), body)

    def delete(
        self, resource: Resource, name: str, *, uid: str, resource_version: str, **_: Any
    ) -> Json:
        self.before_write()
        meta = self.get(resource, name)["metadata"]
        if (uid, resource_version) != (meta["uid"], meta["resourceVersion"]):
            raise ConflictError(f"{name} changed")
        self.observe("delete", resource.plural, name, {})
        gone = {"metadata": {"deletionTimestamp": format_rfc3339(self._now())}}
        return self._answer("delete", resource, self.change(resource.plural, name, gone), {})

    def _answer(self, verb: str, resource: Resource, stored: Json, body: Json) -> Json:
        self.writes.append((verb, resource.plural, stored["metadata"]["name"], body))
        self.after_write()
        return copy.deepcopy(stored)


class HostedWorld:
    """One NodePool, its policy, and virtual time."""

    def __init__(self, upgrade_type: str = "InPlace", size: int = 3, seed: int = 0) -> None:
        self.seconds = 1_000_000_000.0
        self.random = random.Random(seed)
        self.management, self.guest = self.make_apis()
        self.guest_problem = ""
        self.bad: set[str] = set()
        """Hashes with which a node or machine fails."""
        self.warnings: list[tuple[str, str, str]] = []
        self.upgrade_type = upgrade_type
        self.size = size
        self.has_annotation = True
        """Cluster API annotates MachineSets of older templates."""
        self.payload = OLD
        """The hash in the upgrader's ConfigMap."""
        self.set_pool()
        self.management.put(resources.HOSTEDCLUSTERS, hosted.make_hosted_cluster())
        owner = self._set_owner(OLD, OLD)
        if upgrade_type == "Replace":
            self._run_machine_sets()
            owner = self.management.list("machinesets")[0]
        for number in range(size):
            self.add_machine(owner, f"m{number}", joined=True)
        self.start()

    def make_apis(self) -> tuple[Api, Api]:
        return Api(self.now), Api(self.now)

    # Clock and Event recorder.

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def record_warning(self, regarding: Any, reason: str, message: str) -> None:
        self.warnings.append((f"{regarding.namespace}/{regarding.name}", reason, message))

    # The user.

    def set_pool(self, limit: str = "1", policy: str = "careful", **spec: Any) -> None:
        management: Json = {"inPlace": {"maxUnavailable": -1}}
        if self.upgrade_type == "Replace":
            management = {"replace": {"strategy": "OnDelete"}}
        management = spec.pop("management", management)
        notes = {hosted_key.ROLLOUT_POLICY: policy, MAX_UNAVAILABLE: limit}
        document = hosted.make_node_pool(
            POOL, self.upgrade_type, annotations=notes, management=management,
            **{"replicas": self.size, **spec},
        )  # fmt: skip
        self.management.put(resources.NODEPOOLS, document)

    def set_policy(self, name: str = "careful", **spec: Any) -> None:
        document = {"metadata": {"name": name}, "spec": spec, "status": {}}
        self.management.put(resources.ROLLOUTPOLICIES, document)

    def set_target(self, target: str) -> None:
        """Change the NodePool's config, as HyperShift passes it on."""
        self._set_owner(target, None)

    def _set_owner(self, target: str, current: str | None) -> Json:
        if self.upgrade_type == "InPlace":
            document = hosted.make_machine_set(POOL, target, current or OLD, "-1")
            found = self.management.objects.get(("machinesets", POOL))
            if found is not None:
                notes = {hosted_key.TARGET_CONFIG_VERSION: target}
                return self.management.change(
                    "machinesets", POOL, {"metadata": {"annotations": notes}}
                )
            return self.management.put(resources.MACHINESETS, document)
        document = hosted.make_machine_deployment(POOL, target, "OnDelete", generation=1)
        document["spec"]["replicas"] = self.size
        found = self.management.objects.get(("machinedeployments", POOL))
        if found is not None:
            generation = found["metadata"]["generation"] + 1
            document["metadata"]["generation"] = generation
            document["status"] = found["status"]
        return self.management.put(resources.MACHINEDEPLOYMENTS, document)

    # The controller process.

    def start(self) -> None:
        """Start a process without memory of the last one."""
        client = cast("Any", self.management)
        tools = ConductTools(
            client, self, OpenGates(), cast("Any", self), RolloutStore(client),
            self.list_policies, lambda: "",
        )  # fmt: skip
        self.conductor = PoolConductor(tools, self.find_objects())

    def list_policies(self) -> Mapping[str, ObservedPolicy]:
        found = self.management.list("rolloutpolicies")
        return {each["metadata"]["name"]: ObservedPolicy.from_json(each) for each in found}

    def find_objects(self) -> PoolObjects:
        def read(plural: str, read_one: Callable[[Json], Any]) -> list[Any]:
            return [read_one(found) for found in self.management.list(plural)]

        pool = read("nodepools", nodepool.NodePool.from_json)[0]
        cluster = read("hostedclusters", nodepool.HostedCluster.from_json)[0]
        sets = tuple(read("machinesets", clusterapi.MachineSet.from_json))
        machines = tuple(read("machines", clusterapi.ClusterMachine.from_json))
        if pool.is_in_place:
            return PoolObjects(pool, cluster, sets[0], machines=machines)
        deployment = read("machinedeployments", clusterapi.MachineDeployment.from_json)[0]
        return PoolObjects(pool, cluster, deployment, sets, machines)

    def sync(self) -> float | None:
        """Let the controller decide and write once."""
        objects = self.find_objects()
        guest = None
        if objects.needs_guest:
            nodes = {
                each["metadata"]["name"]: NodeFacts.from_json(each)
                for each in self.guest.list("nodes")
            }
            guest = SimpleNamespace(
                client=self.guest, stale_reason=self.guest_problem, get_nodes=lambda: nodes
            )
        return self.conductor.sync(objects, cast("GuestCluster | None", guest))

    def turn(self, times: int = 1, after_s: float = STEP_S) -> None:
        """Pass time, let the others act, and sync."""
        for _ in range(times):
            self.seconds += after_s
            self.act()
            try:
                self.sync()
            except Killed:
                self.start()
            except (ConflictError, UnreachableError):
                pass

    def clear_states(self) -> None:
        """The command that ``status --hosted`` prints for a degraded node."""
        for node in self.nodes().values():
            if node.state == "Degraded":
                self._annotate(node.name, {key.STATE: None})

    # HyperShift, Cluster API and the machines.

    def act(self) -> None:
        if self.upgrade_type == "InPlace":
            self._run_upgrader()
            self._run_daemons()
        else:
            self._run_machine_sets()
            self._run_provider()

    def _run_upgrader(self) -> None:
        """HyperShift's in-place upgrader: it selects nodes only with a positive limit."""
        owner = self.management.objects["machinesets", POOL]
        notes = owner["metadata"]["annotations"]
        target, current = (
            notes[name] for name in (hosted_key.TARGET_CONFIG_VERSION,
                                     hosted_key.CURRENT_CONFIG_VERSION)
        )  # fmt: skip
        if target == current:
            return
        nodes = self.nodes()
        if all((node.current_config, node.state) == (target, "Done") and not node.unschedulable
               for node in nodes.values()):  # fmt: skip
            done = {hosted_key.CURRENT_CONFIG_VERSION: target}
            self.management.change("machinesets", POOL, {"metadata": {"annotations": done}})
            return
        if any(node.state == "Degraded" for node in nodes.values()):
            return
        limit = int(notes[hosted_key.MAX_UNAVAILABLE])
        updating = [node for node in nodes.values() if node.current_config != node.desired_config]
        idle = [
            node for node in nodes.values()
            if node.current_config == node.desired_config != target
        ]  # fmt: skip
        chosen = idle[: max(limit - len(updating), 0)]
        chosen += [node for node in updating if node.desired_config != target]
        for node in chosen:
            self._annotate(node.name, {key.DESIRED_CONFIG: target})
        self.payload = target

    def _run_daemons(self) -> None:
        """The daemons of the upgrader's pods; each takes a few turns."""
        for node in self.nodes().values():
            if node.current_config == node.desired_config or node.desired_config != self.payload:
                continue
            if node.desired_config in self.bad:
                if node.state != "Degraded" and self.random.random() < 0.7:
                    self._annotate(node.name, {key.STATE: "Degraded", key.REASON: "bad file"})
            elif node.state != "Working":
                self._annotate(node.name, {key.STATE: "Working"}, unschedulable=True)
            elif self.random.random() < 0.7:
                done = {key.STATE: "Done", key.CURRENT_CONFIG: node.desired_config}
                self._annotate(node.name, done, unschedulable=False)

    def _annotate(self, name: str, notes: Json, **spec: Any) -> None:
        self.guest.change("nodes", name, {"metadata": {"annotations": notes}, "spec": spec})

    def _run_machine_sets(self) -> None:
        """Cluster API's MachineDeployment controller with the strategy OnDelete."""
        deployment = self.management.objects["machinedeployments", POOL]
        template = deployment["spec"]["template"]
        name = f"{POOL}-{template['spec']['bootstrap']['dataSecretName'].rpartition('-')[2]}"
        if ("machinesets", name) not in self.management.objects:
            owner = {
                "apiVersion": deployment["apiVersion"], "kind": "MachineDeployment", "name": POOL,
                "uid": deployment["metadata"]["uid"], "controller": True,
            }  # fmt: skip
            made = hosted.make_machine_set(POOL)
            made["metadata"] |= {"name": name, "ownerReferences": [owner]}
            made["spec"] |= {"template": template, "replicas": self.size}
            self.management.put(resources.MACHINESETS, made)
        observed = {"observedGeneration": deployment["metadata"]["generation"]}
        self.management.change("machinedeployments", POOL, {"status": observed})
        staying = [
            each for each in self.management.list("machines")
            if "deletionTimestamp" not in each["metadata"]
        ]  # fmt: skip
        newest = self.management.objects["machinesets", name]
        for each in self.management.list("machinesets"):
            older = each["metadata"]["name"]
            notes = each["metadata"].get("annotations", {})
            if older != name and self.has_annotation and NO_CREATION not in notes:
                note = {"metadata": {"annotations": {NO_CREATION: "true"}}}
                self.management.change("machinesets", older, note)
            elif older == name and NO_CREATION in notes:
                note = {"metadata": {"annotations": {NO_CREATION: None}}}
                self.management.change("machinesets", older, note)
        if self.management.list("machines"):
            for number in range(deployment["spec"]["replicas"] - len(staying)):
                self._count = getattr(self, "_count", 0) + 1
                self.add_machine(newest, f"{name}-{self._count}-{number}", joined=False)

    def _run_provider(self) -> None:
        for machine in self.management.list("machines"):
            name = machine["metadata"]["name"]
            secret = machine["spec"]["bootstrap"]["dataSecretName"].rpartition("-")[2]
            if self.random.random() < 0.3:
                continue
            if "deletionTimestamp" in machine["metadata"]:
                del self.management.objects["machines", name]
            elif "nodeRef" not in machine["status"] and secret not in self.bad:
                self._join(name)

    def _join(self, name: str) -> None:
        self.set_health(name, healthy=True)
        joined = {"phase": "Running", "nodeRef": {"name": name}}
        self.management.change("machines", name, {"status": joined})

    def set_health(self, name: str, *, healthy: bool) -> None:
        """Report the health of a Machine's Node, as Cluster API does."""
        condition = hosted.make_condition("NodeHealthy", str(healthy))
        condition["lastTransitionTime"] = format_rfc3339(self.seconds)
        self.management.change("machines", name, {"status": {"conditions": [condition]}})

    def add_machine(self, owner: Json, name: str, *, joined: bool) -> None:
        target = owner["spec"]["template"]["spec"]["bootstrap"]["dataSecretName"]
        reference = {
            "apiVersion": owner["apiVersion"], "kind": "MachineSet", "controller": True,
            "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
        }  # fmt: skip
        machine = hosted.make_machine(
            name, POOL, target.rpartition("-")[2], node="", ownerReferences=[reference]
        )
        self.management.put(resources.MACHINES, machine)
        if not joined:
            return
        self._join(name)
        if self.upgrade_type == "InPlace":
            self.add_node(name)

    def add_node(self, name: str, config: str = OLD) -> None:
        notes = {key.CURRENT_CONFIG: config, key.DESIRED_CONFIG: config, key.STATE: "Done"}
        document = {
            "metadata": {"name": name, "labels": {}, "annotations": notes},
            "spec": {},
            "status": {"conditions": [hosted.make_condition("Ready", "True")]},
        }
        self.guest.put(resources.NODES, document)

    # Inspection.

    def nodes(self) -> dict[str, NodeFacts]:
        return {
            each["metadata"]["name"]: NodeFacts.from_json(each) for each in self.guest.list("nodes")
        }

    def list_acted_on(self) -> list[str]:
        """Names of the nodes or Machines that treenail wrote or deleted, in order."""
        if self.upgrade_type == "InPlace":
            return [name for _, plural, name, _ in self.guest.writes if plural == "nodes"]
        return [name for verb, _, name, _ in self.management.writes if verb == "delete"]

    def is_finished(self, target: str = NEW) -> bool:
        """Whether every node or Machine has the target and serves."""
        if self.upgrade_type == "InPlace":
            notes = self.management.objects["machinesets", POOL]["metadata"]["annotations"]
            return bool(notes[hosted_key.CURRENT_CONFIG_VERSION] == target)
        machines = self.management.list("machines")
        return len(machines) == self.size and all(
            each["spec"]["bootstrap"]["dataSecretName"].endswith(target)
            and "nodeRef" in each["status"]
            for each in machines
        )

    def record(self) -> Json:
        """The record of the pool, as it is in its ConfigMap."""
        client = cast("Any", self.management)
        return RolloutStore(client).read(hosted.CONTROL_PLANE, POOL)

    def conditions(self) -> dict[str, Json]:
        return {each["type"]: each for each in self.record().get("conditions", ())}
