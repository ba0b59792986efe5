"""What runs behind the API: garbage collection, budgets and kubelets.

Work caused by a request is done before the next request is read, so that clients see its outcome.
"""

import asyncio

from treenail.lab.apiserver import disruption
from treenail.lab.apiserver.collector import Collector
from treenail.lab.apiserver.kinds import Storage
from treenail.lab.apiserver.kubelets import NODES, Kubelets
from treenail.lab.apiserver.registry import Registry
from treenail.lab.apiserver.store import Event

_BUDGETS_DEPEND_ON = frozenset({
    disruption.PODS, disruption.BUDGETS, ("apps", "deployments"), ("apps", "replicasets"),
})  # fmt: skip
_KUBELETS_DEPEND_ON = frozenset({disruption.PODS, NODES})


class Upkeep:
    """Notes every change; acts while it is attached to an event loop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.kubelets = Kubelets(registry)
        self._collector = Collector(registry)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._budgets_dirty = self._pods_dirty = False
        registry.store.listen(self._note)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Act from now on."""
        self._loop = loop
        self.look()

    def detach(self) -> None:
        """Act no more; what is to be done is done after the next :meth:`attach`."""
        for handle in (self._turn, self._alarm):
            if handle is not None:
                handle.cancel()
        self._loop = self._turn = self._alarm = None

    def look(self) -> None:
        """Look at everything that depends on time or on what kubelets do."""
        self._budgets_dirty = self._pods_dirty = True
        self._schedule()

    def reload(self) -> None:
        """Look at everything, after the store was loaded."""
        self._collector.reload()
        self.look()

    def _note(self, storage: Storage, event: Event) -> None:
        self._collector.note(storage, event)
        self._budgets_dirty |= storage in _BUDGETS_DEPEND_ON
        # Nodes report their status all the time, which is of no interest to their pods.
        self._pods_dirty |= storage in _KUBELETS_DEPEND_ON and (
            storage != NODES or event.type != "MODIFIED"
        )
        if self._collector.has_work or self._budgets_dirty or self._pods_dirty:
            self._schedule()

    def _schedule(self) -> None:
        if self._loop is not None and self._turn is None:
            self._turn = self._loop.call_soon(self._act)

    def _act(self) -> None:
        if self._loop is None:
            return
        self._collector.sync()
        if self._pods_dirty:
            self._pods_dirty = False
            wait_s = self.kubelets.sync()
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            if wait_s is not None:
                self._alarm = self._loop.call_later(wait_s, self.look)
        if self._budgets_dirty:
            disruption.sync(self._registry)
            self._budgets_dirty = False
        self._turn = None
        if self._collector.has_work or self._pods_dirty:
            self._schedule()
