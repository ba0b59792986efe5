"""Conducts the rollouts of HyperShift's NodePools that name a RolloutPolicy.

HyperShift stays unchanged. For Replace treenail deletes Machines and Cluster API replaces them. For
InPlace it writes the target to Nodes and HyperShift does the rest. Without treenail a pool waits.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from treenail import clocks, errors
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted import rollout_store
from treenail.controllers.hosted.conduct import conductor, guests, pool_facts
from treenail.controllers.pools import pool_views
from treenail.controllers.rollout import external_gates
from treenail.controllers.runtime import informer_set
from treenail.kube import api_client, discovery, event_recorder, resources, watch
from treenail.kube.transport import kubeconfig

log = logging.getLogger(__name__)

_BUSY_RETRY_S = 1.0
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
    ) -> None:
        """``is_leader`` is asked before each write to a hosted cluster."""
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
        version = self._find_version()
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
        self._tools = conductor.ConductTools(
            self._client,
            self._clock,
            self._gates,
            self._events,
            rollout_store.RolloutStore(self._client),
            self._policies.get_all,
            self._find_stale_reason,
            version,
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
            self._open_guest(objects.namespace, key)
            return None
        self._release_guest(key)
        if objects is not None:
            return self._conduct(objects, None)
        known = self._conductors.get(key)
        if known is None or self._find_stale_reason():
            return None
        if not known.lock.acquire(blocking=False):
            return _BUSY_RETRY_S
        known.forget()
        del self._conductors[key]
        return None

    def close(self) -> None:
        """Stop the threads; a hosted cluster that hangs must not delay the end of the process."""
        for guest in self._guests.values():
            guest.close()
        self._gate_executor.shutdown(wait=False, cancel_futures=True)

    def _conduct_in_guest(self, key: str, guest: guests.GuestCluster) -> float | None:
        objects = self._find_objects(key)
        if objects is None or not objects.needs_guest:
            self._enqueue(key)
            return None
        return self._conduct(objects, guest)

    def _conduct(
        self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster | None
    ) -> float | None:
        name = objects.pool.full_name
        with self._lock:
            if (known := self._conductors.get(name)) is None:
                known = self._conductors[name] = conductor.PoolConductor(self._tools, objects)
        # Another thread has it while a pool begins or ends to need its hosted cluster.
        if not known.lock.acquire(blocking=False):
            return _BUSY_RETRY_S
        try:
            return known.sync(objects, guest)
        except (errors.ConfigError, errors.ForbiddenError) as error:
            remedy = error.remedy or (
                "run: treenail-controller manifests --only hosted --control-plane "
                f"{objects.namespace} | kubectl apply -f -"
            )
            self._events.record_warning(known.refer_to(), "CannotConduct", f"{error}; {remedy}")
            raise
        finally:
            known.lock.release()

    def _open_guest(self, namespace: str, key: str) -> None:
        """Sync the pool on the thread of its hosted cluster."""
        with self._lock:
            if namespace not in self._guests:
                load = partial(self._load_config, namespace)
                self._guests[namespace] = guests.GuestCluster(
                    load, self._conduct_in_guest, self._is_leader, self._clock
                )
            self._guests[namespace].add(key)

    def _release_guest(self, key: str) -> None:
        with self._lock:
            for namespace, guest in list(self._guests.items()):
                guest.pools.discard(key)
                if not guest.pools:
                    self._guests.pop(namespace).close()

    def _load_config(self, namespace: str) -> kubeconfig.ApiServerConfig:
        for control_plane in self._control_planes.get_all().values():
            if control_plane.namespace == namespace:
                return guests.load_guest_config(self._client, control_plane)
        raise errors.NotFoundError(f"namespace {namespace} has no HostedControlPlane")

    def _find_objects(self, key: str) -> pool_facts.PoolObjects | None:
        """Return a NodePool that names a policy, with its objects; None for any other."""
        pool = self._pools.find(key)
        if pool is None or not pool.rollout_policy:
            return None
        cluster = self._clusters.find(f"{pool.namespace}/{pool.cluster_name}")
        if cluster is None:
            return None
        name = f"{cluster.control_plane_namespace}/{pool.name}"
        owner = self._sets.find(name) if pool.is_in_place else self._deployments.find(name)
        # The namespace a-b-c is that of cluster b-c in a, and of cluster c in a-b.
        if owner is None or owner.node_pool != pool.full_name:
            return pool_facts.PoolObjects(pool, cluster)
        sets = () if pool.is_in_place else tuple(_list_owned(self._sets, {owner.uid}))
        owners = {each.uid for each in sets} or {owner.uid}
        machines = tuple(_list_owned(self._machines, owners))
        return pool_facts.PoolObjects(pool, cluster, owner, sets, machines)

    def _enqueue_owners(self, _key: str, *values: _CapiObject | None) -> None:
        for value in values:
            if value is not None:
                self._enqueue(value.node_pool)

    def _enqueue_all(self) -> None:
        for key in self._pools.get_all():
            self._enqueue(key)

    def _find_stale_reason(self) -> str:
        if self._informers.restored_s < informer_set.RESTORED_WAIT_S:
            return "the API server returned to an older state, and objects are written again"
        return self._informers.describe_staleness(_DECISIVE)

    def _find_version(self) -> str:
        try:
            return discovery.find_served_version(
                self._client, clusterapi.GROUP, clusterapi.VERSIONS
            )
        except errors.ClusterError as error:
            log.warning("assuming version %s of Cluster API: %s", clusterapi.VERSIONS[0], error)
            return clusterapi.VERSIONS[0]


def _list_owned(
    view: informer_set.InformerView[_Owned], owners: Collection[str]
) -> Iterator[_Owned]:
    """Yield the objects that one of the owners controls, sorted by name."""
    for _, value in sorted(view.get_all().items()):
        controller = value.get_controller()
        if controller is not None and controller.uid in owners:
            yield value
