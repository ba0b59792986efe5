"""Threads that synchronize the keys of one controller."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from treenail import clocks, errors
from treenail.controllers.runtime import controller_metrics, informer_set, workqueue

log = logging.getLogger(__name__)

_NO_LEAD_RETRY_S = 1.0
_MIN_REQUEUE_S = 0.001
"""The rest of a wait may be 1e-15 s by rounding: too little for a clock, so the wait never ends."""

Enqueue = Callable[[str], None]
"""Queues a key for the controller; callable from any thread."""


class Controller(Protocol):
    """Reconciles objects of the cluster, one key at a time.

    Workers process different keys concurrently, but never the same key. All state is in the
    cluster: the process may end between any two writes.
    """

    @property
    def name(self) -> str:
        """One word for logs and metrics."""

    def register_watches(self, informers: informer_set.InformerSet, enqueue: Enqueue) -> None:
        """Add the views that the controller needs, and enqueue keys when they change."""

    def sync_key(self, key: str) -> float | None:
        """Reconcile one key; return the seconds until the next sync, None to wait for a change.

        It must not block for long. Raises `TreenailError` to retry with back-off.
        """

    def close(self) -> None:
        """Release resources; the worker pool no longer calls ``sync_key``."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """A controller, its number of workers, and its retry delays."""

    controller: Controller
    workers: int = 2
    first_retry_s: float = 0.25
    """Delay after the first error of a key; each further one doubles it."""
    max_retry_s: float = 60.0


class WorkerMetrics:
    """Metrics of every controller."""

    def __init__(self, metrics: controller_metrics.ControllerMetrics) -> None:
        by_controller = ("controller",)
        self.syncs = metrics.add_counter(
            "reconciles_total", "Syncs by result.", ("controller", "result")
        )
        self.errors = metrics.add_counter(
            "reconcile_errors_total", "Syncs that failed and are retried.", by_controller
        )
        self.sync_durations = metrics.add_histogram(
            "reconcile_duration_seconds",
            "Duration of a sync.",
            by_controller,
            buckets=controller_metrics.FAST_BUCKETS_S,
        )
        self.queue_durations = metrics.add_histogram(
            "workqueue_queue_duration_seconds",
            "Time that a key waited for a worker.",
            by_controller,
            buckets=controller_metrics.FAST_BUCKETS_S,
        )
        self.depth = metrics.add_gauge(
            "workqueue_depth", "Keys that wait for a worker.", by_controller
        )
        self.longest_sync = metrics.add_gauge(
            "longest_running_sync_seconds", "Duration of the longest running sync.",
            by_controller,
        )  # fmt: skip


class WorkerPool:
    """Queue and worker threads of one controller."""

    def __init__(
        self, crew: ControllerSettings, clock: clocks.Clock, measured: WorkerMetrics
    ) -> None:
        self._settings = crew
        self._clock = clock
        self._metrics = measured
        self._controller = crew.controller
        self._name = crew.controller.name
        self.needs: Mapping[str, bool] = {}  # the watched kinds, and whether each is required
        self._started_at: dict[int, float] = {}
        self._is_leader: Callable[[], bool] = lambda: True
        self._threads = [
            threading.Thread(target=self._run_worker, name=f"{self._name}-{number}", daemon=True)
            for number in range(crew.workers)
        ]
        self.queue = workqueue.WorkQueue(
            clock, first_retry_s=crew.first_retry_s, max_retry_s=crew.max_retry_s
        )
        measured.depth.set_function(self._name, by=self.queue.__len__)
        measured.longest_sync.set_function(self._name, by=lambda: self.longest_sync_s)

    def register_watches(self, informers: informer_set.InformerSet) -> None:
        """Register the controller's views. Call it before the informers start."""
        self.needs = informers.begin_controller()
        self._controller.register_watches(informers, self.queue.add)

    def start(self, is_leader: Callable[[], bool]) -> None:
        """Start the workers. They start no sync while ``is_leader`` returns False."""
        log.info("starting controller %s", self._name)
        self._is_leader = is_leader
        for thread in self._threads:
            thread.start()

    def stop(self, limit_s: float) -> None:
        """Start no other sync, and wait up to ``limit_s`` for the running ones."""
        self.queue.close()
        end = self._clock.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(end - self._clock.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            log.warning(
                "controller %s: a sync did not end in time; stopping without it", self._name
            )
        else:
            self._controller.close()

    @property
    def longest_sync_s(self) -> float:
        """Duration of the longest running sync; 0 without one."""
        began = list(self._started_at.values())
        return self._clock.monotonic() - min(began) if began else 0.0

    def _run_worker(self) -> None:
        while (taken := self.queue.get()) is not None:
            key, waited_s = taken
            if not self._is_leader():
                # A late renewal keeps the lead; a lost one closes the queue.
                self.queue.add_after(key, _NO_LEAD_RETRY_S)
                self.queue.done(key)
                continue
            self._metrics.queue_durations.observe(waited_s, self._name)
            began = self._clock.monotonic()
            self._started_at[threading.get_ident()] = began
            result = self._sync_key(key)
            del self._started_at[threading.get_ident()]
            self._metrics.sync_durations.observe(self._clock.monotonic() - began, self._name)
            self._metrics.syncs.increment(self._name, result)
            self.queue.done(key)

    def _sync_key(self, key: str) -> str:
        """Sync the key and schedule its next sync; return the result label."""
        try:
            requeue_s = self._controller.sync_key(key)
        except errors.TreenailError as error:
            min_s = error.retry_after_s if isinstance(error, errors.TooManyRequestsError) else 0.0
            pause_s = self.queue.add_rate_limited(key, min_s=min_s)
            # A conflict is normal: another program wrote the object first.
            level = logging.INFO if isinstance(error, errors.ConflictError) else logging.WARNING
            log.log(level, "%s: retrying %s in %.1f s: %s", self._name, key, pause_s, error)
        except Exception:
            # A bug with one object must not block all others.
            pause_s = self.queue.add_rate_limited(key)
            log.exception("%s: retrying %s in %.1f s", self._name, key, pause_s)
        else:
            self.queue.forget(key)
            if requeue_s is None:
                return "success"
            self.queue.add_after(key, max(requeue_s, _MIN_REQUEUE_S))
            return "requeue_after"
        self._metrics.errors.increment(self._name)
        return "error"
