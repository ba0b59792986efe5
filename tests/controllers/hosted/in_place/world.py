"""A pool that treenail owns, in memory: agents, a drainer and Cluster API are actors.

Everything that treenail writes is checked by `Watcher` against the state before the write.
"""

import copy
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from tests.controllers.hosted.conduct.world import FULL_NAME, OLD, POOL, Api, HostedWorld
from tests.controllers.rollout.world import Killed, OpenGates
from tests.fixtures import hosted
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import node_mode
from treenail.controllers.drain import decide
from treenail.controllers.hosted.conduct import conductor, guests, own_update, pool_facts
from treenail.controllers.hosted.in_place.upgrade_objects import HostedNode
from treenail.controllers.hosted.rollout_store import RolloutStore
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.errors import AlreadyExistsError, ConflictError, NotFoundError
from treenail.kube import resources
from treenail.kube.resources import Resource

Json = dict[str, Any]
NAMESPACE = node_mode.name_upgrade_namespace(POOL)
CONFIG_MAP = f"{POOL}-upgrade"
IMAGE = "quay.io/example/agent:1"
OWN_KINDS = ("namespaces", "roles", "rolebindings", "configmaps", "pods")
HASHES = tuple(f"{number}{number}" * 8 for number in range(1, 6))


class GuestApi(Api):
    """The hosted cluster: deleted objects are gone at once."""

    def list(self, plural: Any, *, namespace: str = "") -> Any:
        if isinstance(plural, Resource):
            return SimpleNamespace(items=tuple(copy.deepcopy(super().list(plural.plural))))
        return super().list(plural)

    def create(self, resource: Resource, body: Json, *, namespace: str = "") -> Json:
        if (resource.plural, body["metadata"]["name"]) in self.objects:
            raise AlreadyExistsError("exists")
        if resource.plural != "namespaces" and ("namespaces", namespace) not in self.objects:
            raise NotFoundError(f"namespace {namespace}")
        self.observe("create", resource.plural, body["metadata"]["name"], body)
        return super().create(resource, body, namespace=namespace)

    def update(self, resource: Resource, name: str, body: Json, *, namespace: str = "") -> Json:
        self.before_write()
        found = self.get(resource, name)
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            raise ConflictError(f"{name} changed")
        assert body.get("roleRef") == found.get("roleRef"), "the API server refuses it"
        return self._answer("update", resource, self.put(resource, copy.deepcopy(body)), body)

    def delete(self, resource: Resource, name: str, *, uid: str = "", **_: Any) -> Json:
        self.before_write()
        found = self.get(resource, name)
        assert uid in ("", found["metadata"]["uid"])
        del self.objects[resource.plural, name]
        return self._answer("delete", resource, found, {})


class OwnWorld(HostedWorld):
    """An InPlace pool of treenail; ``services`` are nodes whose image has the agent."""

    def __init__(self, size: int = 3, seed: int = 0, upgrade_type: str = "InPlace") -> None:
        self.services: set[str] | None = None
        self.limit: Any = None
        self.policy = ""
        self.image = IMAGE
        self.timeline: list[tuple[str, str]] = []
        self.is_stuck: set[str] = set()
        self.drain_keys = decide.USUAL_KEYS
        super().__init__(upgrade_type, size, seed)
        self.set_limit(None)
        if upgrade_type == "Replace":
            for machine in self.management.list("machines"):
                self.add_node(machine["metadata"]["name"])
        notes = {hosted_key.TARGET_CONFIG: OLD, hosted_key.UPDATED_CONFIG: OLD}
        self.annotate_owner(notes)
        self.management.change(self.owner_kind, POOL, {"spec": {"replicas": size}})
        # The nodes joined a while ago.
        self.seconds += 120.0

    def make_apis(self) -> tuple[Api, Api]:
        return Api(self.now), GuestApi(self.now)

    # The user, and the controller nodepools.

    def set_limit(self, limit: Any, policy: str = "", **annotations: str) -> None:
        management: Json = {} if limit is None else {"inPlace": {"maxUnavailable": limit}}
        notes = {hosted_key.ROLLOUT_POLICY: policy} if policy else {}
        document = hosted.make_node_pool(
            POOL, self.upgrade_type, annotations={**notes, **annotations}, management=management,
            replicas=self.size,
        )  # fmt: skip
        self.management.put(resources.NODEPOOLS, document)

    @property
    def owner_kind(self) -> str:
        return "machinesets" if self.upgrade_type == "InPlace" else "machinedeployments"

    def annotate_owner(self, notes: Json) -> None:
        self.management.change(self.owner_kind, POOL, {"metadata": {"annotations": notes}})

    def owner_notes(self) -> dict[str, str]:
        return dict(self.management.objects[self.owner_kind, POOL]["metadata"]["annotations"])

    def set_config(self, target: str, *, rolls: bool = True, payload: str | None = None) -> None:
        """Write another config, as the controller nodepools does."""
        text = f"payload-of-{target}" if payload is None else payload
        self.management.put(resources.SECRETS, {
            "metadata": {"name": f"token-{POOL}-{target}", "annotations": {
                hosted_key.NODE_POOL: FULL_NAME}},
            "data": {"payload": b64encode(text.encode()).decode()} if text else {},
        })  # fmt: skip
        if rolls:
            secret = {"bootstrap": {"dataSecretName": f"user-data-{POOL}-{target}"}}
            body = {"spec": {"template": {"spec": secret}}}
            self.management.change(self.owner_kind, POOL, body)
        self.annotate_owner({hosted_key.TARGET_CONFIG: target})

    # The controller.

    def start(self) -> None:
        client = cast("Any", self.management)
        tools = own_update.ConductTools(
            client, self, OpenGates(), cast("Any", self), RolloutStore(client),
            self.list_policies, lambda: "", agent_image=self.image,
        )  # fmt: skip
        self.conductor = conductor.PoolConductor(tools, self.find_objects())

    def find_objects(self) -> pool_facts.PoolObjects:
        return replace(super().find_objects(), is_owned=True)

    def sync(self) -> float | None:
        objects = self.find_objects()
        guest = None
        if not (objects.writes_nodes or objects.pool.rollout_policy):
            return None  # as the controller
        if objects.needs_guest:
            documents = [copy.deepcopy(each) for each in self.guest.list("nodes")]
            nodes = {each["metadata"]["name"]: NodeFacts.from_json(each) for each in documents}
            states = {each["metadata"]["name"]: HostedNode.from_json(each) for each in documents}
            guest = SimpleNamespace(
                client=self.guest, stale_reason=self.guest_problem, get_nodes=lambda: nodes,
                get_states=lambda: states, read_state=HostedNode.from_json,
            )  # fmt: skip
        return self.conductor.sync(objects, cast("guests.GuestCluster | None", guest))

    # Agents, kubelets and the drainer.

    def act(self) -> None:
        if self.upgrade_type == "Replace":
            return
        self.act_as_agents()

    def act_as_agents(self) -> None:
        for node in self.nodes().values():
            if self.random.random() < 0.8:
                self._run_drainer(node.name)
            if self.random.random() < 0.8 and self.can_act(node.name):
                self._run_agent(node)

    def notes(self, name: str) -> dict[str, str]:
        return dict(self.guest.objects["nodes", name]["metadata"]["annotations"])

    def can_act(self, name: str) -> bool:
        has_service = self.services is None or name in self.services
        return has_service or ("pods", f"treenail-installer-{name}") in self.guest.objects

    def _run_drainer(self, name: str) -> None:
        notes = self.notes(name)
        wanted = notes.get(key.DESIRED_DRAIN, "")
        if wanted != notes.get(key.LAST_APPLIED_DRAIN, ""):
            is_drain = wanted.startswith("drain-")
            self._annotate(name, {key.LAST_APPLIED_DRAIN: wanted}, unschedulable=is_drain or None)

    def _run_agent(self, node: NodeFacts) -> None:
        config_map = self.guest.objects.get(("configmaps", CONFIG_MAP))
        notes = self.notes(node.name)
        target = node.desired_config
        if config_map is None or target in ("", node.current_config) or node.name in self.is_stuck:
            return
        data = config_map["data"]
        if data["hash"] != target or data["config"] != f"payload-of-{target}":
            return
        is_refresh = data.get("mode") == "refresh"
        drain = f"drain-{target}"
        if target in self.bad:
            self._annotate(node.name, {key.STATE: "Degraded", key.REASON: "bad file"})
        elif not is_refresh and notes.get(self.drain_keys.request) != drain:
            self._annotate(node.name, {key.STATE: "Working", self.drain_keys.request: drain})
        elif is_refresh or notes.get(self.drain_keys.applied) == drain:
            self.timeline.append((node.name, target))
            done = {key.STATE: "Done", key.REASON: "", key.CURRENT_CONFIG: target}
            uncordon = {} if is_refresh else {self.drain_keys.request: f"uncordon-{target}"}
            self._annotate(node.name, {**done, **uncordon})

    def add_node(self, name: str, config: str = OLD) -> None:
        super().add_node(name, config)
        if self.services is None or name in self.services:
            self.set_service(name, "boot-1")

    def set_service(self, name: str, boot: str | None) -> None:
        self.guest.change("nodes", name, {"status": {"nodeInfo": {"bootID": "boot-1"}}})
        self._annotate(name, {hosted_key.SERVICE_BOOT: boot})

    # Inspection.

    def list_left(self) -> list[str]:
        """Return the objects that treenail made in the hosted cluster, and did not delete."""
        return sorted(f"{kind}/{name}" for kind, name in self.guest.objects if kind in OWN_KINDS)

    def is_updated(self, target: str) -> bool:
        return self.owner_notes()[hosted_key.UPDATED_CONFIG] == target

    def list_assigned(self, target: str) -> list[str]:
        """The nodes that treenail gave the target, in order."""
        nodes = [(name, body) for _, kind, name, body in self.guest.writes if kind == "nodes"]
        return [
            name
            for name, body in nodes
            if body["metadata"]["annotations"].get(key.DESIRED_CONFIG) == target
        ]

    def run(self, target: str, turns: int = 80) -> None:
        """Let time pass until the pool has the target; nothing is left then."""
        for _ in range(turns):
            self.turn()
            if self.is_updated(target):
                break
        assert self.is_updated(target), self.conditions()
        assert self.list_left() == []
        assert {node.current_config for node in self.nodes().values()} == {target}


class Watcher:
    """Rules of its own about each write of treenail to a Node."""

    def __init__(self, world: OwnWorld, limit: int, *, can_kill: bool = False) -> None:
        self.world, self.limit, self.kills = world, limit, 0
        self.given: list[tuple[str, str]] = []
        world.guest.observe = self.observe
        if can_kill:
            for api in (world.management, world.guest):
                api.before_write = api.after_write = self.kill

    def kill(self) -> None:
        if self.world.random.random() < 0.05:
            self.kills += 1
            raise Killed

    def observe(self, verb: str, plural: str, name: str, body: Json) -> None:
        if plural != "nodes" or verb != "patch":
            return
        notes = body["metadata"]["annotations"]
        target = notes[key.DESIRED_CONFIG]
        assert key.DESIRED_OS_IMAGE in notes, "config and image in one patch"
        assert (name, target) not in self.given, "each target at most once"
        self.given.append((name, target))
        assert self.world.guest.objects["configmaps", CONFIG_MAP]["data"]["hash"] == target
        assert self.world.owner_notes()[hosted_key.UPDATED_CONFIG] == ""
        down = {
            node.name for node in self.world.nodes().values()
            if node.current_config != node.desired_config or node.unschedulable
        }  # fmt: skip
        assert len(down | {name}) <= max(self.limit, len(down)), (down, name)
