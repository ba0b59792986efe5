"""Rollout controller: watches, threads and pace of the `RolloutReconciler`."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from treenail.api import decode, machineconfigpool, machineosbuild, machineosconfig
from treenail.api.object_meta import ObjectMeta, read_metadata
from treenail.clocks import Clock
from treenail.controllers.pools import (
    disruption_budgets,
    node_facts,
    os_image,
    pool_index,
    pool_membership,
    pool_views,
    registry_requests,
    rollout_policy,
    rollout_record,
)
from treenail.controllers.rollout import external_gates, image_tag_updater, pool_metrics, reconcile
from treenail.controllers.runtime import controller_metrics, informer_set
from treenail.kube import api_client, event_recorder, resources, watch

MAX_PARALLEL_WRITES = 16
MAX_PARALLEL_TAGS = 4
"""Requests to registries at the same time."""
_ORPHAN_PREFIX = "node/"
"""Prefix of keys that are nodes with a lock or other labels. No pool's name has a slash."""
_DECISIVE = (
    resources.NODES.plural,
    resources.MACHINECONFIGPOOLS.plural,
    resources.ROLLOUTPOLICIES.plural,
    resources.MACHINEOSCONFIGS.plural,
    resources.MACHINEOSBUILDS.plural,
)
"""Kinds whose watches must be current for an assignment."""
PAUSE_FACTOR = 4.0
"""Pause of a pool after a reconciliation, as a multiple of its duration.

Without it a big pool whose nodes all report at once would keep a CPU busy.
"""
MAX_PAUSE_S = 1.0
_MAX_PAUSES = 1000


class RolloutController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are pool names."""

    name = "rollout"

    def __init__(
        self,
        client: api_client.Client,
        clock: Clock,
        gates: external_gates.Gates,
        events: event_recorder.EventRecorder,
        settings: reconcile.RolloutSettings,
        metrics: controller_metrics.ControllerMetrics | None = None,
        *,
        tags: registry_requests.TagSource | None = None,
    ) -> None:
        """``tags`` resolves the tags of pools; without it such a pool waits."""
        self._clock = clock
        self._settings = settings
        self._executor = ThreadPoolExecutor(
            MAX_PARALLEL_WRITES, thread_name_prefix="rollout-writes"
        )
        self._gate_executor = ThreadPoolExecutor(
            external_gates.MAX_PARALLEL_REQUESTS, thread_name_prefix="rollout-gates"
        )
        self._tag_executor = ThreadPoolExecutor(
            MAX_PARALLEL_TAGS, thread_name_prefix="rollout-tags"
        )
        self._enqueue: Callable[[str], None] = lambda _: None
        self._events = events
        self._budgets = disruption_budgets.BudgetWatcher(client, clock)
        self._index = pool_index.PoolIndex(self._find_pool, self._find_node)
        self._reconciler = reconcile.RolloutReconciler(
            client,
            reconcile.RolloutCaches(
                self._index.read_pool,
                self._find_stale_reason,
                self._find_node,
                self._list_policies,
                self._find_build,
                self._index.list_etcd_members,
                self._index.has_one_node,
                self._budgets.find_blocked_nodes,
                self._list_pinned_sets,
            ),
            clock,
            external_gates.BackgroundGates(gates, clock, self._gate_executor),
            events,
            settings,
            access=reconcile.PoolAccess.of_client(client, self._executor.map),
            tags=self._make_tag_dependencies(tags, metrics),
        )
        self._pool_metrics = (
            None
            if metrics is None
            else pool_metrics.PoolMetrics(
                metrics,
                clock,
                self._read_all_pools,
                self._find_assignment_time,
                lambda: self._index.describe_strays(
                    {} if self._nodes is None else self._nodes.get_all().values()
                ),
            )
        )
        self._informers: informer_set.InformerSet | None = None
        self._pools: informer_set.InformerView[pool_membership.ObservedPool] | None = None
        self._nodes: informer_set.InformerView[node_facts.NodeFacts] | None = None
        self._policies: informer_set.InformerView[rollout_policy.ObservedPolicy] | None = None
        self._image_configs: informer_set.InformerView[machineosconfig.MachineOSConfig] | None = (
            None
        )
        self._builds: informer_set.InformerView[machineosbuild.MachineOSBuild] | None = None
        self._pinned_sets: informer_set.InformerView[ObjectMeta] | None = None
        self._lock = threading.Lock()
        self._not_before: dict[str, float] = {}

    def _make_tag_dependencies(
        self,
        source: registry_requests.TagSource | None,
        metrics: controller_metrics.ControllerMetrics | None,
    ) -> image_tag_updater.TagDependencies | None:
        if source is None:
            return None
        return image_tag_updater.TagDependencies(
            source,
            self._tag_executor,
            # The runtime provides the queue after the construction.
            lambda pool: self._enqueue(pool),  # noqa: PLW0108 - see above
            None if metrics is None else registry_requests.TagMetrics(metrics, "pool_image"),
        )

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch pools, policies, nodes and PodDisruptionBudgets."""
        self._enqueue = enqueue
        self._budgets.watch_budgets(informers)
        image_key = self._settings.image_key
        pools = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS), pool_membership.ObservedPool.from_json
        )

        def parse_node(document: decode.Json) -> node_facts.NodeFacts:
            return node_facts.NodeFacts.from_json(document, image_key=image_key)

        nodes = informers.add_view(watch.WatchScope(resources.NODES), parse_node)
        self._informers, self._pools, self._nodes = informers, pools, nodes

        def on_pool(
            name: str,
            before: pool_membership.ObservedPool | None,
            after: pool_membership.ObservedPool | None,
        ) -> None:
            self._index.set_pool(name, after)
            if after is None:
                self._enqueue_lock_holders(enqueue)
            if before is None or after is None or before.selection_key != after.selection_key:
                # Nodes may now belong to another pool, so all pools are affected.
                for pool in {name, *self._index.get_pool_names()}:
                    enqueue(pool)
            elif before.decision_key != after.decision_key:
                enqueue(name)

        def on_node(
            name: str, before: node_facts.NodeFacts | None, after: node_facts.NodeFacts | None
        ) -> None:
            if self._pool_metrics is not None:
                self._pool_metrics.observe_node(before, after)
            if after is None:
                self._reconciler.forget_node(name)
            elif after.locked_by or (before is not None and before.labels != after.labels):
                enqueue(f"{_ORPHAN_PREFIX}{name}")
            labels = None if after is None else after.labels
            for pool in self._add_coupled(self._index.set_node(name, labels)):
                enqueue(pool)

        self._watch_policies(informers, pools, enqueue)
        self._watch_builds(informers, enqueue)
        self._pinned_sets = informers.add_view(
            # Only nodes read the images.
            watch.WatchScope(resources.PINNEDIMAGESETS, is_optional=True, has_metadata_only=True),
            read_metadata,
            optional=True,
            required=False,
        )
        self._pinned_sets.add_handler(lambda *_: self._enqueue_pools(enqueue))
        informers.add_loss_handler(partial(self._enqueue_pools, enqueue))
        pools.add_handler(on_pool)
        nodes.add_handler(on_node)

    def _watch_policies(
        self,
        informers: informer_set.InformerSet,
        pools: informer_set.InformerView[pool_membership.ObservedPool],
        enqueue: Callable[[str], None],
    ) -> None:
        # A cluster with an older CRD set has no policies.
        policies = pool_views.add_policy_view(informers)
        self._policies = policies

        def on_policy(
            name: str,
            before: rollout_policy.ObservedPolicy | None,
            after: rollout_policy.ObservedPolicy | None,
        ) -> None:
            if before and after and before.decision_key == after.decision_key:
                return
            for pool, observed in pools.get_all().items():
                if observed.pool.rollout_policy == name:
                    enqueue(pool)

        policies.add_handler(on_policy)

    def _watch_builds(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        # A cluster without image builds need not have the kinds.
        configs, builds = pool_views.add_build_views(informers)
        self._image_configs, self._builds = configs, builds

        def on_config(
            _name: str,
            before: machineosconfig.MachineOSConfig | None,
            after: machineosconfig.MachineOSConfig | None,
        ) -> None:
            for pool in {config.pool for config in (before, after) if config is not None}:
                enqueue(pool)

        def on_build(
            _name: str,
            before: machineosbuild.MachineOSBuild | None,
            after: machineosbuild.MachineOSBuild | None,
        ) -> None:
            build = after or before
            config = None if build is None else configs.find(build.image_config)
            if config is not None:
                enqueue(config.pool)

        configs.add_handler(on_config)
        builds.add_handler(on_build)

    def sync_key(self, key: str) -> float | None:
        """One pass; see `RolloutReconciler.sync_pool`."""
        began = self._clock.monotonic()
        early_s = self._not_before.get(key, began) - began
        if early_s > 0:
            return early_s
        try:
            if key.startswith(_ORPHAN_PREFIX):
                return self._release_orphan(key.removeprefix(_ORPHAN_PREFIX))
            return self._reconciler.sync_pool(key)
        finally:
            ended = self._clock.monotonic()
            with self._lock:
                self._not_before[key] = ended + min(PAUSE_FACTOR * (ended - began), MAX_PAUSE_S)
                if len(self._not_before) > _MAX_PAUSES:
                    # Keys of deleted pools and nodes.
                    self._not_before = {
                        pool: at for pool, at in self._not_before.items() if at > ended
                    }

    def close(self) -> None:
        """Stop the threads that write."""
        self._executor.shutdown()
        # A gate that hangs must not delay the end of the process.
        self._gate_executor.shutdown(wait=False, cancel_futures=True)
        self._tag_executor.shutdown(wait=False, cancel_futures=True)

    def _read_all_pools(self) -> list[pool_membership.PoolSnapshot]:
        snapshots = (self._index.read_pool(name) for name in sorted(self._index.get_pool_names()))
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def _find_assignment_time(self, node: node_facts.NodeFacts) -> float | None:
        """Return when the controller assigned the node its target; None if it did not."""
        pools = map(self._find_pool, self._index.find_pools(node.name, node.labels))
        statuses = (observed.pool.status for observed in pools if observed is not None)
        nodes = (rollout_record.apply_record(status, [node])[0] for status in statuses)
        return next((node.started_at for node in nodes if node.started_at is not None), None)

    def _enqueue_pools(self, enqueue: Callable[[str], None]) -> None:
        """Reconcile all pools. While a watch is disconnected, they report that."""
        for pool in self._index.get_pool_names():
            enqueue(pool)

    def _find_pool(self, name: str) -> pool_membership.ObservedPool | None:
        return None if self._pools is None else self._pools.find(name)

    def _find_node(self, name: str) -> node_facts.NodeFacts | None:
        return None if self._nodes is None else self._nodes.find(name)

    def _list_policies(self) -> Mapping[str, rollout_policy.ObservedPolicy]:
        return {} if self._policies is None else self._policies.get_all()

    def _find_build(self, pool: machineconfigpool.MachineConfigPool) -> os_image.PoolBuild:
        configs = {} if self._image_configs is None else self._image_configs.get_all()
        if not configs:
            return os_image.NO_BUILD
        builds = {} if self._builds is None else self._builds.get_all()
        return os_image.find_pool_build(pool, configs.values(), builds.values())

    def _list_pinned_sets(self) -> Mapping[str, ObjectMeta] | None:
        view = self._pinned_sets
        return None if view is None or view.listed_at is None else view.get_all()

    def _enqueue_lock_holders(self, enqueue: Callable[[str], None]) -> None:
        """Look at all nodes with a lock after a pool is deleted."""
        for name, node in ({} if self._nodes is None else self._nodes.get_all()).items():
            if node.locked_by:
                enqueue(f"{_ORPHAN_PREFIX}{name}")

    def _release_orphan(self, name: str) -> float | None:
        """Release the lock of a node in no pool, and report the node."""
        node = self._find_node(name)
        if node is None:
            return None
        for text in self._index.describe_strays([node]):
            self._events.record_warning(
                event_recorder.ObjectReference("Node", name, uid=name), "NoPool", text
            )
        if self._index.find_pools(name, node.labels):
            return None
        return self._reconciler.release_orphan(name)

    def _find_stale_reason(self) -> str:
        informers = self._informers
        return "" if informers is None else informers.find_stale_reason(_DECISIVE)

    def _add_coupled(self, names: frozenset[str]) -> frozenset[str]:
        """Add the other pool of the control plane: master and arbiter wait for each other."""
        coupled = frozenset(machineconfigpool.CONTROL_PLANE_POOLS)
        return names | (coupled & self._index.get_pool_names()) if names & coupled else names
