"""Controllers in one process: their watches, their workers, and who of several processes leads.

The watches run whether this process leads or not, so that it can take over at once. Workers run
only while it leads; when it does not lead any more it ends, and whoever started it starts another
one that stands for election anew, as client-go's programs do.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from treenail.clock import Clock
from treenail.controllers.runtime.informers import Informers
from treenail.controllers.runtime.metrics import ControllerMetrics
from treenail.controllers.runtime.workers import ControllerSettings, WorkerMetrics, WorkerPool

log = logging.getLogger(__name__)

_POLL_S = 0.5
_STOP_LIMIT_S = 25.0
"""Less than a pod's default grace period of 30 s."""
_STUCK_S = 600.0


class Leadership(Protocol):
    """`treenail.kube.lease.LeaderElector`, or the certainty of being alone."""

    @property
    def is_leader(self) -> bool: ...
    def run(self, stop: threading.Event) -> None: ...


class SoleLeader:
    """Leads always: for where there is only one process."""

    is_leader = True

    def run(self, stop: threading.Event) -> None:
        stop.wait()


MakeElector = Callable[[Callable[[], None], Callable[[], None]], Leadership]
"""From what to do on gain and on loss to the candidate that does it."""


def make_sole_leader(on_gain: Callable[[], None], _on_loss: Callable[[], None]) -> Leadership:
    """Nobody else stands for election."""
    on_gain()
    return SoleLeader()


class ControllerRuntime:
    """Runs controllers until it is told to stop, or does not lead any more."""

    def __init__(
        self,
        settings: Sequence[ControllerSettings],
        informers: Informers,
        clock: Clock,
        metrics: ControllerMetrics,
        *,
        make_elector: MakeElector = make_sole_leader,
    ) -> None:
        measured = WorkerMetrics(metrics)
        self._workers = [WorkerPool(crew, clock, measured) for crew in settings]
        self._informers = informers
        self._elected = threading.Event()
        self._leadership_lost = threading.Event()
        self._leadership = make_elector(self._elected.set, self._leadership_lost.set)
        self._stop_election = threading.Event()
        self._election_thread = threading.Thread(
            target=self._leadership.run,
            args=(self._stop_election,),
            name="leader-election",
            daemon=True,
        )
        metrics.add_gauge("leader", "Whether this process is the one that acts.").set_function(
            by=lambda: float(self._leadership.is_leader)
        )

    def run(self, stop: threading.Event) -> bool:
        """Work until ``stop``; False when that was because another process leads now.

        What is under way when it is time to stop is finished, nothing else is begun, and the lease
        is given back only then.
        """
        for workers in self._workers:
            workers.register_watches(self._informers)
        self._informers.start()
        self._election_thread.start()
        try:
            if self._wait_until_leading(stop):
                log.info("the controllers start")
                for workers in self._workers:
                    workers.start(lambda: self._leadership.is_leader)
                while not (stop.is_set() or self._leadership_lost.is_set()):
                    stop.wait(_POLL_S)
            # Not later: giving the lease back is no loss.
            lost = self._leadership_lost.is_set()
        finally:
            self._stop_workers()
        return not lost

    @property
    def unsynced_reason(self) -> str:
        """What it waits for before it could work; empty when it could."""
        return self._informers.unsynced_reason

    @property
    def stuck_reason(self) -> str:
        """What does not go on any more; empty when all does."""
        return "; ".join(
            f"a turn is under way for {workers.longest_sync_s:.0f} s"
            for workers in self._workers
            if workers.longest_sync_s > _STUCK_S
        )

    def _wait_until_leading(self, stop: threading.Event) -> bool:
        """Wait until everything was seen and this process leads; False when it is to stop."""
        while not (stop.is_set() or self._leadership_lost.is_set()):
            if self._informers.wait_until_synced(_POLL_S) and self._elected.wait(_POLL_S):
                return True
        return False

    def _stop_workers(self) -> None:
        for workers in self._workers:
            workers.queue.close()
        for workers in self._workers:
            workers.stop(_STOP_LIMIT_S)
        self._informers.stop()
        self._stop_election.set()
        if self._election_thread.ident is not None:
            self._election_thread.join(_STOP_LIMIT_S)
        log.info("the controllers stop")
