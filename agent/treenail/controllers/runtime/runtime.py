"""Run controllers in one process: their watches, their workers and the leader election.

The watches also run without the lead, so that this process can take over at once. Workers run only
with it. A process that loses the lead exits, as client-go's programs do, and the kubelet restarts
it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from treenail.clocks import Clock
from treenail.controllers.runtime import controller_metrics, informer_set
from treenail.controllers.runtime.workers import ControllerSettings, WorkerMetrics, WorkerPool

log = logging.getLogger(__name__)

_POLL_S = 0.5
_LIST_POLL_S = 0.05
_STOP_LIMIT_S = 20.0
"""Of all parts together; with the last Events less than the default grace period of a pod, 30 s."""
_STUCK_S = 600.0


class Leadership(Protocol):
    """Leader election: `treenail.kube.lease.LeaderElector` or `SoleLeader`."""

    @property
    def is_leader(self) -> bool: ...
    def run(self, stop: threading.Event) -> None: ...


class SoleLeader:
    """Always leads: for a single process without a Lease."""

    is_leader = True

    def run(self, stop: threading.Event) -> None:
        stop.wait()


MakeElector = Callable[[Callable[[], None], Callable[[], None]], Leadership]
"""Builds the elector from its two callbacks: started leading, stopped leading."""


def make_sole_leader(
    on_started_leading: Callable[[], None], _on_stopped_leading: Callable[[], None]
) -> Leadership:
    """Lead at once, without an election."""
    on_started_leading()
    return SoleLeader()


class ControllerRuntime:
    """Runs controllers until it is stopped or loses the lead."""

    def __init__(
        self,
        settings: Sequence[ControllerSettings],
        informers: informer_set.InformerSet,
        clock: Clock,
        metrics: controller_metrics.ControllerMetrics,
        *,
        make_elector: MakeElector = make_sole_leader,
        stop_limit_s: float = _STOP_LIMIT_S,
    ) -> None:
        measured = WorkerMetrics(metrics)
        self._workers = [WorkerPool(crew, clock, measured) for crew in settings]
        self._informers = informers
        self._clock = clock
        self._metrics = metrics
        self._stop_limit_s = stop_limit_s
        self._elected = threading.Event()
        self._elected_at = 0.0
        self._leadership_lost = threading.Event()
        self._leadership = make_elector(self._begin_lead, self._leadership_lost.set)
        self._stop_election = threading.Event()
        self._election_thread = threading.Thread(
            target=self._leadership.run,
            args=(self._stop_election,),
            name="leader-election",
            daemon=True,
        )
        metrics.add_gauge("leader", "1 when this process leads.").set_function(
            by=lambda: float(self._leadership.is_leader)
        )

    def run(self, stop: threading.Event) -> bool:
        """Run until ``stop``; return False when another process leads now.

        Running syncs finish before the Lease is released, and no other sync starts.
        """
        for workers in self._workers:
            workers.register_watches(self._informers)
        self._register_watch_gauges()
        self._informers.start()
        self._election_thread.start()
        try:
            waiting: Sequence[WorkerPool] = self._workers
            while not (stop.is_set() or self._leadership_lost.is_set()):
                self._informers.check_silent()
                if not self._elected.wait(_POLL_S):
                    continue
                waiting = self._start_synced(waiting)
                stop.wait(_LIST_POLL_S if waiting else _POLL_S)
            # Read it before the stop: releasing the Lease also calls on_stopped_leading.
            lost = self._leadership_lost.is_set()
        finally:
            self._stop_workers()
        return not lost

    @property
    def is_leader(self) -> bool:
        """True while this process may write."""
        return self._leadership.is_leader

    @property
    def unready_reason(self) -> str:
        """Why no controller could decide now: kinds not listed, or watches out of date."""
        for workers in self._workers:
            required = [plural for plural, is_required in workers.needs.items() if is_required]
            if not self._informers.describe_staleness(required):
                return ""
        return self._informers.describe_staleness()

    @property
    def degraded_reason(self) -> str:
        """The kinds that cannot be watched, and why; empty when all can."""
        degraded = self._informers.degraded
        return "; ".join(f"degraded: {plural}: {error}" for plural, error in degraded.items())

    @property
    def stuck_reason(self) -> str:
        """The syncs that take too long; empty when none does."""
        return "; ".join(
            f"a sync has been running for {workers.longest_sync_s:.0f} s"
            for workers in self._workers
            if workers.longest_sync_s > _STUCK_S
        )

    def _begin_lead(self) -> None:
        self._elected_at = self._clock.monotonic()
        self._elected.set()

    def _start_synced(self, waiting: Sequence[WorkerPool]) -> Sequence[WorkerPool]:
        """Start the controllers whose kinds are listed since the election; return the others.

        A watch may lag behind the last writes of the previous leader. A list does not.
        """
        self._informers.request_lists(self._elected_at)
        rest = []
        for workers in waiting:
            if self._informers.can_start(workers.needs, self._elected_at):
                workers.start(lambda: self._leadership.is_leader)
            else:
                rest.append(workers)
        return rest

    def _register_watch_gauges(self) -> None:
        silence = self._metrics.add_gauge(
            "watch_silence_seconds",
            "Seconds since the API server last sent anything for a watched kind.",
            ("resource",),
        )
        degraded = self._metrics.add_gauge(
            "watch_degraded", "1 for a kind that cannot be listed or watched.", ("resource",)
        )

        def set_functions(plural: str) -> None:
            silence.set_function(plural, by=lambda: self._informers.measure_silence_s(plural))
            degraded.set_function(plural, by=lambda: float(plural in self._informers.degraded))

        for plural in self._informers.plurals:
            set_functions(plural)

    def _stop_workers(self) -> None:
        for workers in self._workers:
            workers.queue.close()
        end = self._clock.monotonic() + self._stop_limit_s
        for workers in self._workers:
            workers.stop(max(end - self._clock.monotonic(), 0.0))
        self._stop_election.set()
        self._informers.stop(max(end - self._clock.monotonic(), 0.0))
        if self._election_thread.ident is not None:
            self._election_thread.join(max(end - self._clock.monotonic(), 0.0))
        log.info("stopped controllers")
