"""What runs behind the API: garbage collection, budgets and kubelets.

Work caused by a request is done before the next request is read, so that clients see its outcome.
"""

import asyncio

from treenail_lab.apiserver.controllers.garbage_collector import Collector
from treenail_lab.apiserver.controllers.kubelets import Kubelets
from treenail_lab.apiserver.registry.disruption_budgets import Disruption
from treenail_lab.apiserver.registry.registry import Registry
from treenail_lab.apiserver.schema.kinds import Storage
from treenail_lab.apiserver.storage.store import Event


class Upkeep:
    """Notes every change; acts while it is attached to an event loop."""

    def __init__(self, registry: Registry) -> None:
        self.kubelets = Kubelets(registry)
        self._collector = Collector(registry)
        self._disruption = Disruption(registry)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        registry.store.listen(self._note)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Act from now on, beginning with what was noted before."""
        self._loop = loop
        self.look()

    def detach(self) -> None:
        """Act no more; what is to be done is done after the next :meth:`attach`."""
        for handle in (self._turn, self._alarm):
            if handle is not None:
                handle.cancel()
        self._loop = self._turn = self._alarm = None

    def look(self) -> None:
        """Act soon, because time has passed or a kubelet has come back."""
        if self._loop is not None and self._turn is None:
            self._turn = self._loop.call_soon(self._act)

    def reload(self) -> None:
        """Look at everything, after the store was loaded."""
        for worker in (self._collector, self.kubelets, self._disruption):
            worker.reload()
        self.look()

    def _note(self, storage: Storage, event: Event) -> None:
        for worker in (self._collector, self.kubelets, self._disruption):
            if worker.note(storage, event):
                self.look()

    def _act(self) -> None:
        if self._loop is None:
            return
        self._turn = None
        self._collector.sync()
        wait_s = self.kubelets.sync()
        self._disruption.sync()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wait_s is not None:
            self._alarm = self._loop.call_later(wait_s, self.look)
