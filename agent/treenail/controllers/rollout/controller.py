"""Rollout controller: watches, threads and pace of the `RolloutReconciler`."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from treenail.api.decode import Json
from treenail.api.machineconfigpool import ARBITER, MASTER
from treenail.clock import Clock
from treenail.controllers.rollout.disruption_budgets import BudgetWatcher
from treenail.controllers.rollout.gates.external import GateClient
from treenail.controllers.rollout.nodes import NodeFacts
from treenail.controllers.rollout.pools import ObservedPool, find_pools_of_node
from treenail.controllers.rollout.reconcile import (
    RolloutCaches,
    RolloutReconciler,
    RolloutSettings,
)
from treenail.controllers.runtime.informers import Informers, InformerView
from treenail.kube.client import Client
from treenail.kube.events import EventRecorder
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES
from treenail.kube.watch import WatchScope

MAX_PARALLEL_WRITES = 16
PAUSE_FACTOR = 4.0
"""Pause of a pool after a reconciliation, as a multiple of its duration.

Without it a big pool whose nodes all report at once would keep a CPU busy.
"""
MAX_PAUSE_S = 1.0


class RolloutController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are pool names."""

    name = "rollout"

    def __init__(
        self,
        client: Client,
        clock: Clock,
        gates: GateClient,
        events: EventRecorder,
        settings: RolloutSettings,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._executor = ThreadPoolExecutor(
            MAX_PARALLEL_WRITES, thread_name_prefix="rollout-writes"
        )
        self._budgets = BudgetWatcher(client, clock)
        self._reconciler = RolloutReconciler(
            client,
            RolloutCaches(self._list_pools, self._list_nodes),
            clock,
            gates,
            events,
            settings,
            parallel_map=self._executor.map,
            find_blocked_nodes=self._budgets.find_blocked_nodes,
        )
        self._pools: InformerView[ObservedPool] | None = None
        self._nodes: InformerView[NodeFacts] | None = None
        self._lock = threading.Lock()
        self._not_before: dict[str, float] = {}

    def register_watches(self, informers: Informers, enqueue: Callable[[str], None]) -> None:
        """Watch pools, nodes and PodDisruptionBudgets."""
        self._budgets.watch_budgets(informers)
        image_key = self._settings.image_key
        pools = informers.add_view(WatchScope(MACHINECONFIGPOOLS), ObservedPool.from_json)

        def parse_node(document: Json) -> NodeFacts:
            return NodeFacts.from_json(document, image_key=image_key)

        nodes = informers.add_view(WatchScope(NODES), parse_node)
        self._pools, self._nodes = pools, nodes

        def on_pool(name: str, before: ObservedPool | None, after: ObservedPool | None) -> None:
            if before is None or after is None or before.selection_key != after.selection_key:
                # Nodes may now belong to another pool, so all pools are affected.
                for each in {name, *pools.get_all()}:
                    enqueue(each)
            elif before.decision_key != after.decision_key:
                enqueue(name)

        def on_node(_name: str, before: NodeFacts | None, after: NodeFacts | None) -> None:
            for each in _find_affected_pools(before, after, pools.get_all()):
                enqueue(each)

        pools.add_handler(on_pool)
        nodes.add_handler(on_node)

    def sync_key(self, key: str) -> float | None:
        """One pass; see `RolloutReconciler.sync_pool`."""
        began = self._clock.monotonic()
        early_s = self._not_before.get(key, began) - began
        if early_s > 0:
            return early_s
        try:
            return self._reconciler.sync_pool(key)
        finally:
            ended = self._clock.monotonic()
            with self._lock:
                self._not_before[key] = ended + min(PAUSE_FACTOR * (ended - began), MAX_PAUSE_S)

    def close(self) -> None:
        """Stop the threads that write."""
        self._executor.shutdown()

    def _list_pools(self) -> Mapping[str, ObservedPool]:
        return {} if self._pools is None else self._pools.get_all()

    def _list_nodes(self) -> Mapping[str, NodeFacts]:
        return {} if self._nodes is None else self._nodes.get_all()


def _find_affected_pools(
    before: NodeFacts | None, after: NodeFacts | None, pools: Mapping[str, ObservedPool]
) -> set[str]:
    names = {
        name
        for node in (before, after)
        if node is not None
        for name in find_pools_of_node(node, pools.values())
    }
    # In a cluster with an arbiter, the two pools wait for each other.
    return names | ({MASTER, ARBITER} & pools.keys() if names & {MASTER, ARBITER} else set())
