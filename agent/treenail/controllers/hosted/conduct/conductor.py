"""Conducts the rollout of one NodePool with the reconciler of MachineConfigPools.

`PoolConductor` gives it the pool as a value, sends its writes to the NodePool's Machines or to the
Nodes of the hosted cluster, and keeps its status in the `RolloutStore`.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfigpool
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted import rollout_store
from treenail.controllers.hosted.conduct import guests, pool_facts
from treenail.controllers.pools import node_facts, os_image, pool_membership, rollout_policy
from treenail.controllers.rollout import external_gates, reconcile
from treenail.kube import api_client, event_recorder, resources

PAUSE_RECHECK_S = 30.0
"""Delay after which a pause may have ended, which is a time that nothing else reports."""


@dataclass(frozen=True, slots=True)
class ConductTools:
    """Clients and caches of the management cluster that all conductors share."""

    client: api_client.Client
    clock: clocks.Clock
    gates: external_gates.Gates
    events: event_recorder.EventRecorder
    store: rollout_store.RolloutStore
    list_policies: Callable[[], Mapping[str, rollout_policy.ObservedPolicy]]
    find_stale_reason: Callable[[], str]
    capi_version: str = clusterapi.VERSIONS[0]


class PoolConductor:
    """The rollout of one NodePool, for one thread at a time: the one that has ``lock``.

    It is the PoolWriter and the ConfigChecker of its reconciler.
    """

    def __init__(self, tools: ConductTools, objects: pool_facts.PoolObjects) -> None:
        self.lock = threading.Lock()
        self._tools = tools
        self._objects = objects
        self._guest: guests.GuestCluster | None = None
        self._is_forgotten = False
        self._version = 0
        self._reconciler = reconcile.RolloutReconciler(
            tools.client,
            reconcile.RolloutCaches(
                self._read_pool,
                self._find_stale_reason,
                self._find_node,
                self._list_policies,
            ),
            tools.clock,
            tools.gates,
            tools.events,
            reconcile.RolloutSettings(
                image_gate=lambda _pool, _build: pool_facts.find_target(self._objects)
            ),
            access=reconcile.PoolAccess(self, self),
        )

    def sync(
        self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster | None
    ) -> float | None:
        """Decide and write once; return the delay until the next time, None until a change.

        ``guest`` is None for a pool that needs none.
        """
        self._objects, self._guest = objects, guest
        if guest is not None and not self._find_stale_reason():
            self._correct_desired_configs(guest)
        delay = self._reconciler.sync_pool(objects.pool.full_name)
        if not pool_facts.is_paused(objects, self._tools.clock.now()):
            return delay
        return PAUSE_RECHECK_S if delay is None else min(delay, PAUSE_RECHECK_S)

    def _correct_desired_configs(self, guest: guests.GuestCluster) -> None:
        """Write the target to nodes that have it, before HyperShift redirects them."""
        target, nodes = self._objects.target, guest.get_nodes()
        for machine in self._objects.machines:
            node = nodes.get(machine.node_name)
            if node is None or node.current_config != target or node.is_degraded:
                continue
            if pool_facts.needs_redirect(node, target):
                self.assign_target(node, {key.DESIRED_CONFIG: target})

    def forget(self) -> None:
        """Remove the pool, which no policy conducts any longer, from policies and record."""
        self._is_forgotten = True
        self._reconciler.sync_pool(self._objects.pool.full_name)
        # The namespace goes with its HostedCluster.
        with suppress(errors.NotFoundError):
            self._tools.store.write(self._objects.namespace, self._objects.pool.name, None)

    def _read_pool(self, _name: str = "") -> pool_membership.PoolSnapshot | None:
        if self._is_forgotten:
            return None
        objects = self._objects
        status = self._tools.store.read(objects.namespace, objects.pool.name)
        now = self._tools.clock.now()
        if objects.pool.is_in_place:
            watched = None if self._guest is None else self._guest.get_nodes()
            nodes = pool_facts.list_in_place_nodes(objects, watched)
            status = pool_facts.follow_redirects(objects, nodes, status, now=now)
        else:
            status = pool_facts.follow_replacements(objects, status)
            nodes = pool_facts.list_replace_places(objects, status)
        pool = pool_facts.build_pool(objects, status, str(self._version), now=now)
        error = pool_facts.check_annotations(objects.pool, self._tools.list_policies())
        return pool_membership.PoolSnapshot(pool_membership.ObservedPool(pool, error), nodes)

    def _find_node(self, name: str) -> node_facts.NodeFacts | None:
        snapshot = self._read_pool()
        nodes = () if snapshot is None else snapshot.nodes
        return next((node for node in nodes if node.name == name), None)

    def _find_stale_reason(self) -> str:
        guest = "" if self._guest is None else self._guest.stale_reason
        return self._tools.find_stale_reason() or guest

    def _list_policies(self) -> Mapping[str, rollout_policy.ObservedPolicy]:
        """Return the policies; for Replace without selectors: no label outlives its Machine."""
        policies = self._tools.list_policies()
        name = self._objects.pool.rollout_policy
        if self._objects.pool.is_in_place or (observed := policies.get(name)) is None:
            return policies
        waves = tuple(replace(wave, selector=None) for wave in observed.policy.waves)
        return {**policies, name: replace(observed, policy=replace(observed.policy, waves=waves))}

    def refer_to(
        self, _pool: machineconfigpool.MachineConfigPool | None = None
    ) -> event_recorder.ObjectReference:
        """Return the NodePool."""
        pool = self._objects.pool
        return event_recorder.ObjectReference(
            "NodePool", pool.name, pool.metadata.uid, pool.namespace, nodepool.API_VERSION
        )

    def write_status(
        self, pool: machineconfigpool.MachineConfigPool, status: decode.Json
    ) -> machineconfigpool.MachineConfigPool:
        """Write the record: HyperShift owns the status of the NodePool."""
        objects = self._objects
        merged = {name: _drop_none(part) for name, part in {**pool.status, **status}.items()}
        self._tools.store.write(objects.namespace, objects.pool.name, merged)
        # Its own version: that of the ConfigMap also changes with other pools.
        self._version += 1
        now = self._tools.clock.now()
        return pool_facts.build_pool(objects, merged, str(self._version), now=now)

    def assign_target(
        self, node: node_facts.NodeFacts, annotations: Mapping[str, str | None]
    ) -> None:
        """Delete the Machine, or write the target to the Node of the hosted cluster."""
        if self._objects.pool.is_in_place:
            if self._guest is None:
                raise errors.UnreachableError("the hosted cluster is not connected")
            target = {key.DESIRED_CONFIG: annotations[key.DESIRED_CONFIG]}
            metadata = {"resourceVersion": node.resource_version, "annotations": target}
            self._guest.client.patch(resources.NODES, node.name, {"metadata": metadata})
            return
        machine = next(each for each in self._objects.machines if each.name == node.name)
        self._tools.client.delete(
            replace(resources.MACHINES, version=self._tools.capi_version),
            machine.name,
            namespace=machine.namespace,
            uid=machine.uid,
            resource_version=machine.metadata.resource_version,
        )

    def annotate_node(
        self, node: node_facts.NodeFacts, annotations: Mapping[str, str | None]
    ) -> None:
        """Write nothing: these nodes have no agent of treenail that would read it."""

    def check_config(
        self, pool: machineconfigpool.MachineConfigPool
    ) -> os_image.GateWaiting | os_image.GateBlocked | None:
        """Read the MachineSet or MachineDeployment again: HyperShift must still select no node."""
        objects = self._objects
        kind = resources.MACHINESETS if objects.pool.is_in_place else resources.MACHINEDEPLOYMENTS
        kind = replace(kind, version=self._tools.capi_version)
        try:
            found = self._tools.client.get(kind, objects.pool.name, namespace=objects.namespace)
            is_set = objects.pool.is_in_place
            read = clusterapi.MachineSet if is_set else clusterapi.MachineDeployment
            target = pool_facts.find_target(replace(objects, owner=read.from_json(found)))
        except errors.TreenailError as error:
            return os_image.GateBlocked(
                f"cannot check the target of NodePool {pool.name}: {error}", "ClusterError"
            )
        if not isinstance(target, os_image.GateOpen):
            return target
        if target.target.config == pool.configuration.name:
            return None
        return os_image.GateWaiting("waiting: the target has just changed")

    def forget_pool(self, name: str) -> None:
        """Forget nothing: each check reads the objects."""


def _drop_none(value: object) -> object:
    """Drop what a merge patch removes."""
    if not isinstance(value, dict):
        return value
    return {name: _drop_none(part) for name, part in value.items() if part is not None}
