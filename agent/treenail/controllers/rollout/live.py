"""The rollout as a controller of the process: its watches, its threads, its pace."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from treenail.api.decode import Json
from treenail.api.machineconfigpool import ARBITER, MASTER
from treenail.clock import Clock
from treenail.controllers.rollout import act, budgets
from treenail.controllers.rollout.budgets import Budgets
from treenail.controllers.rollout.controller import Events, Gates, RolloutController, Settings
from treenail.controllers.rollout.nodes import NodeFacts
from treenail.controllers.rollout.observe import SeenPool, concerned
from treenail.controllers.runtime.informers import Informers, View
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES
from treenail.kube.watch import Scope

WRITES_AT_ONCE = 16
REST = 4.0
"""After a pass its pool rests so many times as long as it took, so that a big pool whose nodes
all report at once does not keep a CPU busy."""
REST_MOST_S = 1.0


class Api(act.Api, budgets.Api, Protocol):
    """The verbs of a `Client` that a rollout needs."""


class Rollout:
    """A `treenail.controllers.runtime.workers.Controller`, whose keys are the names of pools."""

    name = "rollout"

    def __init__(
        self, api: Api, clock: Clock, gates: Gates, events: Events, settings: Settings
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._writers = ThreadPoolExecutor(WRITES_AT_ONCE, thread_name_prefix="rollout-writes")
        self._budgets = Budgets(api, clock)
        self._controller = RolloutController(
            api,
            self,
            clock,
            gates,
            events,
            settings,
            each=self._writers.map,
            blocked=self._budgets.blocked,
        )
        self._pools: View[SeenPool] | None = None
        self._nodes: View[NodeFacts] | None = None
        self._lock = threading.Lock()
        self._not_before: dict[str, float] = {}

    def watch(self, informers: Informers, look_at: Callable[[str], None]) -> None:
        """Watch pools and nodes, and the budgets of pods."""
        self._budgets.watch(informers)
        image_key = self._settings.image_key
        pools = informers.view(Scope(MACHINECONFIGPOOLS), SeenPool.from_json)

        def node(found: Json) -> NodeFacts:
            return NodeFacts.from_json(found, image_key=image_key)

        nodes = informers.view(Scope(NODES), node)
        self._pools, self._nodes = pools, nodes

        def on_pool(name: str, before: SeenPool | None, after: SeenPool | None) -> None:
            if before is None or after is None or before.selects != after.selects:
                # Nodes may have become another pool's.
                for each in {name, *pools.all()}:
                    look_at(each)
            elif before.relevant != after.relevant:
                look_at(name)

        def on_node(_name: str, before: NodeFacts | None, after: NodeFacts | None) -> None:
            for each in _concerned(before, after, pools.all()):
                look_at(each)

        pools.tell(on_pool)
        nodes.tell(on_node)

    def sync(self, key: str) -> float | None:
        """One pass; see `RolloutController.sync`."""
        began = self._clock.monotonic()
        early_s = self._not_before.get(key, began) - began
        if early_s > 0:
            return early_s
        try:
            return self._controller.sync(key)
        finally:
            ended = self._clock.monotonic()
            with self._lock:
                self._not_before[key] = ended + min(REST * (ended - began), REST_MOST_S)

    def close(self) -> None:
        """End the threads that write."""
        self._writers.shutdown()

    def pools(self) -> Mapping[str, SeenPool]:
        """By name, as the watch shows them."""
        return {} if self._pools is None else self._pools.all()

    def nodes(self) -> Mapping[str, NodeFacts]:
        """By name, as the watch shows them."""
        return {} if self._nodes is None else self._nodes.all()


def _concerned(
    before: NodeFacts | None, after: NodeFacts | None, pools: Mapping[str, SeenPool]
) -> set[str]:
    names = {
        name
        for node in (before, after)
        if node is not None
        for name in concerned(node, pools.values())
    }
    # Where there are arbiters, the two pools wait for each other.
    return names | ({MASTER, ARBITER} & pools.keys() if names & {MASTER, ARBITER} else set())
