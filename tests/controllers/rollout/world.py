"""A cluster in memory and virtual time: versions, conditional writes, lagging watches, agents.

It behaves as a real server: a write over another version fails, status and spec are written
separately, and a watch delivers every change of an object in order, but late.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clocks import format_rfc3339, parse_rfc3339
from treenail.controllers.pools.node_facts import STARTED_AT, NodeFacts, RolloutTarget
from treenail.controllers.pools.node_selection import is_etcd_member
from treenail.controllers.pools.os_image import NO_BUILD, PoolBuild, find_pool_build
from treenail.controllers.pools.pool_index import PoolIndex
from treenail.controllers.pools.pool_membership import ObservedPool, PoolSnapshot
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.controllers.rollout.reconcile import (
    RolloutCaches,
    RolloutReconciler,
    RolloutSettings,
)
from treenail.errors import ConflictError, NotFoundError, UnreachableError
from treenail.kube.api_client import PatchType
from treenail.kube.event_recorder import ObjectReference
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    ROLLOUTPOLICIES,
    Resource,
)

Json = dict[str, Any]

REACTION_S = 1.0
"""Time until an agent reacts to a new target."""
ROLE = "node-role.kubernetes.io/worker"


class Killed(BaseException):
    """The controller process ended here."""


class World:
    """Objects, their watches, the agents and the clock."""

    def __init__(self, *, takes_s: float = 480.0) -> None:
        self.objects: dict[str, dict[str, Json]] = {}
        self.delivered: dict[str, dict[str, Json]] = {}
        self.backlog: dict[str, list[tuple[str, Json | None]]] = {}
        self.takes_s = takes_s
        self.bad: set[RolloutTarget] = set()
        self.not_there: set[str | None] = set()
        self.stays_cordoned = True
        self.seconds = 1_000_000_000.0
        self.writes: list[tuple[str, str, Json]] = []
        self.next_fault = ""
        self.fault_on = ""
        self.stale_reason = ""
        self.on_write: Callable[[str, str, Json], None] = lambda *_: None
        self.warnings: list[tuple[str, str, str]] = []
        self.notices: list[tuple[str, str, str]] = []
        self.reconciler = build_reconciler(self)
        self._version = 0
        self._facts: dict[tuple[str, str], NodeFacts] = {}

    # Clock.

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    # The controller.

    def start(self, gates: Any = None, **settings: Any) -> "World":
        """Start a controller process, which has no memory of the last one."""
        self.reconciler = build_reconciler(self, gates=gates, settings=RolloutSettings(**settings))
        return self

    def turn(self, after_s: float = 0.0, *pools: str, times: int = 1) -> float | None:
        """Pass time, deliver all events, and sync the pools; return the delay of the last sync."""
        delay = None
        for _ in range(times):
            self.pass_time(after_s)
            self.deliver()
            for pool in pools or ("worker",):
                delay = self.reconciler.sync_pool(pool)
        return delay

    # Caches of the controller.

    def list_pools(self) -> Mapping[str, ObservedPool]:
        found = self.delivered.get("machineconfigpools", {})
        return {name: ObservedPool.from_json(document) for name, document in found.items()}

    def list_nodes(self) -> Mapping[str, NodeFacts]:
        return {name: self.facts(found) for name, found in self.delivered.get("nodes", {}).items()}

    def list_policies(self) -> Mapping[str, ObservedPolicy]:
        found = self.delivered.get(ROLLOUTPOLICIES.plural, {})
        return {name: ObservedPolicy.from_json(document) for name, document in found.items()}

    def find_build(self, pool: MachineConfigPool) -> PoolBuild:
        configs = self.delivered.get(MACHINEOSCONFIGS.plural, {}).values()
        builds = self.delivered.get(MACHINEOSBUILDS.plural, {}).values()
        return find_pool_build(
            pool, map(MachineOSConfig.from_json, configs), map(MachineOSBuild.from_json, builds)
        )

    def deliver(self, plural: str = "", count: int | None = None) -> None:
        """Deliver pending watch events, all of them or the first ``count``."""
        for each in [plural] if plural else list(self.backlog):
            waiting = self.backlog.get(each, [])
            taken = waiting[:count]
            self.backlog[each] = waiting[len(taken) :]
            for name, document in taken:
                # As in an informer, what changed last comes last.
                known = self.delivered.setdefault(each, {})
                known.pop(name, None)
                if document is not None:
                    known[name] = document

    # Writes of the controller.

    def get(self, resource: Resource, name: str) -> Json:
        return copy.deepcopy(self._object(resource.plural, name))

    def patch(
        self,
        resource: Resource,
        name: str,
        body: Json,
        patch_type: PatchType = PatchType.MERGE,
        *,
        subresource: str = "",
    ) -> Json:
        fault = ""
        if self.fault_on in ("", resource.plural):
            fault, self.next_fault = self.next_fault, ""
        if fault == "kill before":
            raise Killed
        if fault == "unreachable":
            raise UnreachableError("no answer")
        if resource.plural not in ("nodes", "machineconfigpools", "rolloutpolicies"):
            raise NotFoundError(f"{resource.plural}: no such kind")
        assert patch_type is PatchType.MERGE
        found = self._object(resource.plural, name)
        version = body["metadata"].get("resourceVersion")
        if version is not None and version != found["metadata"]["resourceVersion"]:
            raise ConflictError(f"{name} changed")
        if fault == "conflict":
            self.touch(resource.plural, name)
            raise ConflictError(f"{name} changed")
        if fault == "false conflict":
            raise ConflictError(f"an admission webhook refused {name}")
        self.on_write(resource.plural, name, body)
        part = {"status": body["status"]} if subresource else {**body, "status": {}}
        answer = self._store(resource.plural, name, merged(found, part))
        self.writes.append((resource.plural, name, body))
        if fault == "lost":
            raise UnreachableError("the response got lost")
        if fault == "kill after":
            raise Killed
        return copy.deepcopy(answer)

    def record_warning(self, regarding: ObjectReference, reason: str, message: str) -> None:
        self.warnings.append((regarding.name, reason, message))

    def record_normal(self, regarding: ObjectReference, reason: str, message: str) -> None:
        self.notices.append((regarding.name, reason, message))

    # Other clients.

    def put(self, resource: Resource, document: Json) -> None:
        """Create or replace an object."""
        name = document["metadata"]["name"]
        before = self.objects.get(resource.plural, {}).get(name)
        generation = 1 if before is None else before["metadata"]["generation"] + 1
        document["metadata"]["generation"] = generation
        self._store(resource.plural, name, copy.deepcopy(document))

    def change(self, plural: str, name: str, body: Json) -> None:
        """Merge something into an object."""
        self._store(plural, name, merged(self._object(plural, name), body))

    def touch(self, plural: str, name: str) -> None:
        """A heartbeat: another version without a change."""
        self.change(plural, name, {})

    def remove(self, plural: str, name: str) -> None:
        del self.objects[plural][name]
        self.backlog.setdefault(plural, []).append((name, None))

    def add_config(self, name: str) -> None:
        self.put(MACHINECONFIGS, {"metadata": {"name": name}})

    def add_node(self, name: str, config: str, *, labels: dict[str, str] | None = None) -> None:
        """A node that has the config and is in service."""
        notes = {key.CURRENT_CONFIG: config, key.DESIRED_CONFIG: config, key.STATE: "Done"}
        self.put(
            NODES,
            {
                "metadata": {
                    "name": name,
                    "uid": f"uid-{name}",
                    "labels": {ROLE: "", **(labels or {})},
                    "annotations": notes,
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                },
                "spec": {},
                "status": {"conditions": [ready(healthy=True, at=self.seconds)]},
            },
        )

    def set_pool(self, name: str, config: str, policy: str | None = None, **spec: Any) -> None:
        """Create or change the pool, and the policy of the same name, in YAML."""
        before = self.objects.get("machineconfigpools", {}).get(name, {"metadata": {}})
        notes = {**before["metadata"].get("annotations", {}), **spec.pop("annotations", {})}
        notes = {note: text for note, text in notes.items() if text is not None}
        if policy is not None:
            self.set_policy(name, yaml.safe_load(policy))
            spec = {"rolloutPolicy": name, **spec}
        selector = {"matchLabels": {f"node-role.kubernetes.io/{name}": ""}}
        self.put(
            MACHINECONFIGPOOLS,
            {
                "metadata": {**before["metadata"], "name": name, "annotations": notes},
                "spec": {"configuration": {"name": config}, "nodeSelector": selector, **spec},
                "status": before.get("status", {}),
            },
        )
        if config and config not in self.objects.get("machineconfigs", {}):
            self.add_config(config)

    def set_policy(self, name: str, spec: Json) -> None:
        """Create or change a policy."""
        before = self.objects.get(ROLLOUTPOLICIES.plural, {}).get(name, {})
        if before.get("spec") != spec:
            document = {"metadata": {"name": name}, "spec": spec}
            self.put(ROLLOUTPOLICIES, {**document, "status": before.get("status", {})})

    def flap(self, name: str, *, healthy: bool) -> None:
        conditions = [ready(healthy=healthy, at=self.seconds)]
        self.change("nodes", name, {"status": {"conditions": conditions}})

    def cordon(self, name: str, *, on: bool) -> None:
        """Cordon or uncordon as a user."""
        self.change("nodes", name, {"spec": {"unschedulable": on, "byHand": on}})

    def pass_time(self, seconds: float) -> None:
        """Let every agent continue."""
        self.seconds += seconds
        for name, document in self.objects.get("nodes", {}).items():
            changes = self._agent(self.facts(document), document)
            if changes:
                self.change("nodes", name, changes)

    # Inspection.

    def notes(self, node: str = "n0") -> dict[str, str]:
        """The annotations of a Node."""
        return self.objects["nodes"][node]["metadata"]["annotations"]

    def find_assigned(self, config: str = "new") -> list[str]:
        return [name for name, node in self.truth.items() if node.desired_config == config]

    def node_writes(self) -> list[Json]:
        return [body for plural, _, body in self.writes if plural == "nodes"]

    def facts(self, document: Json) -> NodeFacts:
        meta = document["metadata"]
        at = (meta["name"], meta["resourceVersion"])
        if at not in self._facts:
            self._facts[at] = NodeFacts.from_json(document)
        return self._facts[at]

    @property
    def truth(self) -> dict[str, NodeFacts]:
        return {name: self.facts(found) for name, found in self.objects["nodes"].items()}

    def status(self, pool: str = "worker") -> Json:
        return self.objects["machineconfigpools"][pool].get("status", {})

    def conditions(self, pool: str = "worker") -> dict[str, Json]:
        """The pool's conditions by type."""
        return {found["type"]: found for found in self.status(pool).get("conditions", ())}

    def _object(self, plural: str, name: str) -> Json:
        try:
            return self.objects[plural][name]
        except KeyError:
            raise NotFoundError(f"{plural} {name}: not found") from None

    def _store(self, plural: str, name: str, document: Json) -> Json:
        self._version += 1
        # Caches still hold older versions, so they must not change.
        metadata = {**document["metadata"], "resourceVersion": str(self._version)}
        document = {**document, "metadata": metadata}
        self.objects.setdefault(plural, {})[name] = document
        self.backlog.setdefault(plural, []).append((name, document))
        return document

    def _prestage(self, node: NodeFacts) -> Json:
        """The next prestage report of an idle agent; empty without one."""
        request = node.prestage_target
        if not node.is_done or not node.is_healthy:
            return {}
        if request is None:
            has_report = node.prestaged_image or node.prestage_error
            return _report_prestage(None, None) if has_report else {}
        if request.image in self.not_there:
            return (
                {}
                if node.prestage_error
                else _report_prestage(None, f"{request.image}: manifest unknown")
            )
        return (
            {} if node.prestaged_image == request.image else _report_prestage(request.image, None)
        )

    def _agent(self, node: NodeFacts, document: Json) -> Json:
        """The next write of the agent."""
        if prestage := self._prestage(node):
            return prestage
        by_hand = bool(document["spec"].get("byHand"))
        started_at = parse_rfc3339(document["metadata"]["annotations"].get(STARTED_AT))
        if started_at is None or node.is_done:
            return {"spec": {"unschedulable": False}} if _left_cordoned(node, by_hand) else {}
        since_s = self.seconds - started_at
        target = RolloutTarget(node.desired_config, node.desired_image)
        if since_s < REACTION_S or not node.is_healthy:
            return {}
        if since_s < self.takes_s:
            if node.state == "Working":
                return {}
            return report(node, "Working", unschedulable=True)
        if target in self.bad:
            if node.is_degraded:
                return {}
            stays = self.stays_cordoned or by_hand
            return report(node, "Degraded", "it does not boot", unschedulable=stays)
        changes = report(node, "Done", unschedulable=by_hand)
        current = {key.CURRENT_CONFIG: target.config, key.CURRENT_OS_IMAGE: target.image}
        changes["metadata"]["annotations"].update(current)
        changes["status"] = {"conditions": [ready(healthy=True, at=self.seconds)]}
        return changes


def _report_prestage(staged: str | None, error: str | None) -> Json:
    return {"metadata": {"annotations": {key.PRESTAGED: staged, key.PRESTAGE_ERROR: error}}}


def _left_cordoned(node: NodeFacts, by_hand: bool) -> bool:
    return node.unschedulable and not by_hand


def report(node: NodeFacts, state: str, reason: str = "", *, unschedulable: bool) -> Json:
    return {
        "metadata": {"annotations": {key.STATE: state, key.REASON: reason}},
        "spec": {"unschedulable": unschedulable},
    }


def ready(*, healthy: bool, at: float) -> Json:
    status = "True" if healthy else "Unknown"
    return {"type": "Ready", "status": status, "lastTransitionTime": format_rfc3339(at)}


def merged(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    found = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


def world(nodes: int = 3, policy: str | None = None, *, config: str = "new", **spec: Any) -> World:
    """Nodes with the config old, a pool, and a controller."""
    found = World()
    for number in range(nodes):
        found.add_node(f"n{number}", "old")
    found.set_pool("worker", config, policy, **spec)
    found.deliver()
    return found


def count_taken(nodes: Mapping[str, NodeFacts]) -> int:
    """Count nodes that the rollout took out of service and that are not back."""
    return sum(
        node.desired_config != ""
        and not node.is_done
        and not (node.is_failing and node.is_in_service)
        for node in nodes.values()
    )  # fmt: skip


class OpenGates:
    """Gates that are always open."""

    def check_alerts(self, alerts: object) -> None:
        return None

    def acquire_lock(self, server: object, holder: object) -> None:
        return None

    def release_lock(self, server: object, holder: object) -> None:
        return None


def build_reconciler(
    world: Any,
    *,
    caches: Any = None,
    gates: Any = None,
    settings: RolloutSettings | None = None,
    reconciler: type[RolloutReconciler] = RolloutReconciler,
    **options: Any,
) -> RolloutReconciler:
    """A reconciler with the world as API server, caches, clock and Event recorder."""
    observed = caches or world

    def read_pool(name: str) -> PoolSnapshot | None:
        pools, nodes = observed.list_pools(), observed.list_nodes()
        index = PoolIndex(pools.get, nodes.get)
        for each, pool in pools.items():
            index.set_pool(each, pool)
        for each, node in nodes.items():
            index.set_node(each, node.labels)
        return index.read_pool(name)

    if caches is not None and hasattr(caches, "read_pool"):
        read_pool = caches.read_pool
    return reconciler(
        world,
        RolloutCaches(
            read_pool,
            lambda: str(getattr(observed, "stale_reason", "")),
            lambda name: observed.list_nodes().get(name),
            observed.list_policies,
            getattr(observed, "find_build", lambda _pool: NO_BUILD),
            lambda: [
                node for node in observed.list_nodes().values() if is_etcd_member(node.labels)
            ],
            lambda: len(observed.list_nodes()) == 1,
        ),
        world,
        gates or OpenGates(),
        world,
        settings or RolloutSettings(),
        **options,
    )
