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
from treenail.controllers.runtime.metrics import Metrics
from treenail.controllers.runtime.workers import Crew, Measured, Workers

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_STOP_LIMIT_S = 25.0
"""Less than a pod's default grace period of 30 s."""
_STUCK_S = 600.0


class Leadership(Protocol):
    """`treenail.kube.lease.Election`, or the certainty of being alone."""

    @property
    def is_leader(self) -> bool: ...
    def run(self, stop: threading.Event) -> None: ...


class Alone:
    """Leads always: for where there is only one process."""

    is_leader = True

    def run(self, stop: threading.Event) -> None:
        stop.wait()


Stand = Callable[[Callable[[], None], Callable[[], None]], Leadership]
"""From what to do on gain and on loss to the candidate that does it."""


def alone(on_gain: Callable[[], None], _on_loss: Callable[[], None]) -> Leadership:
    """Nobody else stands for election."""
    on_gain()
    return Alone()


class Runtime:
    """Runs controllers until it is told to stop, or does not lead any more."""

    def __init__(
        self,
        crews: Sequence[Crew],
        informers: Informers,
        clock: Clock,
        metrics: Metrics,
        *,
        stand: Stand = alone,
    ) -> None:
        measured = Measured(metrics)
        self._workers = [Workers(crew, clock, measured) for crew in crews]
        self._informers = informers
        self._elected = threading.Event()
        self._over = threading.Event()
        self._leadership = stand(self._elected.set, self._over.set)
        self._ended = threading.Event()
        self._candidate = threading.Thread(
            target=self._leadership.run, args=(self._ended,), name="leader-election", daemon=True
        )
        metrics.gauge("leader", "Whether this process is the one that acts.").read(
            by=lambda: float(self._leadership.is_leader)
        )

    def run(self, stop: threading.Event) -> bool:
        """Work until ``stop``; False when that was because another process leads now.

        What is under way when it is time to stop is finished, nothing else is begun, and the lease
        is given back only then.
        """
        for workers in self._workers:
            workers.watch(self._informers)
        self._informers.start()
        self._candidate.start()
        try:
            if self._ready_to_lead(stop):
                log.info("the controllers start")
                for workers in self._workers:
                    workers.start(lambda: self._leadership.is_leader)
                while not (stop.is_set() or self._over.is_set()):
                    stop.wait(_LOOK_S)
            # Not later: giving the lease back is no loss.
            lost = self._over.is_set()
        finally:
            self._stop()
        return not lost

    @property
    def missing(self) -> str:
        """What it waits for before it could work; empty when it could."""
        return self._informers.missing

    @property
    def stuck(self) -> str:
        """What does not go on any more; empty when all does."""
        return "; ".join(
            f"a turn is under way for {workers.longest_s:.0f} s"
            for workers in self._workers
            if workers.longest_s > _STUCK_S
        )

    def _ready_to_lead(self, stop: threading.Event) -> bool:
        """Wait until everything was seen and this process leads; False when it is to stop."""
        while not (stop.is_set() or self._over.is_set()):
            if self._informers.wait_until_synced(_LOOK_S) and self._elected.wait(_LOOK_S):
                return True
        return False

    def _stop(self) -> None:
        for workers in self._workers:
            workers.queue.close()
        for workers in self._workers:
            workers.stop(_STOP_LIMIT_S)
        self._informers.stop()
        self._ended.set()
        if self._candidate.ident is not None:
            self._candidate.join(_STOP_LIMIT_S)
        log.info("the controllers stop")
