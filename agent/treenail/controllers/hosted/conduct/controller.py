"""Conducts the rollouts of HyperShift's NodePools that name a RolloutPolicy.

HyperShift stays unchanged. For Replace treenail deletes Machines and Cluster API replaces them. For
InPlace it writes the target to Nodes and HyperShift does the rest. Without treenail a pool waits.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from treenail import clocks, errors
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.drain import controller as drain_controller
from treenail.controllers.drain import decide
from treenail.controllers.hosted import guest_kubeconfig, rollout_store
from treenail.controllers.hosted.conduct import conductor, guests, own_update, pool_facts
from treenail.controllers.hosted.in_place import upgrade_objects
from treenail.controllers.pools import pool_views
from treenail.controllers.rollout import external_gates
from treenail.controllers.runtime import informer_set
from treenail.kube import api_client, discovery, event_recorder, resources, watch
from treenail.kube.transport import kubeconfig

_BUSY_RETRY_S = 1.0
_HYPERSHIFT_KEYS = decide.DrainKeys(hosted_key.HOSTED_DRAIN, hosted_key.HOSTED_APPLIED_DRAIN)
_CAPI_KINDS = (resources.MACHINES, resources.MACHINESETS, resources.MACHINEDEPLOYMENTS)
_DECISIVE = (
    "nodepools",
    "hostedclusters",
    *(kind.plural for kind in _CAPI_KINDS),
    "rolloutpolicies",
)
"""Kinds whose watches must be current for a selection."""


_CapiObject = clusterapi.ClusterMachine | clusterapi.MachineSet | clusterapi.MachineDeployment
_Owned = TypeVar("_Owned", clusterapi.ClusterMachine, clusterapi.MachineSet)


class ConductController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are NodePools."""

    name = "hosted"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        gates: external_gates.Gates,
        events: event_recorder.EventRecorder,
        is_leader: Callable[[], bool],
        *,
        scope: str = "",
        agent_image: str = "",
    ) -> None:
        """``is_leader`` is asked before each write to a hosted cluster.

        treenail owns the HostedClusters with this ``scope``; none if it is empty.
        """
        self._scope, self._agent_image = scope, agent_image
        self._client = client
        self._clock = clock
        self._events = events
        self._is_leader = is_leader
        self._gate_executor = ThreadPoolExecutor(
            external_gates.MAX_PARALLEL_REQUESTS, thread_name_prefix="hosted-gates"
        )
        self._gates = external_gates.BackgroundGates(gates, clock, self._gate_executor)
        self._lock = threading.Lock()
        self._guests: dict[str, guests.GuestCluster] = {}
        self._conductors: dict[str, conductor.PoolConductor] = {}

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch the management cluster, all namespaces once; no hosted cluster."""
        self._informers, self._enqueue = informers, enqueue
        version = discovery.find_preferred_version(
            self._client, clusterapi.GROUP, clusterapi.VERSIONS
        )
        kinds = [replace(resource, version=version) for resource in _CAPI_KINDS]
        machines, sets, deployments = map(watch.WatchScope, kinds)
        # Optional: without HyperShift there is nothing to conduct.
        add_view = partial(informers.add_view, optional=True)
        self._pools = add_view(watch.WatchScope(resources.NODEPOOLS), nodepool.NodePool.from_json)
        self._clusters = add_view(
            watch.WatchScope(resources.HOSTEDCLUSTERS), nodepool.HostedCluster.from_json
        )
        self._control_planes = add_view(
            watch.WatchScope(resources.HOSTEDCONTROLPLANES), nodepool.HostedControlPlane.from_json
        )
        self._machines = add_view(machines, clusterapi.ClusterMachine.from_json)
        self._sets = add_view(sets, clusterapi.MachineSet.from_json)
        self._deployments = add_view(deployments, clusterapi.MachineDeployment.from_json)
        self._policies = pool_views.add_policy_view(informers)
        self._tools = own_update.ConductTools(
            self._client,
            self._clock,
            self._gates,
            self._events,
            rollout_store.RolloutStore(self._client),
            self._policies.get_all,
            self._find_stale_reason,
            version,
            self._agent_image,
        )
        self._pools.add_handler(lambda key, *_: enqueue(key))
        for view in (self._machines, self._sets, self._deployments):
            view.add_handler(self._enqueue_owners)
        for changed in (self._clusters, self._policies):
            changed.add_handler(lambda *_: self._enqueue_all())
        informers.add_loss_handler(self._enqueue_all)

    def sync_key(self, key: str) -> float | None:
        """Conduct one NodePool once, or let the thread of its hosted cluster do it."""
        objects = self._find_objects(key)
        if objects is not None and objects.needs_guest:
            self._open_guest(objects, key)
            return None
        if objects is None and self._pools.find(key) is None and self._let_guest_clean(key):
            return None
        self._release_guest(key)
        if objects is not None:
            return self._conduct(objects, None)
        names = [key] if self._pools.find(key) else [key, f"{key}{pool_facts.REFRESH_SUFFIX}"]
        found = [name for name in names if name in self._conductors]
        if not found or self._find_stale_reason():
            return None
        for name in found:
            if not self._conductors[name].lock.acquire(blocking=False):
                return _BUSY_RETRY_S
            self._conductors.pop(name).forget()
        return None

    def close(self) -> None:
        """Stop the threads; a hosted cluster that hangs must not delay the end of the process."""
        for guest in self._guests.values():
            guest.close()
        self._gate_executor.shutdown(wait=False, cancel_futures=True)

    def _conduct_in_guest(self, key: str, guest: guests.GuestCluster) -> float | None:
        objects = self._find_objects(key)
        if objects is not None and objects.needs_guest:
            return self._conduct(objects, guest)
        if self._pools.find(key) is None:
            self._clean_guest(key, guest)
        self._enqueue(key)
        return None

    def _let_guest_clean(self, key: str) -> bool:
        """Return whether a hosted cluster is cleaned first of what a deleted pool left."""
        with self._lock:
            for guest in self._guests.values():
                if key in guest.pools and guest.drains is not None:
                    guest.add(key)
                    return True
        return False

    def _clean_guest(self, key: str, guest: guests.GuestCluster) -> None:
        guest.pools.discard(key)
        for name in (key, f"{key}{pool_facts.REFRESH_SUFFIX}"):
            known = self._conductors.get(name)
            if known is not None and not guest.stale_reason:
                known.remove_update(guest)

    def _conduct(
        self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster | None
    ) -> float | None:
        name = f"{objects.pool.namespace}/{objects.record_name}"
        with self._lock:
            if (known := self._conductors.get(name)) is None:
                known = self._conductors[name] = conductor.PoolConductor(self._tools, objects)
        # Another thread has it while a pool begins or ends to need its hosted cluster.
        if not known.lock.acquire(blocking=False):
            return _BUSY_RETRY_S
        try:
            return known.sync(objects, guest)
        except (errors.ConfigError, errors.ForbiddenError) as error:
            remedy = error.remedy or pool_facts.describe_permission(objects)
            self._events.record_warning(known.refer_to(), "CannotConduct", f"{error}; {remedy}")
            raise
        finally:
            known.lock.release()

    def _open_guest(self, objects: pool_facts.PoolObjects, key: str) -> None:
        """Sync the pool on the thread of its hosted cluster."""
        namespace = objects.namespace
        with self._lock:
            known = self._guests.get(namespace)
            if known is not None and (known.drains is not None) != objects.is_owned:
                self._guests.pop(namespace).close()
            if namespace not in self._guests:
                load = partial(self._load_config, namespace, objects)
                self._guests[namespace] = guests.GuestCluster(
                    load,
                    self._conduct_in_guest,
                    self._is_leader,
                    self._clock,
                    self._build_rules(namespace) if objects.is_owned else None,
                )
            self._guests[namespace].add(key)

    def _build_rules(self, namespace: str) -> drain_controller.DrainRules:
        return drain_controller.DrainRules(
            # HyperShift's drainer acts on the usual annotations.
            _HYPERSHIFT_KEYS if self._find_control_plane(namespace) else decide.USUAL_KEYS,
            partial(self._find_drain_limit, namespace),
            lambda pod: upgrade_objects.is_installer(pod.namespace, pod.name),
            partial(self._report_expired, namespace),
        )

    def _find_drain_limit(self, namespace: str, node: decide.DrainNode) -> float | None:
        objects = self._find_pool_of(namespace, node.name)
        return pool_facts.limit_drain(None if objects is None else objects.pool, node)

    def _report_expired(self, namespace: str, node: str, message: str) -> None:
        objects = self._find_pool_of(namespace, node)
        if objects is None:
            return
        name = f"{objects.pool.namespace}/{objects.record_name}"
        if (known := self._conductors.get(name)) is not None:
            known.note_expired_drain(node, message)

    def _find_pool_of(self, namespace: str, node: str) -> pool_facts.PoolObjects | None:
        """Return the pool of a node that is updated now; None for another node."""
        guest = self._guests.get(namespace)
        for key in () if guest is None else tuple(guest.pools):
            objects = self._find_objects(key)
            if objects is not None and node in {each.node_name for each in objects.machines}:
                return objects
        return None

    def _release_guest(self, key: str) -> None:
        with self._lock:
            for namespace, guest in list(self._guests.items()):
                guest.pools.discard(key)
                if not guest.pools:
                    self._guests.pop(namespace).close()

    def _load_config(
        self, namespace: str, objects: pool_facts.PoolObjects
    ) -> kubeconfig.ApiServerConfig:
        return guest_kubeconfig.load_guest_config(
            self._client,
            namespace,
            self._find_control_plane(namespace),
            "" if objects.owner is None else objects.owner.cluster_name,
        )

    def _find_control_plane(self, namespace: str) -> nodepool.HostedControlPlane | None:
        found = self._control_planes.get_all().values()
        return next((each for each in found if each.namespace == namespace), None)

    def _find_objects(self, key: str) -> pool_facts.PoolObjects | None:
        """Return a NodePool that treenail conducts or updates, with its objects; else None."""
        pool = self._pools.find(key)
        if pool is None:
            return None
        cluster = self._clusters.find(f"{pool.namespace}/{pool.cluster_name}")
        if cluster is None:
            return None
        is_owned = bool(self._scope) and cluster.scope == self._scope
        if not pool.rollout_policy and not is_owned:
            return None
        objects = self._collect_objects(pool, cluster, is_owned=is_owned)
        return objects if pool.rollout_policy or objects.writes_nodes else None

    def _collect_objects(
        self, pool: nodepool.NodePool, cluster: nodepool.HostedCluster, *, is_owned: bool
    ) -> pool_facts.PoolObjects:
        name = f"{cluster.control_plane_namespace}/{pool.name}"
        owner = self._sets.find(name) if pool.is_in_place else self._deployments.find(name)
        # The namespace a-b-c is that of cluster b-c in a, and of cluster c in a-b.
        if owner is None or owner.node_pool != pool.full_name:
            return pool_facts.PoolObjects(pool, cluster, is_owned=is_owned)
        sets = () if pool.is_in_place else tuple(_list_owned(self._sets, {owner.uid}))
        owners = {each.uid for each in sets} or {owner.uid}
        machines = tuple(_list_owned(self._machines, owners))
        return pool_facts.PoolObjects(pool, cluster, owner, sets, machines, is_owned)

    def _enqueue_owners(self, _key: str, *values: _CapiObject | None) -> None:
        for value in values:
            if value is not None:
                self._enqueue(value.node_pool)

    def _enqueue_all(self) -> None:
        for key in self._pools.get_all():
            self._enqueue(key)

    def _find_stale_reason(self) -> str:
        return self._informers.find_stale_reason(_DECISIVE)


def _list_owned(
    view: informer_set.InformerView[_Owned], owners: Collection[str]
) -> Iterator[_Owned]:
    """Yield the objects that one of the owners controls, sorted by name."""
    for _, value in sorted(view.get_all().items()):
        controller = value.get_controller()
        if controller is not None and controller.uid in owners:
            yield value
