"""Conducts the rollout of one NodePool with the reconciler of MachineConfigPools.

`PoolConductor` gives it the pool as a value, sends its writes to the NodePool's Machines or to the
Nodes of the hosted cluster, and keeps its status in the `RolloutStore`.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfigpool, object_meta
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted import rollout_store
from treenail.controllers.hosted.conduct import guests, own_update, pool_facts
from treenail.controllers.hosted.in_place import upgrade_site
from treenail.controllers.pools import node_facts, os_image, pool_membership, rollout_policy
from treenail.controllers.rollout import reconcile, writer
from treenail.kube import discovery, event_recorder, resources

PAUSE_RECHECK_S = 30.0
"""Delay after which a pause may have ended, which is a time that nothing else reports."""


class PoolConductor:
    """The rollout of one NodePool, for one thread at a time: the one that has ``lock``.

    It is the PoolWriter and the ConfigChecker of its reconciler.
    """

    def __init__(self, tools: own_update.ConductTools, objects: pool_facts.PoolObjects) -> None:
        self.lock = threading.Lock()
        self._tools = tools
        self._objects = objects
        self._guest: guests.GuestCluster | None = None
        self._is_forgotten = False
        self._version = 0
        self._update = own_update.OwnUpdate(tools)
        self._drain_conditions: tuple[decode.Json, ...] = ()
        """The last drain for the present target that ended before all pods had left."""
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
            reconcile.RolloutSettings(image_gate=lambda _pool, _build: self._find_target()),
            access=reconcile.PoolAccess(self, self),
        )

    def sync(
        self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster | None
    ) -> float | None:
        """Decide and write once; return the delay until the next time, None until a change.

        ``guest`` is None for a pool that needs none.
        """
        if objects.target != self._objects.target:
            self._drain_conditions = ()
        self._objects, self._guest = objects, guest
        is_current = guest is not None and not self._find_stale_reason()
        if guest is not None and objects.is_owned and not objects.gives_nodes:
            is_over = is_current and self._update.finish(objects, guest)
            return None if is_over else upgrade_site.RECHECK_S
        if guest is not None and is_current:
            if objects.is_owned:
                record = pool_facts.read_record(self._read_status())
                is_same = record is not None and record.target.config == objects.target
                now = record.assigned_now if record is not None and is_same else ()
                known = (record.assigned if record is not None else None) or {}
                self._update.sync(objects, guest, known, now)
            else:
                self._correct_desired_configs(guest)
        delay = self._reconciler.sync_pool(objects.pool.full_name)
        if guest is not None and objects.is_owned:
            if is_current and self._update.finish(objects, guest):
                return None
            delay = min(delay or upgrade_site.RECHECK_S, upgrade_site.RECHECK_S)
        if not nodepool.is_pool_paused(objects.pool, objects.cluster, self._tools.clock.now()):
            return delay
        return PAUSE_RECHECK_S if delay is None else min(delay, PAUSE_RECHECK_S)

    def remove_update(self, guest: guests.GuestCluster) -> None:
        """Delete what the hosted cluster has of an update of a pool that is gone."""
        self._update.remove(self._objects, guest)

    def _read_status(self) -> decode.Json:
        return self._tools.store.read(self._objects.namespace, self._objects.record_name)

    def _find_target(self) -> os_image.GateVerdict:
        objects = self._objects
        if self._guest is None or not objects.is_owned:
            return pool_facts.find_target(objects)
        policy = self._tools.list_policies().get(objects.pool.rollout_policy)
        failed = None
        if policy is None or policy.policy.max_failures is None or objects.is_refresh:
            nodes = pool_facts.list_in_place_nodes(objects, self._guest.get_nodes())
            failed = pool_facts.find_degraded(nodes, objects.target)
        return self._update.verdict or failed or pool_facts.find_target(objects)

    def _correct_desired_configs(self, guest: guests.GuestCluster) -> None:
        """Write the target to nodes that have it, before HyperShift redirects them."""
        target, nodes = self._objects.target, guest.get_nodes()
        for machine in self._objects.machines:
            node = nodes.get(machine.node_name)
            if node is None or node.current_config != target or node.is_degraded:
                continue
            if pool_facts.needs_redirect(node, target):
                self.assign_target(node, {key.DESIRED_CONFIG: target})

    def note_expired_drain(self, node: str, message: str) -> None:
        """Report a drain that ended before all pods had left, as an Event and in the record."""
        text = f"node {node}: {message}"
        self._tools.events.record_warning(self.refer_to(), rollout_store.DRAIN_EXPIRED, text)
        now = clocks.format_rfc3339(self._tools.clock.now())
        condition = object_meta.Condition(
            rollout_store.DRAIN_EXPIRED, "True", "NodeDrainTimeout", text, now
        )
        self._drain_conditions = (condition.to_json(),)

    def forget(self) -> None:
        """Remove the pool, which no policy conducts any longer, from policies and record."""
        self._is_forgotten = True
        self._reconciler.sync_pool(self._objects.pool.full_name)
        # The namespace goes with its HostedCluster.
        with suppress(errors.NotFoundError):
            self._tools.store.write(self._objects.namespace, self._objects.record_name, None)

    def _read_pool(self, _name: str = "") -> pool_membership.PoolSnapshot | None:
        if self._is_forgotten:
            return None
        objects = self._objects
        status = self._read_status()
        now = self._tools.clock.now()
        if objects.writes_nodes:
            watched = None if self._guest is None else self._guest.get_nodes()
            nodes = pool_facts.list_in_place_nodes(objects, watched)
            if not objects.is_owned:
                status = pool_facts.follow_redirects(objects, nodes, status, now=now)
        else:
            status = pool_facts.follow_replacements(objects, status)
            nodes = pool_facts.list_replace_places(objects, status)
        pool = pool_facts.build_pool(objects, status, str(self._version), now=now)
        error = pool_facts.check_pool(objects, self._tools.list_policies())
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
        if self._objects.writes_nodes or (observed := policies.get(name)) is None:
            return policies
        waves = tuple(replace(wave, selector=None) for wave in observed.policy.waves)
        return {**policies, name: replace(observed, policy=replace(observed.policy, waves=waves))}

    def refer_to(
        self, _pool: machineconfigpool.MachineConfigPool | None = None
    ) -> event_recorder.ObjectReference:
        """Return the NodePool."""
        return pool_facts.refer_to(self._objects.pool)

    def write_status(
        self, pool: machineconfigpool.MachineConfigPool, status: decode.Json
    ) -> machineconfigpool.MachineConfigPool:
        """Write the record: HyperShift owns the status of the NodePool."""
        objects = self._objects
        if "conditions" in status:
            found = discovery.iter_objects(status["conditions"])
            others = [each for each in found if each.get("type") != rollout_store.DRAIN_EXPIRED]
            status = {**status, "conditions": [*others, *self._drain_conditions]}
        merged = {name: _drop_none(part) for name, part in {**pool.status, **status}.items()}
        self._tools.store.write(objects.namespace, objects.record_name, merged)
        if objects.is_refresh and "conditions" in status:
            self._update.report_refresh(objects.pool, status["conditions"])
        # Its own version: that of the ConfigMap also changes with other pools.
        self._version += 1
        now = self._tools.clock.now()
        return pool_facts.build_pool(objects, merged, str(self._version), now=now)

    def assign_target(
        self, node: node_facts.NodeFacts, annotations: Mapping[str, str | None]
    ) -> None:
        """Delete the Machine, or write the target to the Node of the hosted cluster."""
        if self._objects.writes_nodes:
            if self._guest is None:
                raise errors.UnreachableError("the hosted cluster is not connected")
            if self._objects.is_owned:  # with the image: none but that of the config
                self._update.write_target(self._guest, node, annotations)
                return
            # HyperShift's daemon reads no other annotation.
            target = {key.DESIRED_CONFIG: annotations[key.DESIRED_CONFIG]}
            writer.annotate_node(self._guest.client, node, target)
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
        """Write settings for an agent of treenail; the daemons of HyperShift read none."""
        if self._objects.is_owned and self._objects.writes_nodes and self._guest is not None:
            writer.annotate_node(self._guest.client, node, annotations)

    def check_config(
        self, pool: machineconfigpool.MachineConfigPool
    ) -> os_image.GateWaiting | os_image.GateBlocked | None:
        """Read the MachineSet or MachineDeployment again: HyperShift must still select no node.

        For a pool that treenail owns, prepare the hosted cluster for the target.
        """
        objects = self._objects
        is_set, kind = objects.pool.is_in_place, self._tools.find_owner_kind(objects.pool)
        read = clusterapi.MachineSet if is_set else clusterapi.MachineDeployment
        try:
            found = self._tools.client.get(kind, objects.pool.name, namespace=objects.namespace)
            objects = replace(objects, owner=read.from_json(found))
            target = pool_facts.find_target(objects)
        except errors.TreenailError as error:
            return os_image.GateBlocked(
                f"cannot check the target of NodePool {pool.name}: {error}", "ClusterError"
            )
        if not isinstance(target, os_image.GateOpen):
            return target
        if target.target.config == pool.configuration.name:
            if self._guest is None or not objects.is_owned:
                return None
            if objects.is_refresh == self._objects.is_refresh:
                return self._update.begin(objects, self._guest)
        return os_image.GateWaiting("waiting: the target has just changed")

    def forget_pool(self, name: str) -> None:
        """Forget nothing: each check reads the objects."""


def _drop_none(value: object) -> object:
    """Drop what a merge patch removes."""
    if not isinstance(value, dict):
        return value
    return {name: _drop_none(part) for name, part in value.items() if part is not None}
